"""What one device of many holds, against what two processes really hold."""

import os
import socket
from itertools import pairwise

import conftest
import pytest
import torch
import torch.multiprocessing as mp
from conftest import images
from torch import nn

import keepgrad
from keepgrad import ConfigError
from keepgrad.adapters import find_blocks
from keepgrad.memory.sharding import bucket_bytes, gathered_bytes, shard_bytes

BATCH = (2, 3, 32, 32)


def model_of():
    """27 and 7 rows are shared unequally by two processes."""
    return conftest.vit(embed_dim=27, num_classes=7)


def held(tensors):
    """The bytes of the storages of tensors, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def worker(rank, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    found = {}
    for how in ("ddp", "fsdp"):
        model = model_of()
        keepgrad.apply(model, keep_ratio=0.5)
        parallel, whole = model, []
        if how == "ddp":
            parallel = nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.fsdp import fully_shard

            for block in find_blocks(model):
                fully_shard(block.module)
                # Parameters are plain tensors while they are gathered.
                block.module.mlp.fc1.register_forward_pre_hook(
                    lambda *_, model=model, whole=whole: whole.append(
                        sum(p.nbytes for p in model.parameters() if not hasattr(p, "to_local"))
                    )
                )
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        parallel(images(batch=2)).square().mean().backward()
        optimizer.step()
        states = [local(t) for state in optimizer.state.values() for t in state.values()]
        found[how] = {
            "parameters": held(local(p) for p in model.parameters()),
            "gradients": held(local(p.grad) for p in model.parameters()),
            "optimizer": sum(t.nbytes for t in states),
            "whole": max(whole, default=0),
        }
        if how == "ddp":
            buckets = parallel.reducer._get_zeros_like_grad_buckets()
            found[how]["buckets"] = sum(bucket.buffer().nbytes for bucket in buckets)
    queue.put((rank, found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def processes():
    """What each of two processes holds after a step, with DDP and with FSDP2."""
    context = mp.get_context("spawn")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    queue = context.SimpleQueue()
    workers = [context.Process(target=worker, args=(rank, port, queue)) for rank in range(2)]
    for one in workers:
        one.start()
    found = dict(queue.get() for _ in workers)
    for one in workers:
        one.join()
        assert one.exitcode == 0
    return found


def test_ddp_holds_everything_and_its_buckets(processes):
    model = model_of()
    alone, one_of_two = (keepgrad.estimate(model, BATCH, processes=count) for count in (1, 2))
    for found in processes.values():
        assert one_of_two.parameters == found["ddp"]["parameters"]
        assert one_of_two.optimizer == found["ddp"]["optimizer"]
        assert one_of_two.gradients - alone.gradients == found["ddp"]["buckets"] == bucket_bytes(model)


def test_fsdp_holds_shards(processes):
    model = model_of()
    estimated = keepgrad.estimate(model, BATCH, processes=2, fsdp=True)
    first, second = processes[0]["fsdp"], processes[1]["fsdp"]
    for found in (first, second):  # the shorter shards are padded
        assert estimated.parameters == found["parameters"]
        assert sum(shard_bytes(p, 2) for p in model.parameters()) == found["gradients"]
    assert second["optimizer"] < first["optimizer"] == estimated.optimizer


def test_fsdp_gathers_a_block_and_what_is_in_none(processes):
    model = model_of()
    blocks = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    rest = sum(p.nbytes for p in model.parameters()) - sum(blocks)
    for found in processes.values():
        assert found["fsdp"]["whole"] == rest + max(blocks)
    ahead = max(a + b for a, b in pairwise(blocks))
    assert gathered_bytes(model) == 2 * rest + ahead + 2 * max(blocks)


def test_shards_leave_activations_as_they_are():
    model = conftest.vit(embed_dim=48, depth=4)
    large = (64, 3, 32, 32)
    alone = keepgrad.estimate(model, large)
    shared = keepgrad.estimate(model, large, processes=8, fsdp=True)
    assert shared.activations >= alone.activations
    assert shared.parameters < alone.parameters / 7
    assert shared.temporary - alone.temporary == pytest.approx(gathered_bytes(model), rel=0.3)


def test_wrong_numbers_of_processes_are_said():
    with pytest.raises(ConfigError, match="processes=0: give a number from 1"):
        keepgrad.estimate(model_of(), BATCH, processes=0)
    with pytest.raises(ConfigError, match="processes=1: give a number from 2"):
        keepgrad.estimate(model_of(), BATCH, fsdp=True)
