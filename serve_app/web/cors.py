"""CORS: lets pages of the sites in the settings call the API."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Add CORS to `app`, if there are `origins`. A preflight needs no API key, because browsers send none with it."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),
        allow_private_network="*" not in origins,  # named public sites may ask a private network
        expose_headers=("*",),
    )
