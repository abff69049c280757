"""Texts, chats and token ids of requests as the token ids of prompts.

What a client writes is text. In a chat the names of special tokens in it (`<|im_end|>`) are read as letters: else a
document that a client quotes could end its turn and begin one of the system. The template alone writes special tokens.
So does transformers with `sanitize_control_tokens`. A prompt of `/v1/completions` is read as the tokenizer reads it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from deployments.errors import ContextExceeded, EmptyInput, InvalidInput
from deployments.generation.text.chat_template import ChatTemplate, Message
from deployments.generation.text.model_card import GenerationCard
from deployments.models.tokenising import ON_LOOP
from deployments.models.tokenizer import TokenIds

_BEGIN, _END = "\U000f0000", "\U000f0001"  # for private use; they are taken out of what clients send
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
_CHARACTERS_A_TOKEN = 16  # a longer text than the context times this is looked at in part first


class PromptEncoder:
    """One model's."""

    def __init__(self, card: GenerationCard, tokenizer: Tokenizer, *, parse_special_tokens: bool = False) -> None:
        """`parse_special_tokens`: their names in a chat's texts are those tokens, as transformers and vLLM read them.

        Raises SettingsError where the chat template cannot be used.
        """
        self._card, self._tokenizer, self._parse = card, tokenizer, parse_special_tokens
        self._template = None if card.chat_template is None else ChatTemplate(card.chat_template, card.special_tokens)
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True)) or "(?!)"
        self._special, self._marked = re.compile(names), re.compile(f"{_BEGIN}({names}){_END}|[{_BEGIN}{_END}]")
        self._plain: Tokenizer | None = None  # the same, which reads special tokens' names as letters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    async def of_text(self, text: str) -> TokenIds:
        """With the tokens around it that the tokenizer puts there. Raises EmptyInput or ContextExceeded."""
        if not text:
            raise EmptyInput("prompt is an empty string; send text", param="prompt")
        return await self._made(len(text), lambda: self._encode(text, ends=True, param="prompt"))

    def of_ids(self, ids: Sequence[int]) -> TokenIds:
        """As they are. Raises InvalidInput for ids that are not in the vocabulary."""
        return self._known(np.array(ids, np.int32))

    async def of_chat(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> TokenIds:
        """By the model's chat template, with the beginning of an answer behind.

        Raises InvalidInput where there is none or it refuses these messages, ContextExceeded, EngineFailed.
        """
        if self._template is None:
            raise InvalidInput("this model has no chat template; send a prompt to /v1/completions", param="messages")
        template = self._template

        def make() -> TokenIds:
            template.check_roles({message["role"] for message in messages})
            if self._parse:
                return self._encode(template.render(messages, variables), ends=False, param="messages")
            return self._encode_marked(template.render(self._mark(messages), self._mark(variables)))

        return await self._made(ON_LOOP + 1, make)

    def text_of(self, ids: Sequence[int]) -> str:
        """Of a prompt, for its echo."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def close(self) -> None:
        """End the template's process."""
        self._thread.shutdown(wait=False)
        if self._template is not None:
            self._template.close()

    async def _made(self, characters: int, make: Callable[[], TokenIds]) -> TokenIds:
        ids = make() if characters <= ON_LOOP else await asyncio.get_running_loop().run_in_executor(self._thread, make)
        if not len(ids):
            raise EmptyInput("the prompt contains nothing that the model's tokenizer knows", param="prompt")
        return self._known(ids)

    def _known(self, ids: TokenIds) -> TokenIds:
        """The same. Some tokenizers have more tokens than their model: one of these would break the step of others."""
        known = self._card.model.vocab_size
        if (largest := ids.max()) >= known:
            raise InvalidInput(f"token id {largest} is outside this model's vocabulary of {known}", param="prompt")
        return ids

    def _encode(self, text: str, *, ends: bool, param: str) -> TokenIds:
        some = _CHARACTERS_A_TOKEN * self._card.context
        if len(text) > some:  # before it takes seconds
            found = len(self._tokenizer.encode(text[:some], add_special_tokens=False))
            if found > self._card.context:
                problem = (
                    f"the prompt has more than {found} tokens and the model accepts {self._card.context}; shorten it"
                )
                raise ContextExceeded(problem, param=param)
        return np.array(self._tokenizer.encode(text, add_special_tokens=ends).ids, np.int32)

    def _mark(self, value: Any) -> Any:
        """With marks around the names of special tokens, in all strings but names of fields."""
        if isinstance(value, str):
            return self._special.sub(f"{_BEGIN}\\g<0>{_END}", _MARKS.sub("", value))
        if isinstance(value, Mapping):
            return {key: self._mark(one) for key, one in value.items()}
        return [self._mark(one) for one in value] if isinstance(value, list | tuple) else value

    def _encode_marked(self, text: str) -> TokenIds:
        """The pieces between marks and those within, each on its own, as transformers' `encode_marked_chat` does."""
        pieces = self._marked.split(text)
        if len(pieces) == 1:
            return self._encode(text, ends=False, param="messages")
        found = [self._encode(pieces[0], ends=False, param="messages")]
        for place, piece in enumerate(pieces[1:], 1):
            if piece:
                found.append(self._inside(piece, self._letters() if place % 2 else self._tokenizer))
        return np.concatenate(found)

    def _inside(self, piece: str, tokenizer: Tokenizer) -> TokenIds:
        """Behind a line's end, which is taken away again: SentencePiece puts a blank before the first word."""
        line_end = self._tokenizer.encode("\n", add_special_tokens=False).ids
        ids = tokenizer.encode(f"\n{piece}", add_special_tokens=False).ids
        if ids[: len(line_end)] == line_end:
            ids = ids[len(line_end) :]
        else:
            ids = tokenizer.encode(piece, add_special_tokens=False).ids
        return np.array(ids, np.int32)

    def _letters(self) -> Tokenizer:
        if self._plain is None:
            self._plain = Tokenizer.from_str(self._tokenizer.to_str())
            self._plain.encode_special_tokens = True
        return self._plain
