"""Answers in OpenAI's format, as one JSON object or as a stream of events. Pure.

See https://platform.openai.com/docs/api-reference/chat and /completions. If `stream_options` asks for usage, the last
chunk before `[DONE]` has it, and no choices.
"""

from __future__ import annotations

import hashlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

from tokenizers import Tokenizer

from deployments.generation.request import GenerationRecord, Piece
from deployments.generation.text.prompt_scores import PromptScores
from deployments.generation.text.sampling import Picked
from deployments.generation.text.tool_calls import CallParser, Form
from deployments.models.model_files import ModelCard
from deployments.models.tokenizer import TokenIds
from serve_app.version import VERSION
from serve_app.web.event_stream import DONE, event

_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")
_PRINTED = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [number for number in range(256) if number not in set(_PRINTED)]
# Byte-level tokenizers write bytes as these characters (`bytes_to_unicode` in github.com/openai/gpt-2, src/encoder.py).
_BYTES = {chr(number): number for number in _PRINTED} | {chr(256 + at): number for at, number in enumerate(_OTHERS)}


class TokenNames:
    """The text and bytes of a token in logprobs. The bytes may be only part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        raw = self._tokenizer.id_to_token(token) or ""
        return f" {text}" if raw.startswith("▁") and not text.startswith(" ") else text

    def bytes(self, token: int) -> list[int]:
        raw, text = self._tokenizer.id_to_token(token) or "", self.text(token)
        if found := _ONE_BYTE.fullmatch(raw):
            return [int(found[1], 16)]
        if "�" in text and all(character in _BYTES for character in raw):
            return [_BYTES[character] for character in raw]
        return list(text.encode())


class _Named(NamedTuple):
    """`offset`: where the token's text begins, in characters, in the concatenated texts of all tokens."""

    token: Picked
    text: str
    offset: int


@dataclass(slots=True)
class _Choice:
    """One answer. `before`: text to put before it (`echo`). `offset`: characters of its tokens so far."""

    index: int
    before: str = ""
    begun: bool = False
    told: bool = False  # its prompt's ids
    calls: int = 0  # of tools, so far
    texts: list[str] = field(default_factory=list)
    picked: list[Picked] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None
    offset: int = 0
    scores: PromptScores | None = None


def _named(choice: _Choice, names: TokenNames, tokens: Sequence[Picked]) -> list[_Named]:
    found = []
    for one in tokens:
        found.append(_Named(one, names.text(one.id), choice.offset))
        choice.offset += len(found[-1].text)
    return found


class ReplyHead(NamedTuple):
    """The fields of every chunk, and what is said of prompts.

    - `name`: the end of the id.
    - `records`: of the request's generations.
    - `prompts`: the token ids of each choice's prompt. `says_ids`: return them and those of answers.
    - `listed`: the alternatives of each token in `prompt_logprobs`; None: there are none. `echoed`: those of the
      prompt's tokens in `logprobs`; None: only the answer's are there. `only_prompt`: the answer is not sent.
    """

    name: str
    model: str
    fingerprint: str
    prompt_tokens: int
    records: Sequence[GenerationRecord] = ()
    prompts: Sequence[TokenIds] = ()
    says_ids: bool = False
    listed: int | None = None
    echoed: int | None = None
    only_prompt: bool = False


def fingerprint(card: ModelCard) -> str:
    """OpenAI's `system_fingerprint`. It changes when the same seed may give another answer."""
    what = f"{VERSION} {card.name} {card.revision}"
    return f"fp_{hashlib.sha256(what.encode()).hexdigest()[:10]}"


