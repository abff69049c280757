"""API keys: where they come from, which client each belongs to, and that client's share and quota. Pure.

Only hashes are kept, keyed with a secret of the process. Nobody outside can compute the hash of a key, so neither
response times nor the process's memory reveal a key. Clients send a key as in RFC 6750: `Authorization: Bearer KEY`.
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
UNNAMED = "unnamed"  # the client of all keys without a name, if other keys have one
_QUOTAS: dict[str, tuple[Unit, float]] = {  # option -> its unit, and the seconds that its amount is for
    "device_seconds_per_second": ("device_seconds", 1.0),
    "tokens_per_minute": ("tokens", 60.0),
}


class ApiKey(NamedTuple):
    """One line of the file. `quota`: (unit, amount per second), or None. `name` is empty if the key has none."""

    key: str
    name: str = ""
    weight: float = 1.0
    quota: tuple[Unit, float] | None = None

    def __repr__(self) -> str:
        """Leaves out the key."""
        return f"ApiKey({self.name!r}, weight={self.weight:g}, quota={self.quota})"


class ApiKeys:
    """The keys that a service accepts, as hashes. `source`: where they come from, as in `read_keys`."""

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
        """Read the keys again. If the source cannot be read or holds no key, log that once and keep the old keys."""
        try:
            keys = read_keys(self._source)
        except SettingsError as error:
            if str(error) != self._problem:
                logger.error("%s; the previous keys stay in force", error)  # noqa: TRY400 - the sentence says it
            self._problem = str(error)
            return
        self._problem = ""
        if self._take(keys):
            logger.info("reloaded the API keys from %s: %d are in force", self._source, len(keys))

    def _take(self, keys: Sequence[ApiKey]) -> bool:
        """Put these keys in force; False if they already are. A client whose quota is unchanged keeps its usage."""
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
        """Return the client whose key this `Authorization` header holds, or None if no key has a name. A request
        without the header has `authorization` None. Raises Unauthorized.
        """
        presented = bearer(authorization)
        try:
            return self._known[_digest(presented or "")]
        except KeyError:
            raise Unauthorized(
                "this service requires an API key: send the header 'Authorization: Bearer KEY'"
                if presented is None
                else "the API key is not valid for this service; check it, or ask the operator for one"
            ) from None


def _client(name: str, weight: float, quota: tuple[Unit, float] | None, before: dict[str, Client]) -> Client:
    kept = before[name].quota if name in before else None
    if quota is None:
        kept = None
    elif kept is None or (kept.unit, kept.per_s) != quota:
        kept = Quota(unit=quota[0], per_s=quota[1])
    return Client(Tenant(name, weight), kept)


def bearer(authorization: str | None) -> str | None:
    """The key in an `Authorization` header, or None if there is none. The scheme is case-insensitive (RFC 9110)."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def read_keys(source: str, setting: str = _SETTING) -> tuple[ApiKey, ...]:
    """Read the keys from `source`: `file:PATH` or `env:NAME`.

    A file holds one entry per line; blank lines and lines that begin with # are skipped. In an environment variable,
    commas or line breaks separate the entries, and spaces too if no key has a name.

    An entry is one of

        KEY
        NAME: KEY
        NAME: KEY weight=3 tokens_per_minute=100000
        NAME: KEY device_seconds_per_second=0.5

    Keys with the same name and options belong to one client: for example an old key and a new one.

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
            problem = "an earlier line has the same name but other options; make the options equal"
            raise SettingsError(setting, f"line {number} of {source}: {problem}")
        if keys.setdefault(one.key, one).name != one.name:
            problem = "an earlier line has the same key under another name; remove one of them"
            raise SettingsError(setting, f"line {number} of {source}: {problem}")
    if not keys:
        raise SettingsError(setting, f"{source} holds no key")
    return tuple(keys.values())


def _lines(source: str, setting: str) -> list[str]:
    """Raises SettingsError."""
    kind, _, where = source.partition(":")
    if kind == "env":
        if where not in os.environ:
            raise SettingsError(setting, f"the environment variable {where} is not set in this process")
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
    """Raises ValueError. Its text never shows anything that may be a key."""
    name, colon, rest = entry.partition(":")
    key, *options = (rest.split() or [""]) if colon else [entry]
    name = name.strip() if colon else ""
    if colon and not _NAME.fullmatch(name):
        raise ValueError("the name before the colon should be up to 40 letters, digits, dots, underscores and hyphens")
    if not _KEY.fullmatch(key):
        raise ValueError("the key cannot be sent as a bearer token: use letters, digits and -._~+/ only")
    weight, quota = 1.0, None
    for option in options:
        what, _, value = option.partition("=")
        number = _positive(value)
        if number is None or what not in {"weight", *_QUOTAS}:
            raise ValueError(f"after the key, use weight=, {'= or '.join(_QUOTAS)}=, each with a number above 0")
        if what == "weight":
            weight = number
        elif quota is not None:
            raise ValueError("a key can have only one quota: tokens or device seconds")
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
