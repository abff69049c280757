"""`python -m benchmarks.peers.local_ray MODULE PORT` starts a Ray on loopback with Serve's defaults, and serves the
result of MODULE's `build()` until SIGINT or SIGTERM.
"""

import importlib
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from pathlib import Path

LOOPBACK = "127.0.0.1"


def main(module: str, port: int, scratch: Path) -> None:
    """Use Serve's defaults, whatever the environment says. The variables set here only keep Ray on loopback, behind a
    token, and quiet. Ray reads them when it is imported, so import it after this.
    """
    for name in [name for name in os.environ if name.startswith("RAY_SERVE_")]:
        del os.environ[name]
    token = scratch / "ray-token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # Ray's switch for a node that lives on loopback
        RAY_USAGE_STATS_ENABLED="0",
    )
    import ray
    from ray import serve

    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        _node_ip_address=LOOPBACK,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which installs its own handlers
        signal.signal(number, lambda *_: stop.set())
    try:
        serve.start(http_options={"host": LOOPBACK, "port": port})
        serve.run(importlib.import_module(f"benchmarks.peers.{module}").build())
        stop.wait()
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="windve-peer-") as folder:
        main(sys.argv[1], int(sys.argv[2]), Path(folder))