class Reply(ABC):
    """The answer to one request, with one or more choices."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompts_in_choices: ClassVar[bool]

    def __init__(self, head: ReplyHead, before: Sequence[str], names: TokenNames, *, logprobs: bool) -> None:
        """`before`: the text to put before each choice. `logprobs`: whether those of answers are requested."""
        self.prompt_tokens, self._records, self._of = head.prompt_tokens, head.records, head
        self.says_usage = self.says_usage_always = False  # in a stream: at its end, and in each chunk
        self._choices = [_Choice(index, text) for index, text in enumerate(before)]
        self._names, self._has_logprobs = names, logprobs
        self._lists: dict[int, list[dict[str, Any] | None]] = {}  # `prompt_logprobs` of each prompt
        self._head = {
            "id": f"{self.prefix}{head.name}",
            "created": int(time.time()),
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }

    @property
    def tokens(self) -> int:
        """The number of tokens in all choices so far."""
        return sum(choice.tokens for choice in self._choices)

    def add(self, index: int, piece: Piece) -> None:
        """Add a piece to a choice, for an answer that is not streamed."""
        choice, piece = self._choices[index], self._sent(piece)
        choice.scores = piece.scores
        choice.texts.append(piece.text)
        choice.picked += piece.tokens
        choice.tokens += len(piece.tokens)
        choice.finish = piece.finish or choice.finish

    def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        told: dict[str, Any] = {}
        for choice in self._choices:
            logprobs = None
            if self._has_logprobs:
                tokens = [*_prompt_of(self._of, choice), *choice.picked]
                logprobs = self._logprobs(_named(choice, self._names, tokens), self._names)
            content, finish = self._content(choice, choice.before + "".join(choice.texts)), choice.finish
            ids = [token.id for token in choice.picked]
            one, about = self._told(choice, content, logprobs, self._finish(choice, finish), ids)
            choices.append(one)
            told |= about
        return {**self._head, "object": self.whole_object, **told, "choices": choices, "usage": self._usage()}

    def events(self, index: int, piece: Piece) -> bytes:
        """The stream's events for a piece; none if it is empty."""
        choice, piece = self._choices[index], self._sent(piece)
        said = b""
        if not choice.begun:
            choice.begun = True
            said = b"".join(self._chunk(choice, delta, None, None, []) for delta in self._first(choice.before))
        choice.tokens += len(piece.tokens)
        logprobs = None
        if self._has_logprobs and piece.tokens:
            logprobs = self._logprobs(_named(choice, self._names, piece.tokens), self._names)
        ids = [one.id for one in piece.tokens] if self._of.says_ids else []
        delta = self._delta(choice, piece.text, ends=piece.finish is not None)
        if not (any(delta.values()) or piece.finish or logprobs or ids):
            return said
        return said + self._chunk(choice, delta, logprobs, self._finish(choice, piece.finish), ids)

    def _sent(self, piece: Piece) -> Piece:
        """The piece as it is sent: without text and tokens if only the prompt was asked for."""
        return replace(piece, text="", tokens=(), finish=piece.finish and "length") if self._of.only_prompt else piece

    def end(self) -> bytes:
        """The last events of a stream."""
        if not self.says_usage:
            return DONE
        return event({**self._head, "object": self.chunk_object, "choices": [], "usage": self._usage()}) + DONE

    def _told(
        self, choice: _Choice, content: dict[str, Any], logprobs: Any, finish: str | None, ids: list[int]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A choice with that content, and what is said beside the choices. What is said of the prompt comes once."""
        one = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": finish}
        prompt: dict[str, Any] = {}
        if self._of.says_ids:
            one["token_ids"] = ids
            prompt = {} if choice.told else {"prompt_token_ids": self._of.prompts[choice.index].tolist()}
            choice.told = True
        if self._of.listed is not None:
            assert choice.scores is not None
            key = id(self._of.prompts[choice.index])  # a prompt's answers share the list: it may take 300 MB
            if key not in self._lists:
                self._lists[key] = _listed(choice.scores, self._of.listed, self._names)
            prompt["prompt_logprobs"] = self._lists[key]
        return (one | prompt, {}) if self.prompts_in_choices else (one, prompt)

    def _chunk(
        self, choice: _Choice, delta: dict[str, Any], logprobs: Any, finish: str | None, ids: list[int]
    ) -> bytes:
        one, told = self._told(choice, delta, logprobs, finish, ids)
        usage = {"usage": self._usage() if self.says_usage_always else None} if self.says_usage else {}
        return event({**self._head, "object": self.chunk_object, **told, "choices": [one], **usage})

    def _usage(self) -> dict[str, Any]:
        tokens = self.tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in self._records)},
        }

    def _finish(self, choice: _Choice, finish: str | None) -> str | None:  # noqa: ARG002 - for chats
        """The choice's `finish_reason`, once its content is known."""
        return finish

    @abstractmethod
    def _content(self, choice: _Choice, text: str) -> dict[str, Any]:
        """The fields of a complete choice that hold its text."""

    @abstractmethod
    def _first(self, before: str) -> list[dict[str, Any]]:
        """The fields of the first chunks of a choice."""

    @abstractmethod
    def _delta(self, choice: _Choice, text: str, *, ends: bool) -> dict[str, Any]:
        """The fields of a chunk that hold its text. `ends`: it is the last one."""

    @abstractmethod
    def _logprobs(self, tokens: Sequence[_Named], names: TokenNames) -> dict[str, Any]:
        """The `logprobs` of these tokens."""


class ChatReply(Reply):
    """The answer to `/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    prompts_in_choices = False

    def __init__(
        self, head: ReplyHead, before: Sequence[str], names: TokenNames, form: Form | None = None, *, logprobs: bool
    ) -> None:
        """`form`: how the model writes calls of tools; None if the request offers none."""
        super().__init__(head, before, names, logprobs=logprobs)
        self._parsers = None if form is None else [CallParser(form) for _ in before]

    def _spoken(self, choice: _Choice, text: str, *, ends: bool) -> tuple[str, list[dict[str, Any]]]:
        """New text, and new calls of tools."""
        if self._parsers is None:
            return text, []
        parser = self._parsers[choice.index]
        text, calls = parser.add(text)
        if ends:
            left, last = parser.end()
            text, calls = text + left, calls + last
        first, choice.calls = choice.calls, choice.calls + len(calls)
        name = f"call_{str(self._head['id']).removeprefix(self.prefix)}_{choice.index}"
        return text, [
            {"id": f"{name}_{at}", "type": "function", "function": call._asdict()}
            for at, call in enumerate(calls, first)
        ]

    def _finish(self, choice: _Choice, finish: str | None) -> str | None:
        return "tool_calls" if choice.calls and finish == "stop" else finish

    def _content(self, choice: _Choice, text: str) -> dict[str, Any]:
        text, calls = self._spoken(choice, text, ends=True)
        called = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": text or (None if calls else ""), "refusal": None, **called}}

    def _first(self, before: str) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": before}}]

    def _delta(self, choice: _Choice, text: str, *, ends: bool) -> dict[str, Any]:
        first = choice.calls
        text, calls = self._spoken(choice, text, ends=ends)
        called = [{"index": at, **call} for at, call in enumerate(calls, first)]
        return {"delta": ({"content": text} if text else {}) | ({"tool_calls": called} if called else {})}

    def _logprobs(self, tokens: Sequence[_Named], names: TokenNames) -> dict[str, Any]:
        def named(token: int, logprob: float | None) -> dict[str, Any]:
            return {"token": names.text(token), "logprob": logprob, "bytes": names.bytes(token)}

        content = [
            {**named(one.id, one.logprob), "top_logprobs": [named(*other) for other in one.alternatives]}
            for one, _, _ in tokens
        ]
        return {"content": content, "refusal": None}


class TextReply(Reply):
    """The answer to `/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"
    prompts_in_choices = True

    def _content(self, choice: _Choice, text: str) -> dict[str, Any]:  # noqa: ARG002 - as in chats
        return {"text": text}

    def _first(self, before: str) -> list[dict[str, Any]]:
        return [{"text": before}] if before else []

    def _delta(self, choice: _Choice, text: str, *, ends: bool) -> dict[str, Any]:  # noqa: ARG002 - as in chats
        return {"text": text}

    def _logprobs(self, tokens: Sequence[_Named], names: TokenNames) -> dict[str, Any]:
        others = [
            None
            if one.logprob is None  # the first of a prompt
            else {names.text(token): logprob for token, logprob in _likeliest_last(one, one.logprob)}
            for one, _, _ in tokens
        ]
        return {
            "tokens": [text for _, text, _ in tokens],
            "token_logprobs": [one.logprob for one, _, _ in tokens],
            "top_logprobs": others,
            "text_offset": [offset for _, _, offset in tokens],
        }


def _likeliest_last(one: Picked, logprob: float) -> list[tuple[int, float]]:
    """A token and its alternatives, the likeliest last: in a dict by text, it then replaces others of the same text."""
    return sorted([(one.id, logprob), *one.alternatives], key=itemgetter(1))


def _prompt_of(head: ReplyHead, choice: _Choice) -> list[Picked]:
    """The tokens of the choice's prompt, if they have logprobs. The first one has none."""
    if head.echoed is None:
        return []
    assert choice.scores is not None
    scores = choice.scores.part(0, choice.scores.tokens, head.echoed)
    pairs = zip(scores.ids.tolist(), scores.logprobs.tolist(), strict=True)
    others = [Picked(ids[0], logprobs[0], tuple(zip(ids[1:], logprobs[1:], strict=True))) for ids, logprobs in pairs]
    return [Picked(int(head.prompts[choice.index][0])), *others]


def _listed(scores: PromptScores, alternatives: int, names: TokenNames) -> list[dict[str, Any] | None]:
    """What vLLM calls `prompt_logprobs`: None for the first token, then by id the prompt's token and the likeliest."""
    found: list[dict[str, Any] | None] = [None]
    scores = scores.part(0, scores.tokens, alternatives)
    for ids, logprobs, own in zip(scores.ids.tolist(), scores.logprobs.tolist(), scores.ranks.tolist(), strict=True):
        said: dict[str, Any] = {}
        for token, logprob, rank in zip(ids, logprobs, (own, *range(1, len(ids))), strict=True):
            one = {"logprob": logprob, "rank": rank, "decoded_token": names.text(token)}
            said.setdefault(str(token), one)
        found.append(said)
    return found
