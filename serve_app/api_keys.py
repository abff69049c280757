"""API keys: where they are read from, whose a key is, and what its owner may use. Pure.

Only hashes are kept, keyed by a secret of the process. Nobody outside can tell the hash of a key, so neither the time
of an answer nor the memory of the process tells a key. Clients show theirs as RFC 6750 has it: `Authorization: Bearer
KEY`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from deployments.admission.fair_share import Tenant
from deployments.admission.quota import Client, Quota, Unit
from deployments.errors import SettingsError, Unauthorized

logger = logging.getLogger("ray.serve")

_SETTING = "args.api_keys"
_HASHED_BY = secrets.token_bytes(32)
_KEY = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # RFC 6750, section 2.1: what can follow `Bearer`
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
UNNAMED = "unnamed"  # whose key has no name, where others have one
_QUOTAS: dict[str, tuple[Unit, float]] = {  # the option, its unit, and how many seconds it is for
    "device_seconds_per_second": ("device_seconds", 1.0),
    "tokens_per_minute": ("tokens", 60.0),
}


class ApiKey(NamedTuple):
    """One line of the file. `quota`: (unit, how much of it a second), or None. `name` is empty where it has none."""

    key: str
    name: str = ""
    weight: float = 1.0
    quota: tuple[Unit, float] | None = None

    def __repr__(self) -> str:
        """Without the key."""
        return f"ApiKey({self.name!r}, weight={self.weight:g}, quota={self.quota})"


class ApiKeys:
    """The keys that a service accepts, as hashes. `source` is where they were read, as `read_keys` takes it."""

    def __init__(self, keys: Iterable[str | ApiKey], source: str = "") -> None:
        self._problem = ""
        self._clients: dict[str, Client] = {}
        self._known: dict[bytes, Client | None] = {}
        self._about: tuple[tuple[bytes, str, float, tuple[Unit, float] | None], ...] = ()
        self._source = source
        self._take(tuple(ApiKey(key) if isinstance(key, str) else key for key in keys))

    @classmethod
    def read(cls, source: str) -> ApiKeys:
        """Raises SettingsError."""
        return cls(read_keys(source), source)

    def refresh(self) -> None:
        """Read them again. A file that cannot be read, or holds no key, changes nothing, and is logged once."""
        try:
            keys = read_keys(self._source)
        except SettingsError as error:
            if str(error) != self._problem:
                logger.error("%s; the keys before stay in force", error)  # noqa: TRY400 - the sentence says it
            self._problem = str(error)
            return
        self._problem = ""
        if self._take(keys):
            logger.info("API keys read anew from %s: %d are in force", self._source, len(keys))

    def _take(self, keys: Sequence[ApiKey]) -> bool:
        """Put these in force; False where they are already. Who keeps its quota keeps what it has used of it."""
        about = tuple((_digest(one.key), *one[1:]) for one in keys)
        if about == self._about:
            return False
        self._about = about
        before, self._clients = self._clients, {}
        named = any(one.name for one in keys)
        known: dict[bytes, Client | None] = {}
        for digest, name, weight, quota in about:
            if named and (name or UNNAMED) not in self._clients:
                self._clients[name or UNNAMED] = _client(name or UNNAMED, weight, quota, before)
            known[digest] = self._clients[name or UNNAMED] if named else None
        self._known = known
        return True

    def check(self, authorization: str | None) -> Client | None:
        """Let in who shows a key in this `Authorization` header (None: there is none), and say who it is; None where no
        key has a name. Raises Unauthorized.
        """
        presented = bearer(authorization)
        try:
            return self._known[_digest(presented or "")]
        except KeyError:
            raise Unauthorized(
                "this service wants an API key: send the header 'Authorization: Bearer KEY'"
                if presented is None
                else "the API key is not one of this service's; look at it again, or ask whoever runs the service"
            ) from None


def _client(name: str, weight: float, quota: tuple[Unit, float] | None, before: dict[str, Client]) -> Client:
    kept = before[name].quota if name in before else None
    if quota is None:
        kept = None
    elif kept is None or (kept.unit, kept.per_s) != quota:
        kept = Quota(unit=quota[0], per_s=quota[1])
    return Client(Tenant(name, weight), kept)


def bearer(authorization: str | None) -> str | None:
    """The key in an `Authorization` header, or None where there is none; the scheme's case is no matter (RFC 9110)."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def read_keys(source: str, setting: str = _SETTING) -> tuple[ApiKey, ...]:
    """The keys that `source` names.

    `file:PATH` holds one a line; blank lines and lines with # before them do not count. `env:NAME` has commas or line
    ends between them, and where none has a name also spaces.

    One entry is one of

        KEY
        NAME: KEY
        NAME: KEY weight=3 tokens_per_minute=100000
        NAME: KEY device_seconds_per_second=0.5

    Several keys of one name, with the same options, are one client's: an old key and a new one.

    Raises SettingsError that names `setting` and the line, and never shows a key.
    """
    keys: dict[str, ApiKey] = {}
    clients: dict[str, ApiKey] = {}
    for number, line in enumerate(_lines(source, setting), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        try:
            one = _entry(entry)
        except ValueError as error:
            raise SettingsError(setting, f"line {number} of {source}: {error}") from None
        if clients.setdefault(one.name, one)[2:] != one[2:]:
            raise SettingsError(setting, f"line {number} of {source}: a line before has the same name, other options")
        if keys.setdefault(one.key, one).name != one.name:
            raise SettingsError(setting, f"line {number} of {source}: a line before has the same key, another name")
    if not keys:
        raise SettingsError(setting, f"{source} holds no key")
    return tuple(keys.values())


def _lines(source: str, setting: str) -> list[str]:
    """Raises SettingsError."""
    kind, _, where = source.partition(":")
    if kind == "env":
        if where not in os.environ:
            raise SettingsError(setting, f"there is no environment variable {where} where this process runs")
        return re.split(r"[,\n]" if ":" in os.environ[where] else r"[,\s]", os.environ[where])
    if kind != "file":
        raise SettingsError(setting, "should be file:PATH or env:NAME")
    try:
        return Path(where).expanduser().read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise SettingsError(setting, f"{where} is not UTF-8 text") from None
    except (OSError, RuntimeError, ValueError) as error:  # not OSError: no such user's home, or a null byte
        raise SettingsError(setting, f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _entry(entry: str) -> ApiKey:
    """Raises ValueError, which never shows what may be a key."""
    name, colon, rest = entry.partition(":")
    key, *options = (rest.split() or [""]) if colon else [entry]
    name = name.strip() if colon else ""
    if colon and not _NAME.fullmatch(name):
        raise ValueError("the name before the colon should be up to 40 letters, digits and ._-")
    if not _KEY.fullmatch(key):
        raise ValueError("the key cannot be sent as a bearer token: use letters, digits and -._~+/ only")
    weight, quota = 1.0, None
    for option in options:
        what, _, value = option.partition("=")
        number = _positive(value)
        if number is None or what not in {"weight", *_QUOTAS}:
            raise ValueError(f"after the key come weight=, {'= or '.join(_QUOTAS)}=, each with a number above 0")
        if what == "weight":
            weight = number
        elif quota is not None:
            raise ValueError("a key has one quota: tokens or device seconds")
        else:
            unit, seconds = _QUOTAS[what]
            quota = (unit, number / seconds)
    return ApiKey(key, name, weight, quota)


def _positive(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "backslashreplace"), digest_size=32, key=_HASHED_BY).digest()
