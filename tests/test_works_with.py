"""keepgrad beside the rest of PyTorch: precision, copies, checkpoints, processes, the compiler."""

import copy
import io
import os
import pickle
import socket

import pytest
import torch
import torch.multiprocessing as mp
from conftest import assert_same, convnext, grads, images, vit
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import keepgrad

MAKES = {"vit": (vit, 32), "convnext": (convnext, 64)}
both = pytest.mark.parametrize(("make", "size"), MAKES.values(), ids=MAKES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("save", ["heavy", "input"])
@both
def test_autocast(make, size, dtype, save):
    model, x = make(), images(size)
    with torch.autocast("cpu", dtype=dtype):
        y, wanted = grads(model, x)
        keepgrad.apply(model, keep_ratio=1.0, save=save)
        y_kept, found = grads(model, x)
        torch.testing.assert_close(y_kept, y, rtol=0.02, atol=0.02)
        for name in wanted:
            assert found[name].dtype == wanted[name].dtype == torch.float32
            close = torch.cosine_similarity(found[name].flatten(), wanted[name].flatten(), dim=0)
            assert close > 0.99, name
        keepgrad.remove(model)
        keepgrad.apply(model, keep_ratio=0.5, save=save)
        assert torch.equal(grads(model, x)[0], y_kept)


def test_autocast_saves_hidden_rows_in_the_compute_dtype():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5)
    dtypes = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: dtypes.append((t.shape[-1:], t.dtype)) or t, lambda t: t),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        model(images())
    assert (torch.Size([96]), torch.bfloat16) in dtypes
    assert (torch.Size([72]), torch.bfloat16) in dtypes


def test_autocast_keeps_weights_trainable_for_what_runs_beside_it():
    """A cast cached inside keepgrad would carry no graph and take the gradient from the exact pass."""
    model, x = vit(), images()
    keepgrad.apply(model, keep_ratio=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = model(x)
        with keepgrad.exact(model):
            model(x).float().square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    del kept


def test_grad_scaler():
    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, seed=0)
    twin = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(images()).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    with torch.autocast("cpu", dtype=torch.float16):
        twin(images()).float().square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.99, name
    before = [p.clone() for p in model.parameters()]
    scaler.step(optimizer)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("conv_mlp", [False, True])
def test_channels_last(conv_mlp):
    model = convnext(conv_mlp=conv_mlp)
    keepgrad.apply(model, keep_ratio=0.5, downsample=True, seed=0)
    twin = copy.deepcopy(model).to(memory_format=torch.channels_last)
    y, wanted = grads(model, images(64))
    y_last, found = grads(twin, images(64).to(memory_format=torch.channels_last))
    torch.testing.assert_close(y_last, y)
    assert_same(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [0, 1])
@both
def test_small_batches_and_strided_input(make, size, batch):
    model = make()
    keepgrad.apply(model, keep_ratio=0.5)
    x = images(size, batch=2).transpose(2, 3)[:batch]
    grads(model, x)


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


@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize(
    "frozen", ["mlp.fc1", "attn.qkv", "attn.proj", "norm1", "blocks.0", "bias", "gamma", "patch_embed", "weight"]
)
def test_frozen_parameters_get_no_gradient_and_the_others_the_right_one(frozen, save):
    model = vit(init_values=0.5, class_token=False, global_pool="avg", pos_embed="none").double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    x = images(dtype=torch.float64)
    _, wanted = grads(model, x)
    keepgrad.apply(model, keep_ratio=1.0, save=save)
    assert_same(grads(model, x)[1], wanted)


def test_frozen_parameters_cost_no_work():
    from torch.utils.flop_counter import FlopCounterMode

    def flops(model):
        with FlopCounterMode(display=False) as counter:
            grads(model, images())
        return counter.get_total_flops()

    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, reduce="drop")
    all_trained = flops(model)
    kept, tokens, width = 9, 17, 24
    assert tokens > kept
    fc1 = model.blocks[1].mlp.fc1.weight.requires_grad_(False)
    assert all_trained - flops(model) == 2 * 2 * kept * width * 4 * width  # the one product that is gone
    fc1.requires_grad_(True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.head.weight.requires_grad_(True)
    head_only = flops(model)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images())
    assert head_only == counter.get_total_flops() + 2 * 2 * width * 5


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


