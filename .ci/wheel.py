#!/usr/bin/env python
"""Check a wheel: it has every file of the package and nothing else of the project, and runs from there.

usage: .ci/wheel.py FILE
"""

import subprocess
import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
CHECK = """
import torch, keepgrad
from keepgrad.cli import main
assert {wheel!r} in keepgrad.__file__, keepgrad.__file__
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
assert keepgrad.apply(layer, keep_ratio=0.5).sites
layer(torch.randn(2, 16, 8)).sum().backward()
print(keepgrad.__version__)
"""


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {path.relative_to(SOURCE).as_posix() for path in SOURCE.glob("keepgrad/**/*.py")}
    wanted.add("keepgrad/py.typed")
    if found != wanted:
        sys.exit(f"{wheel}: missing {sorted(wanted - found)}, unexpected {sorted(found - wanted)}")
    # Isolated from the checkout, with the wheel in front of what is installed.
    code = f"import sys; sys.path.insert(0, {wheel!r})\n" + CHECK.format(wheel=wheel)
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{wheel}: {done.stderr}")
    version = done.stdout.strip()
    if f"keepgrad-{version}-" not in wheel:
        sys.exit(f"{wheel} has version {version} inside")
    print(f"{wheel}: {len(found)} files, version {version}")


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
