"""An open-loop client of streams, in a process of its own: `python -m benchmarks.kit.streaming URL PLAN FOUND`.

PLAN is a JSON list of `{"at": seconds from the start, "payload": a streamed completion}`. Each is sent at its time on a
separate connection, regardless of earlier ones. FOUND becomes a JSON list of `ClientStream`, in the plan's order. The
client has its own process, because a client in the measuring process would measure itself.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.serving import ROOT
from calibration.generation.token_stream import ClientStream, send_all
from calibration.load import Address, request_bytes

_BEFORE_S = 1.0  # from the start of the process to second 0 of the plan


def stream_all(url: str, plan: Sequence[dict[str, Any]]) -> list[ClientStream]:
    """Run the client to its end. Raises RuntimeError with its last line if it fails."""
    with tempfile.TemporaryDirectory(prefix="windve-client-") as scratch:
        asked, found = Path(scratch) / "plan.json", Path(scratch) / "found.json"
        asked.write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.kit.streaming", url, str(asked), str(found)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 - our own
        if done.returncode:
            raise RuntimeError(f"the client failed: {done.stderr.strip().splitlines()[-1]}")
        return [ClientStream(*one) for one in json.loads(found.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    _url, _plan, _found = sys.argv[1:]
    _asked = [
        (one["at"], request_bytes(one["payload"], "/v1/completions"))
        for one in json.loads(Path(_plan).read_text(encoding="utf-8"))
    ]
    _sent = asyncio.run(send_all(Address.parse(_url), _asked, _BEFORE_S))
    Path(_found).write_text(json.dumps(_sent), encoding="utf-8")
