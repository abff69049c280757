"""Virtual environments of peers, created on first use from the versions pinned in `peers/NAME.txt`."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.kit.bench import NotAvailable
from benchmarks.kit.serving import ROOT

_CACHE = ROOT / ".venv-peers"
_PINS = Path(__file__).parents[1] / "peers"


def binaries(name: str, *options: str) -> Path:
    """The folder with the environment's commands. `options`: pip's. Raises NotAvailable with pip's error if it cannot
    be created.
    """
    pins = _PINS / f"{name}.txt"
    folder = _CACHE / name
    made = folder / ".made-from"
    wanted = hashlib.sha256(pins.read_bytes()).hexdigest()
    if not made.exists() or made.read_text(encoding="ascii") != wanted:
        print(f"making the environment of {name} (some minutes the first time)", flush=True)
        if not (folder / "bin" / "python").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)  # noqa: S603
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip, *options, "-r", str(pins)], capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise NotAvailable(f"{name} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        made.write_text(wanted, encoding="ascii")
    return folder / "bin"
