"""What `keepgrad bench` measures, and what it does when something fails."""

import json
from contextlib import contextmanager

import conftest
import pytest
import torch
from conftest import images
from torch import nn

import keepgrad.ops.branch
from keepgrad.bench import Check, Task, bench, check
from keepgrad.cli import main
from keepgrad.memory import saved_bytes
from keepgrad.methods import CHECKPOINTING, FULL, Method, kept

HALF = kept(keep_ratio=0.5)
EXACT = kept(preset="exact")


def task(**options):
    return Task(conftest.vit(), images(batch=4), **options)


def failing(name, error):
    @contextmanager
    def put_on(model):
        def forward(x):
            model(x)
            raise error

        yield forward

    return Method(name, put_on)


def test_every_column_is_measured():
    one = task()
    found = bench(one, [FULL, CHECKPOINTING, EXACT, HALF], rounds=3, title="a ViT")
    full, checkpointing, exact, half = found.rows
    assert full.saved == saved_bytes(lambda: one.model(one.given), one.model)
    assert checkpointing.saved < half.saved < exact.saved < full.saved
    assert half.peak < full.peak
    assert full.cosine == pytest.approx(1)
    assert exact.cosine == pytest.approx(1, abs=1e-5)
    assert 0.5 < half.cosine < 0.9999
    assert [len(row.seconds) for row in found.rows] == [3] * 4
    assert all(p.grad is None for p in one.model.parameters())
    (table,) = found.tables()
    assert table.head == ("method", "saved", "", "peak", "", "time", "images/s", "cosine")
    assert [row[0] for row in table.rows] == ["full backprop", "checkpointing", "keepgrad exact", "keepgrad 0.5"]
    assert table.rows[0][5] == "1.00x (1.00-1.00)"
    assert table.rows[0][6] == f"{4 / sorted(full.seconds)[1]:.3g}"
    assert table.note == ""


def test_a_method_that_does_not_fit_is_said_and_the_others_go_on():
    greedy = failing("greedy", torch.OutOfMemoryError("CUDA out of memory"))
    on_cpu = failing("on the CPU", RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    broken = failing("broken", ValueError("two\nlines"))
    found = bench(task(), [FULL, greedy, on_cpu, broken, HALF], rounds=2, title="")
    assert [row.problem for row in found.rows] == ["", "out of memory", "out of memory", "two lines", ""]
    assert [len(row.seconds) for row in found.rows] == [2, 0, 0, 0, 2]
    assert "left out: greedy, on the CPU: out of memory\nleft out: broken: two lines" in str(found)


def test_where_full_backprop_does_not_fit_the_next_one_is_compared_with():
    greedy = failing("full backprop", torch.OutOfMemoryError("CUDA out of memory"))
    found = bench(task(), [greedy, HALF, CHECKPOINTING, EXACT], rounds=2, title="")
    assert found.base.name == "keepgrad 0.5"
    _, half, checkpointing, exact = found.rows
    assert half.cosine is None  # nothing exact was known yet
    assert checkpointing.cosine == exact.cosine == pytest.approx(1)


def test_memory_that_runs_out_in_the_rounds_is_said_too():
    @contextmanager
    def put_on(model):
        calls = iter(range(4))

        def forward(x):
            if next(calls, None) is None:
                raise torch.OutOfMemoryError
            return model(x)

        yield forward

    found = bench(task(), [FULL, Method("later", put_on)], rounds=2, title="")
    assert found.rows[1].problem == "out of memory"
    assert len(found.rows[0].seconds) == 2


def test_ctrl_c_leaves_what_was_measured():
    found = bench(task(), [FULL, HALF, failing("slow", KeyboardInterrupt()), EXACT], rounds=2, title="")
    assert found.interrupted
    assert [row.name for row in found.rows] == ["full backprop", "keepgrad 0.5"]
    assert "keepgrad 0.5" in str(found)


@pytest.mark.parametrize("amp", [None, "bf16"])
def test_the_check_passes(amp):
    found = check(task(amp=amp))
    assert [one.what for one in found] == [
        "forward pass, default",
        "forward pass, with everything kept",
        "gradients with everything kept against autograd",
    ]
    assert all(one.passed for one in found), found


def test_a_model_without_sites_has_its_forward_checked():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 32), nn.ReLU(), nn.Linear(32, 4)).train()
    (found,) = check(Task(model, images()))
    assert found.passed


def test_an_error_that_is_no_number_does_not_pass():
    assert not Check("", float("nan"), 1.0).passed


def run(*args):
    return main(["bench", "test_vit", "--batch", "2", "--rounds", "2", "--device", "cpu", *args])


def test_a_broken_forward_stops_the_command(monkeypatch, capsys):
    original = keepgrad.ops.branch.Branch.run

    def broken(self, *args, **kwargs):
        return original(self, *args, **kwargs) * 1.01

    monkeypatch.setattr(keepgrad.ops.branch.Branch, "run", broken)
    assert run("--only", "keepgrad 0.5") == 2
    said = capsys.readouterr()
    assert "forward pass, default: FAILED" in said.out
    assert "nothing was measured" in said.err
    assert "saved" not in said.out


def test_a_broken_backward_stops_the_command(monkeypatch, capsys):
    original = keepgrad.ops.branch.Branch.run

    def broken(self, x, *args, **kwargs):
        out = original(self, x, *args, **kwargs)
        out.register_hook(lambda grad: grad * 1.05)
        return out

    monkeypatch.setattr(keepgrad.ops.branch.Branch, "run", broken)
    assert run("--only", "keepgrad 0.5") == 2
    assert "gradients with everything kept against autograd: FAILED" in capsys.readouterr().out


def test_the_command_writes_a_table_json_and_a_picture(tmp_path, capsys):
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    assert run("--only", "keepgrad 0.5", "checkpointing", "--json", str(out), "--plot", str(picture)) == 0
    said = capsys.readouterr().out
    assert "check: forward pass, default: ok" in said
    assert "images/s" in said
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["rows"]] == ["full backprop", "checkpointing", "keepgrad 0.5"]
    assert all(len(row["seconds"]) == 2 and row["peak"] > 0 for row in found["rows"])
    assert {one["what"] for one in found["checks"]} >= {"forward pass, default"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bench.json", "bench.png"]


def test_a_setting_of_the_users_own_is_measured_too(capsys):
    assert run("--only", "checkpointing", "--keep-ratio", "0.3", "--mask", "random") == 0
    assert "keepgrad 0.3, mask random" in capsys.readouterr().out


def test_the_method_that_is_named_is_profiled(capsys):
    assert run("--profile", "keepgrad exact", "--keep-ratio", "0.3") == 0
    assert "embedding_bag" not in capsys.readouterr().out  # how gradients are folded, which exact does not do


def test_a_method_that_is_not_known_is_said_with_those_that_are(capsys):
    assert run("--only", "magic") == 2
    assert "there is no method 'magic' for this model; these are: 'full backprop', " in capsys.readouterr().err


def test_a_device_that_is_not_there_is_said_in_one_line(capsys):
    assert main(["bench", "test_vit", "--device", "nonsense"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("keepgrad bench: --device nonsense: ")
    assert said.count("\n") == 1


def test_tokens_of_language_models_are_counted(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, max_position_embeddings=16, use_cache=False, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    args = ["bench", f"hf:{tmp_path}", "--batch", "2", "--rounds", "2", "--device", "cpu"]
    assert main([*args, "--only", "keepgrad text (default)"]) == 0
    said = capsys.readouterr().out
    assert "tokens/s" in said
    assert "input_ids 2x16" in said
