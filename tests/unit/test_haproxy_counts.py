"""What HAProxy counts at the door, read for `/info`."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deployments.serve_adapter.haproxy_counts import HAProxyCounts, read_counts

METRICS = b"""\
haproxy_backend_requests_denied_total{proxy="http-windve"} 12
haproxy_backend_requests_denied_total{proxy="grpc-windve"} 1
haproxy_backend_requests_denied_total{proxy="default_backend"} 9
haproxy_backend_current_queue{proxy="http-windve"} 5
"""


@pytest.fixture
def metrics():
    """Answers `metrics.content`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(server.status)
            self.end_headers()
            self.wfile.write(server.content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.status, server.content = 200, METRICS
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "content", "counts"),
    [(200, METRICS, {"waiting": 5, "refused": 13}), (200, b"python_info 1\n", {}), (500, b"", {})],
)
def test_the_doors_of_all_applications_are_summed(metrics, status, content, counts):
    metrics.status, metrics.content = status, content
    assert read_counts(metrics.server_port) == counts


def test_a_port_that_nobody_listens_at():
    assert read_counts(1) == {}


def test_a_call_never_waits_and_the_next_one_knows(metrics, monkeypatch):
    monkeypatch.setenv("RAY_SERVE_HAPROXY_METRICS_PORT", str(metrics.server_port))

    async def ask():
        counts = HAProxyCounts()
        first = counts.newest()
        await counts._reading
        return first, counts.newest()

    assert asyncio.run(ask()) == ({}, {"waiting": 5, "refused": 13})
