"""API keys: where they are read from, and whether one that a client shows is among them. Pure.

Only hashes are kept, and each is compared in full, so that neither the time of an answer nor a process's memory tells a
key. Clients show theirs as RFC 6750 has it: `Authorization: Bearer KEY`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from deployments.errors import SettingsError, Unauthorized

logger = logging.getLogger("ray.serve")

_SETTING = "args.api_keys"
_KEY = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # RFC 6750, section 2.1: what can follow `Bearer`


class ApiKeys:
    """The keys that a service accepts, as hashes. `source` is where they were read, as `read_keys` takes it."""

    def __init__(self, keys: Iterable[str], source: str = "") -> None:
        self._digests = tuple(map(_digest, keys))
        self._source = source

    @classmethod
    def read(cls, source: str) -> ApiKeys:
        """Raises SettingsError."""
        return cls(read_keys(source), source)

    def refresh(self) -> None:
        """Read them again. A file that cannot be read any more, or holds no key, changes nothing, and is logged."""
        try:
            digests = tuple(map(_digest, read_keys(self._source)))
        except SettingsError as error:
            logger.error("%s; the keys before stay in force", error)  # noqa: TRY400 - the sentence says it
            return
        if digests != self._digests:
            self._digests = digests
            logger.info("API keys read anew from %s: %d are in force", self._source, len(digests))

    def accepts(self, presented: str | None) -> bool:
        """Whether `presented` (None: nothing was) is one of the keys. Takes the same time whichever it is."""
        digest = _digest(presented or "")
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found

    def check(self, authorization: str | None) -> None:
        """Let in who shows a key in this `Authorization` header (None: there is none). Raises Unauthorized."""
        presented = bearer(authorization)
        if not self.accepts(presented):
            raise Unauthorized(
                "this service wants an API key: send the header 'Authorization: Bearer KEY'"
                if presented is None
                else "the API key is not one of this service's; look at it again, or ask whoever runs the service"
            )


def bearer(authorization: str | None) -> str | None:
    """The key in an `Authorization` header, or None where there is none; the scheme's case is no matter (RFC 9110)."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def read_keys(source: str, setting: str = _SETTING) -> tuple[str, ...]:
    """The keys that `source` names: `file:PATH`, one a line (blank lines and lines with # before them do not count), or
    `env:NAME`, with commas or spaces between them.

    Raises SettingsError that names `setting`, and never shows a key.
    """
    kind, _, where = source.partition(":")
    if kind == "env":
        if where not in os.environ:
            raise SettingsError(setting, f"there is no environment variable {where} where this process runs")
        keys = re.split(r"[,\s]+", os.environ[where])
    elif kind == "file":
        try:
            lines = Path(where).expanduser().read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise SettingsError(setting, f"{where} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SettingsError(setting, f"{where} is not UTF-8 text") from None
        keys = [line.strip() for line in lines if not line.lstrip().startswith("#")]
    else:
        raise SettingsError(setting, "should be file:PATH or env:NAME")
    keys = list(filter(None, keys))
    if not keys:
        raise SettingsError(setting, f"{source} holds no key")
    for number, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):
            raise SettingsError(
                setting,
                f"key {number} in {source} cannot be sent as a bearer token: use letters, digits and -._~+/ only",
            )
    return tuple(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "backslashreplace")).digest()
