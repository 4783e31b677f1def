"""Patched models in the loops and tools of torch: what a plain model is accepted by, and what is refused in words."""

import contextlib
import copy
import inspect
import os
import typing
import warnings

import pytest
import torch
import torch.multiprocessing as mp
from conftest import assert_same, both, grads, images, vit
from families import FAMILIES
from processes import free_port
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.parallel import DistributedDataParallel

import keepgrad


@both
def test_a_patched_forward_looks_like_the_models_own(make, size):
    model = make()
    own = model.forward
    keepgrad.apply(model, keep_ratio=0.5)
    patched = model.forward
    assert patched is not own
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "__code__", "__defaults__"):
        assert getattr(patched, name) == getattr(own, name)
    for read in (inspect.signature, inspect.getfullargspec, inspect.unwrap, inspect.getsource, typing.get_type_hints):
        assert read(patched) == read(own), read.__name__
    assert not hasattr(patched, "__func__")  # accelerate would call it
    keepgrad.remove(model)
    assert model.forward == own
    keepgrad.apply(model, keep_ratio=0.5)
    assert_same(grads(copy.deepcopy(model), images(size), seed=0)[1], grads(model, images(size), seed=0)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@both
def test_what_accepts_a_plain_model_accepts_a_patched_one_in_evaluation(make, size):
    model, x = make().eval(), images(size)
    keepgrad.apply(model, keep_ratio=0.5)
    wanted = model(x)
    for strict in (False, True):
        torch.testing.assert_close(torch.export.export(model, (x,), strict=strict).module()(x), wanted)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), wanted)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), wanted)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("options", [{"keep_ratio": 0.5}, {"preset": "exact", "store": "int8"}], ids=str)
def test_what_cannot_see_through_a_patched_model_is_refused_in_words(options):
    model, x = vit(), images()
    keepgrad.apply(model, **options)
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    def forward_mode():
        math = torch.nn.attention.SDPBackend.MATH  # the others cannot, in the plain model either
        with torch.autograd.forward_ad.dual_level(), torch.nn.attention.sdpa_kernel(math):
            model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))

    tries = {
        "forward-mode differentiation": [forward_mode],
        "torch.func": [
            lambda: torch.func.grad(loss)(parameters, x),
            lambda: torch.func.vmap(model)(x[:, None]),
            lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None]),
        ],
        "torch.jit.trace": [lambda: torch.jit.trace(model, x, check_trace=False)],
        "torch.fx": [lambda: torch.fx.symbolic_trace(model)],
    }
    for what, runs in tries.items():
        for run in runs:
            with pytest.raises(keepgrad.UnsupportedByTorchError, match=rf"{what} cannot.*keepgrad\.exact"):
                run()
            with keepgrad.exact(model):
                run()
    with pytest.raises(keepgrad.UnsupportedByTorchError, match=r"torch\.jit\.script.*keepgrad\.remove"):
        torch.jit.script(model)
    keepgrad.remove(model)
    torch.jit.script(model)


def test_torch_fx_is_refused_also_where_programs_are_built_while_it_traces():
    """It gives proxies for weights; torchvision's feature extraction changes to training mode and traces again."""
    torchvision = pytest.importorskip("torchvision")
    from torchvision.models.feature_extraction import get_graph_node_names

    sizes = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": [4, 4]}
    model = torchvision.models.SwinTransformer(patch_size=[2, 2], num_classes=2, **sizes)
    keepgrad.apply(model, keep_ratio=0.5)
    with pytest.raises(keepgrad.UnsupportedByTorchError, match=r"torch\.fx cannot.*keepgrad\.exact"):
        get_graph_node_names(model)
    with keepgrad.exact(model):
        get_graph_node_names(model)


def test_functional_call_without_a_transform_trains_the_tensors_it_is_given():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, seed=0)
    wanted = grads(copy.deepcopy(model), images())[1]
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, given, (images(),)).square().sum().backward()
    assert_same({name: t.grad for name, t in given.items()}, wanted)
    assert all(p.grad is None for p in model.parameters())


def test_data_parallel_is_refused():
    with pytest.raises(keepgrad.ConfigError, match="DistributedDataParallel"):
        keepgrad.apply(nn.DataParallel(vit()))
    model = vit()
    keepgrad.apply(model)
    # What it does where there are several GPUs, with the meta device as the second of them: a copy, in a thread.
    copied = model._replicate_for_data_parallel()
    (found,) = _caught(copied, images().to("meta"))
    with pytest.raises(
        keepgrad.UnsupportedByTorchError, match=r"on cpu and its input on meta.*DistributedDataParallel"
    ):
        found.reraise()


def _caught(model, x):
    """What nn.DataParallel's `parallel_apply` brings back from a thread that failed."""
    try:
        model(x)
    except Exception:
        return [torch._utils.ExceptionWrapper(where="in replica 1 on device 1.")]
    return []


@both
def test_apply_activation_checkpointing(make, size):
    model = make(drop_path_rate=0.3).double()
    x = images(size, dtype=torch.float64)
    y, wanted = grads(model, x, seed=1)
    blocks = {type(m) for m in model.modules() if type(m).__name__ in ("Block", "ConvNeXtBlock")}
    keepgrad.apply(model, keep_ratio=1.0)
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) in blocks)
    y_again, found = grads(model, x, seed=1)
    torch.testing.assert_close(y_again, y)
    found = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in found.items()}
    assert_same(found, wanted)


