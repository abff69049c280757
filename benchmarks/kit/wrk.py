"""Runs `wrk`, a load generator in C with one thread, which hardly disturbs a Python server on the same cores."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("wrk.lua")


def ensure() -> None:
    """Install wrk if it is missing. If that fails, raises RuntimeError that says how to install it."""
    if shutil.which("wrk"):
        return
    if shutil.which("apt-get") and os.geteuid() == 0:
        for words in (["update"], ["install", "-y", "wrk"]):
            subprocess.run(["apt-get", "-qq", *words], check=False, stdout=subprocess.DEVNULL)  # noqa: S603, S607
        if shutil.which("wrk"):
            return
    raise RuntimeError("wrk is missing: apt-get install wrk (Debian, Ubuntu), dnf install wrk, brew install wrk")


def post(url: str, payloads: Sequence[Any], *, connections: int, seconds: float) -> dict[str, Any]:
    """POST the payloads as JSON in a closed loop on `connections` connections. Returns requests_s, p50_ms, p99_ms, and
    the raw numbers. Raises RuntimeError if a request fails.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as body:
        body.writelines(json.dumps(payload) + "\n" for payload in payloads)
        body.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "60s"]
        done = subprocess.run(  # noqa: S603 - our own command
            [*command, "-s", str(_SCRIPT), url, "--", body.name], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"wrk failed: {(done.stderr or done.stdout).strip()}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    if not told["requests"]:
        raise RuntimeError(f"{url}: no answer within {seconds:g} s under {connections} at once")
    if told["failed"]:
        raise RuntimeError(f"{url}: {told['failed']} requests of {told['requests']} failed under {connections} at once")
    percentiles = told["percentiles_us"]
    return {
        "requests_s": told["requests"] / told["duration_us"] * 1e6,
        "p50_ms": percentiles[49] / 1000,
        "p99_ms": percentiles[98] / 1000,
        **told,
    }
