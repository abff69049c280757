"""A generation as the API asks the Router for it, what happened to it, and the pieces of its answers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from deployments.admission.quota import Client
from deployments.generation.metrics import Streamed
from deployments.generation.text.prompt_scores import PromptScores
from deployments.generation.text.sampling import Picked, Sampling
from deployments.models.tokenizer import TokenIds

Finish = Literal["stop", "length"]
Outcome = Literal["admitted", "refused", "never", "lost", "cancelled"]


@dataclass(slots=True, eq=False)
class OfferRecord:
    """An offer to one replica. Times are the loop's, s.

    Outcomes: "never", even an idle device would be late; "lost", the replica died, failed or did not answer;
    "cancelled", the request ended before the replica decided, or its first token came from another replica.
    """

    pool: str
    replica: str
    at: float
    decided: float | None = None
    outcome: Outcome = "cancelled"


@dataclass(slots=True, eq=False)
class GenerationRecord:
    """What happened to a generation, for the access log and traces. `streamed`: when its tokens came; None until the
    Router begins the generation. `cached_tokens`: tokens of its prompt that the replica's cache held.
    """

    streamed: Streamed | None = None
    offers: list[OfferRecord] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def admitted(self) -> OfferRecord | None:
        """The last offer that was admitted."""
        return next((one for one in reversed(self.offers) if one.outcome == "admitted"), None)


@dataclass(frozen=True, slots=True)
class WantedGeneration:
    """A generation as a request asks for it.

    - `ids`: the prompt's token ids: at least one, all in the model's vocabulary.
    - `most_tokens`: the most tokens of each answer, at least 1. Prompt and answer together fit into the model's
      context.
    - `may_shorten`: the request named no maximum; a replica that cannot promise `most_tokens` promises fewer.
    - `answers`: how many answers (`n`), each drawn with its own random numbers.
    - `stops`: strings before which an answer ends, none empty.
    - `logprobs`: how many alternatives of each token to report; 0: only the picked token; None: no logprobs.
    - `prompt_logprobs`: how many alternatives of each of the prompt's tokens to report; None: no scores. With scores it
      is `bulk`, and has no `cache_scope`: the cache holds no logits.
    - `ignore_end`: end tokens do not end an answer, for benchmarks.
    - `stop_tokens`: further tokens that end an answer, all in the model's vocabulary, whatever `ignore_end` says.
    - `continues`: an answer's text continues the prompt's; otherwise it is a text of its own.
    - `timeout_s`: the request's own limit for its first token, which replaces the setting `ttft_s`.
    - `bulk`: it has no pace to keep and runs behind all others.
    - `client`: who sent the request; None if clients are not distinguished.
    - `received`: when the request had arrived, in seconds of the loop's clock: the time to its first token counts from
      there. None: from when the Router gets it.
    - `tokenizing_s`: how much of the time since then its request's own tokenizing took.
    - `cache_scope`: who may share the cache's blocks of its prompt and answer; None: nobody.
    - `let_in`: an earlier generation of its request passed its client's quota, which is not checked again.
    - `record`: where the Router records what happens to it.
    """

    ids: TokenIds
    most_tokens: int
    sampling: Sampling
    answers: int = 1
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_end: bool = False
    stop_tokens: tuple[int, ...] = ()
    continues: bool = False
    may_shorten: bool = False
    timeout_s: float | None = None
    bulk: bool = False
    client: Client | None = None
    received: float | None = None
    tokenizing_s: float = 0.0
    cache_scope: bytes | None = None
    let_in: bool = False
    record: GenerationRecord = field(default_factory=GenerationRecord, compare=False)


@dataclass(frozen=True, slots=True)
class Piece:
    """What was generated of an answer since its last piece.

    - `answer`: its number, 0 to `WantedGeneration.answers` - 1.
    - `text`: the text that is final now; it may be empty. An incomplete character, and what may be the beginning of a
      stop string, come with a later piece.
    - `tokens`: the computed tokens, including an end token, but none after a stop string.
    - `finish`: in the answer's last piece, why it ended: "stop" at an end token or a stop string, "length" at
      `most_tokens`.
    - `scores`: of the prompt's tokens behind its first, if they were requested; the same in each piece.
    """

    answer: int
    text: str
    tokens: tuple[Picked, ...]
    finish: Finish | None = None
    scores: PromptScores | None = None
