"""What a request asks of the Router, and what comes back of it, token by token. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deployments.admission.quota import Client
from deployments.generation.record import GenerationRecord
from deployments.generation.text.sampling import Picked, Sampling
from deployments.models.tokenizer import TokenIds

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class WantedGeneration:
    """One generation as a request asks for it.

    - `ids`: of the prompt, at least one, all of them in the model's vocabulary.
    - `most_tokens`: of each answer, at least 1. Prompt and answer together fit into the model's context.
    - `answers`: how many, each drawn with random numbers of its own (`n`).
    - `stops`: strings before which an answer ends, none empty.
    - `logprobs`: so many alternatives of each token; 0: of the picked one only; None: none at all.
    - `ignore_end`: end tokens do not end an answer, for benchmarks.
    - `timeout_s`: the request's own promise for its first token, in place of the setting `ttft_s`.
    - `bulk`: it has no pace to keep and runs behind all others.
    - `client`: who asks; None where clients are not told apart.
    - `received`: when the request had come, by the loop's clock, in seconds; its first token is due from then on. None:
      when it is given to the Router.
    - `let_in`: an earlier generation of its request was, so that its client's quota is not asked again.
    - `record`: the Router writes there what becomes of it, for the access log and traces; None: nobody asks.
    """

    ids: TokenIds
    most_tokens: int
    sampling: Sampling
    answers: int = 1
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_end: bool = False
    timeout_s: float | None = None
    bulk: bool = False
    client: Client | None = None
    received: float | None = None
    let_in: bool = False
    record: GenerationRecord | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one answer since its last piece.

    - `answer`: its number, 0 to `WantedGeneration.answers` - 1.
    - `text`: what is certain now; it may be empty. A character that is not whole and what may be the beginning of a
      stop come with a later piece.
    - `tokens`: that were computed, an end token included. What comes behind a stop is none of them.
    - `finish`: with the answer's last piece why it ended: at an end token or a stop, or with `most_tokens`.
    """

    answer: int
    text: str
    tokens: tuple[Picked, ...]
    finish: Finish | None = None
