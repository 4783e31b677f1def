"""What several test files use: small models, gradients, masks written out, and data that many tests read."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from studying import QUICK
from torch import nn

from keepgrad.cli import main
from keepgrad.data.shapes import make_shapes
from keepgrad.ops.chain import Chain
from keepgrad.ops.oracle import Matrices, matrices
from keepgrad.ops.store import dither
from keepgrad.sampling import Kept, Layout, sample
from keepgrad.study.config import StudyConfig
from keepgrad.study.run import study

# One thread a process, here and in those that tests start: two tests run at a time, and sums keep their order.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Small models of timm for images of 16 pixels: by name, what they are made with, and the classes of their sites.
SMALL_MODELS = {
    "vit_tiny_patch16_224": ({"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}, {"Block"}),
    "swin_tiny_patch4_window7_224": (
        {"patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        {"SwinTransformerBlock", "WindowAttention"},
    ),
    "eva02_tiny_patch14_224": ({"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}, {"EvaBlock"}),
}


def vit(**kwargs):
    """A ViT of 2 blocks, 4x4 patches and a class token."""
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(**{**options, **kwargs})
    return spread(model).train()


def convnext(**kwargs):
    """A ConvNeXt of 5 blocks in 4 stages of 16x16 to 2x2 positions, for images of 64 pixels."""
    options = {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 20), "num_classes": 5, "ls_init_value": 0.5}
    torch.manual_seed(0)
    model = timm.models.convnext.ConvNeXt(**{**options, **kwargs})
    return spread(model).train()


def spread(model):
    """Parameters of ordinary size, so that no term of a gradient is too small to be seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model


def images(size=32, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64).to(dtype)


def grads(model, x, seed=None, weight=None):
    """Output and parameter gradients of one training step."""
    model.zero_grad()
    if seed is not None:
        torch.manual_seed(seed)
    y = model(x)
    (y.float() if y.dtype in (torch.bfloat16, torch.float16) else y).square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return y.detach(), found


def assert_same(a: dict, b: dict, **tolerance):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")


def agreement(before, after, wanted):
    """The cosine of how far the weights of a model have moved with how far they should have."""
    start, *ends = (torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in (before, after, wanted))
    return float(torch.cosine_similarity(ends[0] - start, ends[1] - start, dim=0))


def run(links, x, kept, save, residual=None, noise=None):
    """A chain of stages and their tensors, run in the engine."""
    chain = Chain([stage for stage, _ in links], [len(tensors) for _, tensors in links])
    return chain.run(x, [t for _, tensors in links for t in tensors], kept, save, residual, noise)


def groups_of(kept: Kept) -> list[list[int]]:
    """The members of each slot."""
    if kept.slot_of_flat is None:
        return [[int(p)] for p in kept.picked]
    return [(kept.slot_of_flat[: kept.positions] == slot).nonzero().squeeze(1).tolist() for slot in range(kept.slots)]


def draw(seed: int, grid: Layout, ratio: float, mask: str, reduce: str, batch: int = 2) -> Kept | None:
    return sample(torch.tensor(seed), batch, grid, ratio, mask, reduce)


def written_out(seed: int, grid: Layout, ratio: float, mask: str, reduce: str) -> Matrices:
    """The matrices of the mask that a model with `seed` draws in its first step."""
    kept = draw(seed, grid, ratio, mask, reduce)
    positions = grid.positions
    if kept is None:
        every = list(range(positions))
        return matrices([[p] for p in every], every, positions, "drop")
    return matrices(groups_of(kept), kept.picked.tolist(), positions, reduce, grid.prefix)


def noise(seed=0):
    return dither(seed, torch.empty(0))


def decoded(codes, scales):
    """Packed values as numbers, written out in numpy."""
    return torch.from_numpy(codes.numpy() * scales.numpy().view(np.float32)).flatten(-2)


def cosine(a, b):
    a, b = (torch.cat([g.double().flatten() for g in one.values()]) for one in (a, b))
    return float(torch.cosine_similarity(a, b, dim=0))


def line_of(capsys, *args):
    """What a command says that cannot go on: a single line."""
    assert main(args) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"keepgrad {args[0]}: ")
    assert said.count("\n") == 1
    assert len(said) < 1000
    return said


def fingerprint(model):
    """All that a module tree is made of."""
    modules = {name: (type(m), {k: id(v) for k, v in vars(m).items()}) for name, m in model.named_modules()}
    values = {name: t.clone() for name, t in model.state_dict(keep_vars=True).items()}
    identity = {name: id(p) for name, p in model.named_parameters()}
    hooks = {name: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for name, m in model.named_modules()}
    return modules, identity, hooks, values


def assert_unchanged(model, before):
    after = fingerprint(model)
    assert after[:3] == before[:3]
    assert after[3].keys() == before[3].keys()
    assert all(torch.equal(after[3][k], before[3][k]) for k in after[3])


class Noisy(nn.Module):
    """A layer that keepgrad does not know, with dropout inside."""

    def __init__(self, width, out):
        super().__init__()
        self.layer, self.drop = nn.Linear(width, out), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.layer(x))


MAKES = {"vit": (vit, 32), "convnext": (convnext, 64)}
both = pytest.mark.parametrize(("make", "size"), MAKES.values(), ids=MAKES)


@pytest.fixture
def twin():
    """A deep copy of a model, to compare with."""
    return copy.deepcopy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty small images of three classes to train on, and twelve to evaluate on."""
    root = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 14), ("val", 4)):
        for number, kind in enumerate(("apple", "bird", "cat")):
            (root / split / kind).mkdir(parents=True)
            for index in range(count):
                pixels = torch.randint(128, (40, 36, 3), generator=generator, dtype=torch.uint8)
                pixels[..., number] += 100
                Image.fromarray(pixels.numpy()).save(root / split / kind / f"{index}.png")
    return root


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a study of a small model; not to be written to."""
    output = tmp_path_factory.mktemp("study")
    study(StudyConfig(**QUICK), output)
    return output


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """A few images of shapes in COCO's layout; not to be written to."""
    return make_shapes(tmp_path_factory.mktemp("shapes"), train=6, val=3)
