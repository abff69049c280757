"""An observer that keeps its access log in memory: the real lines, without a thread."""

import asyncio
import json

from deployments.embedding.config import RouterConfig
from serve_app.ingress import KNOWN_ROUTES
from serve_app.observe.observer import Observer


class Written:
    """A LineWriter that needs no event loop. Each line sets `news`."""

    def __init__(self):
        self.lines, self.news = [], asyncio.Event()

    def add(self, told):
        self.lines.append(json.loads(json.dumps(told)))
        self.news.set()


def observed(level="all", tracer=None):
    """An observer, and what it has written so far."""
    written = Written()
    observer = Observer(written, tracer, KNOWN_ROUTES)
    observer.configure({"m": RouterConfig.parse({"slo_s": 1.0, "access_log": level})})
    return observer, written
