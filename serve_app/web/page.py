"""The page at `GET /`: one static file. Its headers forbid the browser to run or load anything else."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from serve_app.web.asgi import Answer


def page() -> Answer:
    """The page. It contains no data of the service: its script calls `/info` with the API key that the user enters."""
    content, policy = _page()
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", policy),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-store"),
    ]
    return headers, content


@cache
def _page() -> tuple[bytes, bytes]:
    """The file, and the Content Security Policy that allows its own script and style by their hashes."""
    content = files(__package__).joinpath("page.html").read_bytes()
    hashes = {}
    for kind in (b"script", b"style"):
        inline = b"".join(re.findall(rb"<%b>(.*?)</%b>" % (kind, kind), content, re.DOTALL))
        hashes[kind] = b64encode(sha256(inline).digest())
    policy = (
        b"default-src 'none'; script-src 'sha256-%b'; style-src 'sha256-%b'; img-src data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return content, policy % (hashes[b"script"], hashes[b"style"])