@pytest.mark.parametrize("trained", ["mlp.fc1.bias", "mlp.fc2", "attn.qkv.bias", "attn.q_norm", "attn.proj.bias"])
@pytest.mark.parametrize("save", ["heavy", "input"])
@pytest.mark.parametrize("method", ["qkv", "query", "head"])
def test_a_single_trained_layer_in_a_frozen_model(trained, save, method):
    model = vit(depth=1, qk_norm=True, proj_drop_rate=0.3).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    x = images(dtype=torch.float64)
    _, wanted = grads(model, x, seed=1)
    for ratio in (1.0, 0.5):
        keepgrad.apply(model, keep_ratio=ratio, save=save, attention=method)
        _, found = grads(model, x, seed=1)
        if ratio == 1:
            assert_same(found, wanted)
        assert found.keys() == wanted.keys()
        keepgrad.remove(model)


@pytest.mark.parametrize("method", ["qkv", "query", "head"])
def test_a_frozen_projection_costs_less_with_every_method(method):
    from torch.utils.flop_counter import FlopCounterMode

    model = vit()
    keepgrad.apply(model, keep_ratio=0.5, attention=method)
    counts = []
    for trained in (True, False):
        model.blocks[1].attn.qkv.weight.requires_grad_(trained)
        with FlopCounterMode(display=False) as counter:
            grads(model, images())
        counts.append(counter.get_total_flops())
    assert counts[1] < counts[0]


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


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("options", [{}, {"seed": 4}, {"attention": "head"}, {"attention": "query", "save": "input"}])
@both
def test_compile_the_whole_model_without_recompiling(make, size, options):
    if make is convnext and "attention" in options:
        pytest.skip("no attention")
    model = make(drop_path_rate=0.2)
    keepgrad.apply(model, keep_ratio=0.5, mask="random", **options)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            model.zero_grad()
            compiled(images(size)).square().sum().backward()
            found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    name = next(n for n in found[0] if "fc1.weight" in n)
    assert not torch.equal(found[0][name], found[1][name])
    assert not torch.equal(found[1][name], found[2][name])


@pytest.mark.filterwarnings("default")
def test_compile_a_model_for_images_of_any_aspect():
    model = vit(dynamic_img_size=True)
    keepgrad.apply(model, keep_ratio=0.5)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    wide = images(32)[..., :16, :]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            compiled(wide).square().sum().backward()


@pytest.mark.filterwarnings("default")
@both
def test_compiled_gradients_equal_eager_ones(make, size):
    model = make()
    keepgrad.apply(model, keep_ratio=0.5, seed=2)
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(twin, fullgraph=True)
    for _ in range(2):
        y, wanted = grads(model, images(size))
        twin.zero_grad()
        y_compiled = compiled(images(size))
        y_compiled.square().sum().backward()
        torch.testing.assert_close(y_compiled, y, rtol=1e-4, atol=1e-4)
        assert_same({n: p.grad for n, p in twin.named_parameters()}, wanted, rtol=1e-3, atol=1e-3)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ddp_worker(rank, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = vit().double()
    keepgrad.apply(model, keep_ratio=0.5, seed=9)
    parallel = DistributedDataParallel(model)
    x = images(batch=4, dtype=torch.float64)[2 * rank : 2 * rank + 2]
    parallel(x).square().mean().backward()
    if rank == 0:
        queue.put({n: p.grad.numpy() for n, p in model.named_parameters()})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_ddp_in_two_processes_equals_one():
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    port = free_port()
    workers = [context.Process(target=ddp_worker, args=(rank, port, queue)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = {name: torch.from_numpy(grad) for name, grad in queue.get().items()}
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    model = vit().double()
    keepgrad.apply(model, keep_ratio=0.5, seed=9)
    model(images(batch=4, dtype=torch.float64)).square().mean().backward()
    assert_same(found, {n: p.grad for n, p in model.named_parameters()})


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
