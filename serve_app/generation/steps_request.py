"""The body of `/calibration/steps`, which a calibration sends. Pure."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from deployments.errors import InvalidInput
from deployments.generation.planned_steps import PlannedStep
from serve_app.web.fields import Constraint, Fields

_MOST_LOADS, _MOST_CHUNKS, _MOST_TIMES, _MOST_TOKENS = 64, 64, 20, 2**24


def _chunks(value: Any) -> Any:
    if not isinstance(value, list) or len(value) > _MOST_CHUNKS or not all(map(_is_chunk, value)):
        problem = f"chunks must be a list of up to {_MOST_CHUNKS} pairs of whole numbers, [start, tokens]"
        raise InvalidInput(problem, param="loads")
    return value


def _is_chunk(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2 or {*map(type, pair)} != {int}:
        return False
    start, tokens = map(int, pair)
    return 0 <= start < _MOST_TOKENS and 1 <= tokens < _MOST_TOKENS


def _loads(value: Any) -> Any:
    if not isinstance(value, list) or not 1 <= len(value) <= _MOST_LOADS:
        raise InvalidInput(f"loads must be a list of 1 to {_MOST_LOADS} objects with rows or chunks", param="loads")
    return value


Count = Annotated[int, Field(ge=0, lt=_MOST_TOKENS), Constraint(f"a whole number from 0 to {_MOST_TOKENS - 1}")]


class PlannedLoad(Fields):
    """The work of one step."""

    rows: Count = 0
    """How many answers get one more token."""
    cached: Count = 0
    """How many tokens each of these answers has in the cache."""
    chunks: Annotated[list[list[int]], BeforeValidator(_chunks)] = Field(default_factory=list)
    """Chunks of prompts, each [start, tokens]: `tokens` tokens after the first `start`."""
    host_rows: Count = 0
    """How many further answers get one more token, with their keys and values in the host's cache."""
    copied: Count = 0
    """How many blocks are copied to the host and back before the step."""

    @property
    def step(self) -> PlannedStep:
        """Raises InvalidInput."""
        if not (self.rows or self.host_rows or self.chunks):
            raise InvalidInput("a load must have rows or chunks", param="loads")
        chunks = tuple((start, tokens) for start, tokens in self.chunks)
        return PlannedStep(self.rows, self.cached, chunks, self.host_rows, self.copied)


class StepsRequest(Fields):
    """Planned steps for a calibration to time."""

    pool: str
    """accelerator or cpu."""
    loads: Annotated[list[PlannedLoad], BeforeValidator(_loads)]
    times: Annotated[int, Field(ge=1, le=_MOST_TIMES), Constraint(f"a whole number from 1 to {_MOST_TIMES}")] = 3
    """How often each step is timed, after one warm-up run."""