WRAPPED = {
    "timm ViT": ["attn", "norm1", "mlp"],
    "timm BEiT": ["attn"],
    "timm ConvNeXt V2": ["mlp", "norm"],
    "timm Swin": ["attn", "norm2", "qkv"],
    "TransformerEncoderLayer": ["self_attn", "linear1"],
    "torchvision MViT 1": ["attn", "mlp"],
    "HF Llama": ["self_attn", "mlp", "input_layernorm"],
}


@pytest.mark.parametrize("first", ["apply", "wrap"])
@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in WRAPPED.items() for part in parts])
def test_apply_activation_checkpointing_of_parts_of_a_block(name, part, first):
    """The forward and the gradients are the plain model's, and where a site is lost that is said."""
    if name not in FAMILIES:
        pytest.skip("its library is not installed")
    family = FAMILIES[name]
    model = family.model()
    plain = copy.deepcopy(model)

    def wrap():
        parts = {id(m) for path, m in model.named_modules() if path.rpartition(".")[2] == part}
        apply_activation_checkpointing(model, check_fn=lambda module: id(module) in parts)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "keepgrad: .* now runs with full backprop: its .* is wrapped")
        steps = {"apply": lambda: keepgrad.apply(model, keep_ratio=1.0, store="full"), "wrap": wrap}
        for step in sorted(steps, key=lambda step: step != first):
            with contextlib.suppress(keepgrad.NoSiteError):
                steps[step]()
        found = []
        for one in (model, plain):
            torch.manual_seed(0)
            out = family.run(one)
            out.square().mean().backward()
            gradients = {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
            found.append((out, {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in gradients.items()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    assert_same(found[0][1], found[1][1], rtol=1e-3, atol=1e-5)


def test_an_optimizer_in_backward():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, seed=2)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    whole = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        model(images()).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        whole.zero_grad()
        twin(images()).square().mean().backward()
        whole.step()
    assert_same(model.state_dict(), twin.state_dict())


def test_ema_and_gradient_clipping():
    model = vit()
    plain = copy.deepcopy(model)
    keepgrad.apply(model, keep_ratio=1.0)
    found = []
    for one in (model, plain):
        average = torch.optim.swa_utils.AveragedModel(one, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            one(images()).square().sum().backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
            average.update_parameters(one)
        found.append(average)
    assert_same(found[0].state_dict(), found[1].state_dict())
    torch.testing.assert_close(found[0].eval()(images()), found[1].eval()(images()))


@pytest.mark.filterwarnings("default")
def test_compile_block_by_block():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, seed=2)
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    for block in twin.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        y, _ = grads(model, images())
        torch.testing.assert_close(grads(twin, images())[0], y)
    keepgrad.remove(model)
    keepgrad.remove(twin)
    keepgrad.apply(twin, keep_ratio=1.0)
    assert_same(grads(twin, images())[1], grads(model, images())[1], rtol=1e-4, atol=1e-4)


def wrapped(how, model):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if how.startswith("fsdp2"):
        types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if "bf16" in how else {}
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(**types))
        return fully_shard(model, mp_policy=MixedPrecisionPolicy(**types))
    return DistributedDataParallel(model, **({} if how == "ddp" else {how: True}))


WRAPPERS = ("static_graph", "find_unused_parameters", "fsdp2", "fsdp2 bf16")


def worker(rank, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    found = {}
    for how in WRAPPERS:
        model = vit()
        model.spare = nn.Linear(2, 2) if how == "find_unused_parameters" else nn.Identity()
        keepgrad.apply(model, keep_ratio=0.5, seed=9)
        parallel = wrapped(how, model)
        for step in range(2):
            model.zero_grad()
            keepgrad.set_step(model, step)
            parallel(images(batch=4)[2 * rank : 2 * rank + 2]).float().square().mean().backward()
        own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        own = {n: grad.full_tensor() if how.startswith("fsdp2") else grad for n, grad in own.items()}
        found[how] = {n: grad.numpy() for n, grad in own.items()}
    if rank == 0:
        queue.put(found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_processes_equal_one():
    """DDP with a static graph and with unused parameters, FSDP2 by block and with mixed precision."""
    context = mp.get_context("spawn")
    queue, port = context.SimpleQueue(), free_port()
    workers = [context.Process(target=worker, args=(rank, port, queue)) for rank in range(2)]
    for one in workers:
        one.start()
    found = queue.get()
    for one in workers:
        one.join()
        assert one.exitcode == 0
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, seed=9)
    keepgrad.set_step(model, 1)
    model(images(batch=4)).square().mean().backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    for how in WRAPPERS:
        own = {n: torch.from_numpy(grad) for n, grad in found[how].items()}
        if "bf16" not in how:
            assert_same(own, wanted, rtol=1e-3, atol=1e-5)
        assert own.keys() == wanted.keys()
        for name, grad in own.items():
            close = torch.cosine_similarity(grad.flatten(), wanted[name].flatten(), dim=0)
            assert close > 0.98 or wanted[name].abs().max() < 1e-4, (how, name)
