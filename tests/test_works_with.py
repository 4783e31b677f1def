"""keepgrad beside the rest of PyTorch: accumulation, copies, checkpoints, hooks, processes, devices."""

import copy
import io
import pickle

import pytest
import torch
from conftest import assert_same, both, grads, images, vit
from processes import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import keepgrad


@both
def test_gradient_accumulation_is_the_sum_over_the_batches(make, size):
    model = make().double()
    keepgrad.apply(model, keep_ratio=1.0)
    x = images(size, batch=4, dtype=torch.float64)
    _, whole = grads(model, x)
    model.zero_grad()
    for part in x.split(2):
        model(part).square().sum().backward()
    assert_same({n: p.grad for n, p in model.named_parameters()}, whole)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_a_block(reentrant):
    model = vit(proj_drop_rate=0.3, drop_path_rate=0.3)
    x = torch.randn(2, 17, 24)

    def step(recompute, seed=5):
        model.zero_grad()
        torch.manual_seed(seed)
        y = x.clone().requires_grad_()
        for block in model.blocks:
            y = checkpoint(block, y, use_reentrant=reentrant) if recompute else block(y)
        y.square().sum().backward()
        return y.detach(), {n: p.grad.clone() for n, p in model.blocks.named_parameters()}

    keepgrad.apply(model, keep_ratio=1.0)
    y, wanted = step(recompute=False)
    y_again, found = step(recompute=True)
    torch.testing.assert_close(y_again, y)
    assert_same(found, wanted, rtol=1e-4, atol=1e-5)
    keepgrad.remove(model)
    keepgrad.apply(model, keep_ratio=0.5)
    torch.testing.assert_close(step(recompute=True)[0], y)


def test_timms_own_checkpointing():
    model = vit(drop_path_rate=0.3)
    y, _ = grads(model, images(), seed=1)
    model.set_grad_checkpointing()
    keepgrad.apply(model, keep_ratio=0.5)
    torch.testing.assert_close(grads(model, images(), seed=1)[0], y)


@both
def test_a_deep_copy_is_patched_on_its_own(make, size):
    model = make()
    keepgrad.apply(model, keep_ratio=0.5, seed=3)
    twin = copy.deepcopy(model)
    patches = [m for m in twin.modules() if "forward" in vars(m)]
    assert patches
    assert all(m.forward.module is m for m in patches)
    own = {id(m) for m in twin.modules()}
    assert all(id(m.forward.module) in own for m in patches)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    assert_same(grads(copy.deepcopy(twin), images(size))[1], grads(twin, images(size))[1])
    keepgrad.remove(twin)
    with keepgrad.exact(model):
        pass


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
@both
def test_pickle_and_save(make, size, how):
    model = make()
    keepgrad.apply(model, keep_ratio=0.5, seed=3, layers=lambda name: "0" in name)
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert_same(grads(twin, images(size))[1], grads(model, images(size))[1], rtol=0, atol=0)
    keepgrad.remove(twin)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    make().load_state_dict(torch.load(file, weights_only=True))


def test_saved_tensors_can_be_offloaded():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, seed=0)
    twin = copy.deepcopy(model)
    _, wanted = grads(model, images())
    with torch.autograd.graph.save_on_cpu():
        _, found = grads(twin, images())
    assert_same(found, wanted, rtol=0, atol=0)


def test_layers_changed_after_apply_are_seen():
    class LoRA(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    class Twice(nn.Module):
        def forward(self, x):
            return x * torch.tanh(x)

    model = vit().double()
    keepgrad.apply(model, keep_ratio=1.0)
    torch.manual_seed(0)
    for block in model.blocks:
        block.mlp.fc1 = LoRA(block.mlp.fc1.requires_grad_(False)).double()
        block.attn.qkv = LoRA(block.attn.qkv.requires_grad_(False)).double()
        block.mlp.act = Twice()
    nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.fc2)
    hooked = []
    model.blocks[1].norm2.register_forward_hook(lambda *_: hooked.append(1))
    x = images(dtype=torch.float64)
    y, found = grads(model, x)
    assert hooked == [1]
    keepgrad.remove(model)
    y_plain, wanted = grads(model, x)
    torch.testing.assert_close(y, y_plain)
    assert_same(found, wanted)
    keepgrad.apply(model, keep_ratio=0.5)
    torch.testing.assert_close(grads(model, x)[0], y_plain)


def test_hooks_on_a_branch_fire():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5)
    seen = []
    model.blocks[0].attn.register_forward_hook(lambda *_: seen.append("attn"))
    model.blocks[0].mlp.register_forward_hook(lambda *_: seen.append("mlp"))
    with pytest.warns(UserWarning, match=r"blocks\.0 \(attention\) now runs with full backprop: .* has hooks") as said:
        model(images())
    assert len(said) == 1
    assert seen == ["attn", "mlp"]


def test_attention_masks_reach_the_attention():
    model = vit(depth=1).double()
    x = torch.randn(2, 17, 24, dtype=torch.float64)
    mask = torch.rand(17, 17) > 0.3
    mask.fill_diagonal_(True)
    block = model.blocks[0]
    for options in ({"attn_mask": mask}, {"is_causal": True}):
        y, _ = block(x, **options), block.zero_grad()
        y.square().sum().backward()
        wanted = {n: p.grad.clone() for n, p in block.named_parameters()}
        block.zero_grad()
        keepgrad.apply(block, keep_ratio=1.0)
        torch.testing.assert_close(block(x, **options), y)
        block(x, **options).square().sum().backward()
        assert_same({n: p.grad for n, p in block.named_parameters()}, wanted)
        keepgrad.remove(block)


def test_second_derivatives_are_refused():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5)
    x = images().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def ddp_worker(path):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = vit().double()
    keepgrad.apply(model, keep_ratio=0.5, seed=9)
    parallel = DistributedDataParallel(model)
    x = images(batch=4, dtype=torch.float64)[2 * rank : 2 * rank + 2]
    parallel(x).square().mean().backward()
    if rank == 0:
        torch.save({n: p.grad for n, p in model.named_parameters()}, path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_ddp_in_two_processes_equals_one(tmp_path):
    path = str(tmp_path / "grads.pt")
    done = run(("-c", f"import test_works_with; test_works_with.ddp_worker({path!r})"), processes=2)
    assert done.returncode == 0, done.stderr
    model = vit().double()
    keepgrad.apply(model, keep_ratio=0.5, seed=9)
    model(images(batch=4, dtype=torch.float64)).square().mean().backward()
    assert_same(torch.load(path), {n: p.grad for n, p in model.named_parameters()})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both
def test_cuda_equals_the_cpu(make, size):
    model = make()
    keepgrad.apply(model, keep_ratio=0.5, seed=3)
    twin = copy.deepcopy(model).cuda()
    y, wanted = grads(model, images(size))
    y_cuda, found = grads(twin, images(size).cuda())
    torch.testing.assert_close(y_cuda.cpu(), y, rtol=1e-3, atol=1e-3)
    assert_same({n: g.cpu() for n, g in found.items()}, wanted, rtol=1e-2, atol=1e-2)
