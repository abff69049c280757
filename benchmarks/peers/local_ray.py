"""`python -m benchmarks.peers.local_ray MODULE PORT`: a Ray on loopback with Serve's own defaults, which serves what
MODULE's `build()` gives until it is told to stop.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOPBACK = "127.0.0.1"


@contextmanager
def running() -> Iterator[None]:
    """A Ray of one's own until the block ends. Nothing is tuned: what is set keeps it on loopback, behind a token, and
    quiet. Ray reads it when it is imported, so not before this.
    """
    with tempfile.TemporaryDirectory(prefix="windve-peer-") as scratch:
        token = Path(scratch) / "ray-token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(token),
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # Ray's switch for a node that lives on loopback
            RAY_USAGE_STATS_ENABLED="0",
        )
        import ray

        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            _node_ip_address=LOOPBACK,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        try:
            yield
        finally:
            ray.shutdown()


def main(module: str, port: int) -> None:
    """With Serve's own defaults, whatever the environment says."""
    for name in [name for name in os.environ if name.startswith("RAY_SERVE_")]:
        del os.environ[name]
    with running():
        from ray import serve

        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which puts its own in place
            signal.signal(number, lambda *_: stop.set())
        try:
            serve.start(http_options={"host": LOOPBACK, "port": port})
            serve.run(importlib.import_module(f"benchmarks.peers.{module}").build())
            stop.wait()
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
