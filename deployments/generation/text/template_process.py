"""Renders chats with a model's own Jinja template, in a process that may be killed at any time.

It runs as a script, with a socket on file descriptor 0. A frame is its length, 4 bytes, and JSON. The first frame is
the template. Each further one is a chat, and is answered with its text or with the problem. A template is untrusted
code of the model's author. It runs in Jinja's sandbox with only what transformers offers to templates. The process has
no secrets in its environment, cannot write files, and has limited memory. It imports nothing of windve.
"""

from __future__ import annotations

import json
import resource
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.debug  # needed when a template fails
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct("<I")
_MOST_MEMORY = 2**30  # bytes of address space; Python and Jinja need a tenth of it


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training. Here it just renders its content."""

    tags = {"generation"}  # noqa: RUF012 - as in Jinja

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names that begin with _, which reach Python's internals, as transformers does."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no room for {name!r}")


def compiled(source: str) -> jinja2.Template:
    """Compile a template in the same environment as transformers' `render_jinja_template`. Raises TemplateError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace)
    return environment.from_string(source)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the machine's time zone, as in transformers


def _answer(template: jinja2.Template, chat: Mapping[str, Any]) -> dict[str, str]:
    """Render a chat: its text, or the problem. `chat["most"]`: the most characters of the text."""
    pieces, size = [], 0
    try:
        for piece in template.generate(**chat["variables"]):
            pieces.append(piece)
            size += len(piece)
            if size > chat["most"]:
                return {"problem": f"its text is longer than {chat['most']} characters"}
    except MemoryError:
        pieces.clear()
        return {"problem": "it takes too much memory"}
    except Exception as error:  # noqa: BLE001 - whatever a template does
        return {"problem": str(error) or type(error).__name__}
    return {"text": "".join(pieces)}


def receive(link: socket.socket) -> Any:
    """The content of the next frame. Raises EOFError if the other side is gone, or OSError."""
    (size,) = LENGTH.unpack(_exactly(link, LENGTH.size))
    return json.loads(_exactly(link, size))


def _exactly(link: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        chunk = link.recv(min(size - len(found), 2**18))
        if not chunk:
            raise EOFError
        found += chunk
    return bytes(found)


def send(link: socket.socket, content: Any) -> None:
    body = json.dumps(content).encode()
    link.sendall(LENGTH.pack(len(body)) + body)


def _serve(link: socket.socket) -> None:
    try:
        template = compiled(receive(link))
    except jinja2.TemplateError as error:
        send(link, {"problem": str(error)})
        return
    send(link, {})
    while True:
        send(link, _answer(template, receive(link)))


def _confine() -> None:
    for limit, most in ((resource.RLIMIT_AS, _MOST_MEMORY), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # not every system has each limit
            resource.setrlimit(limit, (most, most))


if __name__ == "__main__":
    _confine()
    with suppress(EOFError, OSError):
        _serve(socket.socket(fileno=0))
