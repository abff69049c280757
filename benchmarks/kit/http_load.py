"""Loads an HTTP server on loopback, open loop or closed loop, with `http_load.c`: less than a tenth of a core at 2,000
requests/s. Built with the system's C compiler on first use.
"""

import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.kit.serving import ROOT

_SOURCE = Path(__file__).with_suffix(".c")
_CACHE = ROOT / "reports" / "bench" / "tools"


@dataclass(frozen=True, slots=True)
class Load:
    """What is offered, for `seconds` after `warm_s` that are not counted. Closed loop: `clients`, each of which sends
    its next request once the last was answered. Open loop: `rate` requests/s at random times (Poisson), `burst`
    requests at once every `every_s`, or both.

    `drain_s`: how long to wait for answers at the end. `connections`: most at once; requests beyond wait in the client,
    and their time runs on.
    """

    clients: int = 0
    rate: float = 0.0
    burst: int = 0
    every_s: float = 1.0
    seconds: float = 10.0
    warm_s: float = 1.0
    drain_s: float = 10.0
    connections: int = 8192
    seed: int = 1

    def options(self) -> list[str]:
        words = {
            "clients": self.clients, "rate": self.rate, "burst": self.burst, "every": self.every_s,
            "seconds": self.seconds, "warm": self.warm_s, "drain": self.drain_s, "connections": self.connections,
            "seed": self.seed,
        }  # fmt: skip
        return [word for name, value in words.items() for word in (f"--{name}", f"{value:.12g}")]


def ensure() -> Path:
    """The program; built if its source has changed. Raises RuntimeError that says what is missing."""
    program = _CACHE / f"http_load-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]}"
    if program.exists():
        return program
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError(
            "no C compiler for the load generator: apt-get install gcc (Debian, Ubuntu), dnf install gcc"
        )
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        made = Path(folder) / program.name
        command = [compiler, "-O2", "-o", str(made), str(_SOURCE), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own source
        if done.returncode:
            error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
            raise RuntimeError(f"the load generator cannot be built (it needs Linux and glibc 2.35): {error}")
        made.rename(program)
    return program


def send(url: str, payloads: Sequence[Any], load: Load, *, slo_s: float, samples: Path | None = None) -> dict[str, Any]:
    """POST the payloads as JSON, in turn. Raises RuntimeError if the generator fails; a server may answer anything.

    Of the requests that were due in the measured time, returns

    - requests, offered_s (per second); answered (200), in_time (within `slo_s`), in_time_s (per second), late,
      late_worst_s (how much after `slo_s`)
    - refused_429, refused_503, with_retry_after (of all that were not 200), other (status -> count)
    - broken, of these broken_connecting, broken_before_answer, broken_in_answer; unanswered (after `drain_s`)
    - answer_ms (200), refusal_ms (any other answer): p50, p90, p99, max from when a request was due; None without any
    - behind_ms: how late requests were sent for which a connection was free; without_connection: how many found none
    - connections (most open at once), client_cpu_s and client_cores while sending

    `samples`: a file for a line per request: due, seconds until its answer, status (0: broken, -1: unanswered).
    """
    parts = urlsplit(url)
    assert parts.hostname in {"127.0.0.1", "localhost"}, f"{url} is not on loopback"
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as bodies:
        bodies.writelines(json.dumps(payload) + "\n" for payload in payloads)
        bodies.flush()
        words = ["--port", str(parts.port), "--path", parts.path or "/", "--bodies", bodies.name, "--slo", str(slo_s)]
        words += ["--samples", str(samples)] if samples else []
        done = subprocess.run(  # noqa: S603 - our own program
            [str(ensure()), *words, *load.options()], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"the load generator failed: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
