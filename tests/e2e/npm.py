"""Client libraries from npm."""

import json
import shutil
import subprocess

import pytest


def scripts(folder, packages):
    """Install packages, by their versions. Returns (lines of JavaScript, expression) -> its value after the lines."""
    if not (npm := shutil.which("npm")) or not shutil.which("node"):
        pytest.skip("node and npm are not here: their clients are not tested")
    (folder / "package.json").write_text(json.dumps({"type": "module", "dependencies": packages}))
    installed = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert installed.returncode == 0, installed.stderr

    def run(lines, expression):
        script = f"{lines}\nconsole.log(JSON.stringify({expression}));"
        done = subprocess.run(
            ["node", "--input-type=module", "-e", script], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
