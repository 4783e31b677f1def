"""Python processes for tests, without the seconds that torch, timm and accelerate take to be imported in each.

`run` is for Python what `subprocess.run` is for any program. A server has the libraries imported and forks for each
call; the fork runs a module or a script as `__main__`. Several processes get the variables that
torchrun sets, in one process group, and end together as under torchrun. What is about imports or about a launcher
itself is tested with `subprocess`.
"""

from __future__ import annotations

import array
import atexit
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMPORTED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"),
    *(
        "torch.utils.tensorboard",
        "accelerate",
        "matplotlib.figure",
        "pycocotools.coco",
        "rich.console",
        "sklearn.datasets",
    ),
    *("timm", "keepgrad.cli", "keepgrad.train.classify", "keepgrad.train.detect", "keepgrad.train.loop.side_by_side"),
)
GRACE = 30.0
"""Seconds that the others have after one process failed and they were told to end; as torchrun's."""

_server: list[socket.socket] = []


def run(
    args: Sequence[str],
    processes: int = 1,
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
    largest_file: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python and wait for it.

    Args:
        args: `("-m", module, ...)`, `("-c", code, ...)` or `(script, ...)`; test files can be imported.
        processes: how many, as by torchrun.
        timeout: seconds after which they are killed.
        env: more environment variables.
        largest_file: bytes that a file may have; writing more fails, as on a full disk.

    Returns:
        What they wrote, and the exit code of the first that failed, negative for a signal.
    """
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if processes > 1 else {}
    wanted = {"args": list(args), "processes": processes, "cwd": os.getcwd(), "largest_file": largest_file}
    wanted["env"] = {**os.environ, **port, **(env or {})}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        own, theirs = socket.socketpair()
        with own, theirs:
            fds = array.array("i", [out.fileno(), err.fileno(), theirs.fileno()])
            _running().sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            theirs.close()
            with own.makefile("rw") as talk:
                own.settimeout(timeout)
                talk.write(json.dumps(wanted) + "\n")
                talk.flush()
                group = int(talk.readline())
                try:
                    code = int(talk.readline())
                except TimeoutError:
                    os.killpg(group, signal.SIGKILL)
                    raise
        found = []
        for file in (out, err):
            file.seek(0)
            found.append(file.read().decode())
    return subprocess.CompletedProcess(list(args), code, *found)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _running() -> socket.socket:
    """The way to the server, which is started by the first call."""
    if not _server:
        own, theirs = socket.socketpair()
        # Where there is a GPU, asking for it must not use it: a fork could not.
        env = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, start_new_session=True)
        theirs.close()
        _server.append(own)
        atexit.register(process.wait)
        atexit.register(own.close)  # at which the server ends; run before the one above
    return _server[0]


def _serve(control: socket.socket) -> Any:
    """Fork for each call. Returns in a fork only: what the program is, to be run at the top of the stack."""
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    size = array.array("i").itemsize
    while True:
        message, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(3 * size))
        if not message:
            return None
        fds = array.array("i", ancillary[0][2])
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _launch(*fds)
        for fd in fds:
            os.close(fd)


def _launch(out: int, err: int, talk_fd: int) -> Any:
    """The processes of one call, and their exit code to the caller. Returns in these processes only."""
    os.setsid()
    talk = socket.socket(fileno=talk_fd)
    with talk.makefile("r") as lines:
        wanted = json.loads(lines.readline())
    talk.sendall(f"{os.getpid()}\n".encode())
    count = wanted["processes"]
    left = set()
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            talk.close()
            for fd, own in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
                os.dup2(fd, own)
                os.close(fd)
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            os.environ.clear()
            os.environ.update(wanted["env"] | ({k: str(v) for k, v in ranks.items()} if count > 1 else {}))
            os.chdir(wanted["cwd"])
            if wanted["largest_file"] is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (wanted["largest_file"],) * 2)
            return wanted["args"]
        left.add(pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # those of the group are for the processes
    code, killed_at = 0, None
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            left.discard(pid)
            code = code or os.waitstatus_to_exitcode(status)
            if code and killed_at is None:
                time.sleep(0.1)  # torchrun looks as often
                _signal(left, signal.SIGTERM)
                killed_at = time.monotonic() + GRACE
        elif killed_at is not None and time.monotonic() > killed_at:
            _signal(left, signal.SIGKILL)
        else:
            time.sleep(0.01)
    talk.sendall(f"{code}\n".encode())
    os._exit(0)


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _main(args: list[str]) -> int:
    """A module, code or a script as Python would run it; the exit code."""
    try:
        if args[0] == "-m":
            sys.argv = args[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        elif args[0] == "-c":
            sys.argv = args[:1] + args[2:]
            exec(args[1], {"__name__": "__main__"})
        else:
            sys.argv = args
            sys.path.insert(0, str(Path(args[0]).parent))
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    """End as Python does, except that modules are not taken apart: a fork would copy all of their memory for that."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    program = _serve(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        _end(_main(program))
