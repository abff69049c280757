"""Makes gRPC calls as Serve passes them on, without a server."""

import asyncio

from benchmarks.simulation.virtual_time import run
from deployments.errors import WindveError
from serve_app.config.models import ByModel
from serve_app.embedding.grpc_calls import TeiCalls


class Context:
    """The part of Serve's context that is used."""

    def __init__(self, *metadata):
        self.metadata = list(metadata)
        self.code = self.details = None
        self.trailing = {}

    def invocation_metadata(self):
        return self.metadata

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        self.details = details

    def trailing_metadata(self):
        return list(self.trailing.items())

    def set_trailing_metadata(self, metadata):
        self.trailing = dict(metadata)


def tei_calls(router, *more):
    """The calls to one model."""
    return TeiCalls(ByModel({router.card.name: router}), *more)


async def incoming(requests, read=None):
    """A stream of these requests. `read` collects those that were taken from it."""
    for request in requests:
        if read is not None:
            read.append(request)
        yield request
        await asyncio.sleep(0)


def answer(api, call, request, *metadata):
    """The answer to one request, and the context."""
    context = Context(*metadata)
    return run(getattr(api, call)(request, grpc_context=context)), context


def stream(api, call, requests, *metadata):
    """The answers to a stream, its context, and the error that ended it, if any did."""
    context, done = Context(*metadata), []

    async def main():
        async for message in getattr(api, call)(incoming(requests), grpc_context=context):
            done.append(message)  # noqa: PERF401 - what came before an error counts

    try:
        run(main())
    except WindveError as error:
        return done, context, error
    return done, context, None
