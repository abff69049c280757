"""Trial queries: how a calibration tries a depth or an SLO on a running application without changing what others get.
Pure.

A trial query carries the run's secret and how it asks to be admitted:

    x-windve-trial: SECRET accelerator=40 cpu=7             by a count, at these depths
    x-windve-trial: SECRET accelerator=40 cpu=7 only=cpu    the same, on one pool only
    x-windve-trial: SECRET finish=1.5                       by predicted finish, for an SLO of 1.5 s
    x-windve-trial: SECRET finish=1.5 only=accelerator      the same, on one pool only

Other queries are admitted by the settings in force.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.errors import Forbidden, InvalidInput
from deployments.settings import TrialGrant

HEADER = "x-windve-trial"
_FORM = f"the header {HEADER} should look like 'SECRET accelerator=40 cpu=7', '... only=cpu' or 'SECRET finish=1.5'"
_ONLY, _FINISH = "only", "finish"
_LONGEST_S = 3600.0
_LARGEST = 100_000
_DIGITS = len(str(_LARGEST))


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial query asks for: admission by `depths`, for each live replica of a pool; a pool without a depth is
    closed. Or, with `finish_s`, admission by predicted finish for this SLO; `depths` is then empty. `only`: the only
    pool to use.
    """

    secret: str
    depths: Mapping[str, int]
    only: str | None = None
    finish_s: float | None = None

    @classmethod
    def parse(cls, header: str) -> Trial:
        """Read the header's value. Raises InvalidInput."""
        secret, *words = header.split() or [""]
        if not secret:
            raise InvalidInput(f"{_FORM}; it is empty")
        depths: dict[str, int] = {}
        only = None
        if words and words[-1].startswith(f"{_ONLY}="):
            only = words.pop().partition("=")[2]
        if len(words) == 1 and words[0].startswith(f"{_FINISH}="):
            return cls(secret, {}, only, _seconds(words[0]))
        for word in words:
            pool, _, depth = word.partition("=")
            if (
                not (depth.isascii() and depth.isdigit() and len(depth) <= _DIGITS and int(depth) <= _LARGEST)
                or pool in depths
            ):
                raise InvalidInput(f"{_FORM}; '{word}' does not")
            depths[pool] = int(depth)
        return cls(secret, depths, only)

    def depth(self, pool: str) -> int | None:
        """The depth by which that pool admits the query. None: by predicted finish."""
        return self.depths.get(pool, 0) if self.finish_s is None else None

    def may_use(self, pool: str) -> bool:
        """Whether the query may be offered to that pool."""
        return self.only in {None, pool} and (self.finish_s is not None or bool(self.depths.get(pool)))

    def header(self) -> str:
        """The value of the header x-windve-trial, which `parse` reads."""
        words = [f"{pool}={depth}" for pool, depth in self.depths.items()]
        if self.finish_s is not None:
            words = [f"{_FINISH}={self.finish_s!r}"]
        return " ".join([self.secret, *words, *([] if self.only is None else [f"{_ONLY}={self.only}"])])

    def check(self, allowed: TrialGrant | None, pools: tuple[str, ...], now: float) -> None:
        """Raises Forbidden if the secret is not that of `allowed`, or `now` (Unix time, s) is past its end. Raises
        InvalidInput for a pool that does not exist.
        """
        if allowed is None or now >= allowed.expires_at:
            raise Forbidden(f"{HEADER}: no calibration is running")
        if not hmac.compare_digest(hash_secret(self.secret), allowed.secret_sha256):
            raise Forbidden(f"{HEADER}: the secret is not that of the running calibration")
        for pool in (*self.depths, *([] if self.only is None else [self.only])):
            if pool not in pools:
                raise InvalidInput(f"{HEADER}: there is no pool named {pool}; use {' or '.join(pools)}")


@dataclass(slots=True)
class Trials:
    """What a Router knows about a running calibration. `allowed`: the config's grant. `at`: when its latest trial came,
    on any clock, s; None if none did, or if the grant was withdrawn, so that no other calibration waits for this one.
    """

    allowed: TrialGrant | None = None
    at: float | None = None

    def configure(self, allowed: TrialGrant | None) -> None:
        """Apply a config's grant."""
        self.allowed = allowed
        if allowed is None:
            self.at = None

    def enter(self, trial: Trial, pools: tuple[str, ...], now: float, unix_now: float) -> None:
        """Check and note a trial query. Raises Forbidden or InvalidInput, see `Trial.check`."""
        trial.check(self.allowed, pools, unix_now)
        self.at = now

    def seconds_ago(self, now: float) -> float | None:
        return None if self.at is None else now - self.at


def _seconds(word: str) -> float:
    try:
        seconds = float(word.partition("=")[2])
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_S:
        raise InvalidInput(f"{_FORM}; '{word}' does not")
    return seconds


def hash_secret(secret: str) -> str:
    """SHA-256 as 64 hex digits: the `secret_sha256` of a TrialGrant."""
    return hashlib.sha256(secret.encode()).hexdigest()
