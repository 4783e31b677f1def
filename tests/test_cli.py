"""The command line through its real entry point."""

import subprocess
import sys

import pytest


def keepgrad(*args):
    return subprocess.run([sys.executable, "-m", "keepgrad", *args], capture_output=True, text=True, timeout=300)


def test_demo_trains_with_and_without():
    done = keepgrad("demo", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    for name in ("full backprop", "keepgrad accurate", "keepgrad small"):
        assert name in done.stdout
    assert "1.00x" in done.stdout


def test_errors_are_one_line_with_exit_code_two():
    done = keepgrad("demo", "--epochs", "0")
    assert done.returncode == 2
    assert done.stderr == "keepgrad demo: --epochs 0: train for at least one epoch\n"


@pytest.mark.parametrize("args", [(), ("fly",)])
def test_an_unknown_command_shows_the_known_ones(args):
    done = keepgrad(*args)
    assert done.returncode == 2
    assert "usage: keepgrad" in done.stderr


def test_help():
    done = keepgrad("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout


def test_importing_keepgrad_imports_no_model_library():
    code = (
        "import sys, keepgrad; print([m for m in ('timm', 'torchvision', 'transformers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n"
