"""Turns a request's text, chat or token ids into the token ids of a prompt.

In a chat, names of special tokens (`<|im_end|>`) in a client's text are read as plain characters. Otherwise, a document
that a client quotes could end the client's turn and begin a system message. Only the template writes special tokens, as
in transformers with `sanitize_control_tokens`. A prompt of `/v1/completions` is read as the tokenizer reads it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from deployments.errors import ContextExceeded, EmptyInput, InvalidInput
from deployments.generation.text.chat_template import ChatTemplate, Message, PromptEnd
from deployments.generation.text.model_card import GenerationCard
from deployments.models.tokenizer import TokenIds
from deployments.models.tokenizing import ON_LOOP

_BEGIN, _END = "\U000f0000", "\U000f0001"  # private-use characters, which are removed from clients' texts
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
_CHARACTERS_A_TOKEN = 16  # if a text is longer than the context times this, only a part is tokenized at first


class Prompt(NamedTuple):
    """The token ids of a prompt, int32 [tokens], and the seconds that a thread took to make them."""

    ids: TokenIds
    seconds: float = 0.0


class PromptEncoder:
    """The prompt encoder of one model."""

    def __init__(self, card: GenerationCard, tokenizer: Tokenizer, *, parse_special_tokens: bool = False) -> None:
        """`parse_special_tokens`: read their names in a chat's texts as these tokens, as transformers and vLLM do.

        Raises SettingsError if the chat template cannot be used.
        """
        self._card, self._tokenizer, self._parse = card, tokenizer, parse_special_tokens
        self._template = None if card.chat_template is None else ChatTemplate(card.chat_template, card.special_tokens)
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True)) or "(?!)"
        self._special, self._marked = re.compile(names), re.compile(f"{_BEGIN}({names}){_END}|[{_BEGIN}{_END}]")
        self._plain: Tokenizer | None = None  # the tokenizer, but reading special tokens' names as plain characters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    async def of_text(self, text: str) -> Prompt:
        """Encode a text, with the tokens that the tokenizer puts around it. Raises EmptyInput or ContextExceeded."""
        if not text:
            raise EmptyInput("prompt is an empty string; send text", param="prompt")
        return await self._made(len(text), lambda: self._encode(text, ends=True, param="prompt"))

    def of_ids(self, ids: Sequence[int]) -> Prompt:
        """Take token ids as they are. Raises InvalidInput for ids that are not in the vocabulary."""
        return Prompt(self._known(np.array(ids, np.int32)))

    async def of_chat(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        ends: PromptEnd = "answer",
        tools: Sequence[Any] = (),
    ) -> Prompt:
        """Encode a chat by the model's chat template. `ends`, `tools`: see `ChatTemplate.render`.

        Raises InvalidInput if there is no template or it refuses these messages, ContextExceeded, or EngineFailed.
        """
        if self._template is None:
            raise InvalidInput("this model has no chat template; send a prompt to /v1/completions", param="messages")
        template = self._template

        def make() -> TokenIds:
            template.check_roles({message["role"] for message in messages})
            if self._parse:
                return self._encode(template.render(messages, variables, ends, tools), ends=False, param="messages")
            marked = [self._mark(one) for one in (messages, variables, tools)]
            return self._encode_marked(template.render(marked[0], marked[1], ends, marked[2]))

        return await self._made(ON_LOOP + 1, make)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of a prompt, for its echo."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def close(self) -> None:
        """End the template's process."""
        self._thread.shutdown(wait=False)
        if self._template is not None:
            self._template.close()

    async def _made(self, characters: int, make: Callable[[], TokenIds]) -> Prompt:
        def timed() -> Prompt:
            began = time.perf_counter()
            return Prompt(make(), time.perf_counter() - began)

        loop = asyncio.get_running_loop()
        made = Prompt(make()) if characters <= ON_LOOP else await loop.run_in_executor(self._thread, timed)
        if not len(made.ids):
            raise EmptyInput("the prompt contains nothing that the model's tokenizer knows", param="prompt")
        self._known(made.ids)
        return made

    def _known(self, ids: TokenIds) -> TokenIds:
        """Return `ids`. Raises InvalidInput if the model does not know them all: some tokenizers have more tokens than
        their model, and such a token would break the step of others, too.
        """
        known = self._card.model.vocab_size
        if (largest := ids.max()) >= known:
            raise InvalidInput(f"token id {largest} is outside this model's vocabulary of {known}", param="prompt")
        return ids

    def _encode(self, text: str, *, ends: bool, param: str) -> TokenIds:
        some = _CHARACTERS_A_TOKEN * self._card.context
        if len(text) > some:  # tokenizing all of it would take seconds
            found = len(self._tokenizer.encode(text[:some], add_special_tokens=False))
            if found > self._card.context:
                problem = (
                    f"the prompt has more than {found} tokens and the model accepts {self._card.context}; shorten it"
                )
                raise ContextExceeded(problem, param=param)
        return np.array(self._tokenizer.encode(text, add_special_tokens=ends).ids, np.int32)

    def _mark(self, value: Any) -> Any:
        """Put marks around the names of special tokens, in all strings except field names."""
        if isinstance(value, str):
            return self._special.sub(f"{_BEGIN}\\g<0>{_END}", _MARKS.sub("", value))
        if isinstance(value, Mapping):
            return {key: self._mark(one) for key, one in value.items()}
        return [self._mark(one) for one in value] if isinstance(value, list | tuple) else value

    def _encode_marked(self, text: str) -> TokenIds:
        """Encode the pieces between marks and within marks separately, as transformers' `encode_marked_chat` does."""
        pieces = self._marked.split(text)
        if len(pieces) == 1:
            return self._encode(text, ends=False, param="messages")
        found = [self._encode(pieces[0], ends=False, param="messages")]
        for place, piece in enumerate(pieces[1:], 1):
            if piece:
                found.append(self._inside(piece, self._letters() if place % 2 else self._tokenizer))
        return np.concatenate(found)

    def _inside(self, piece: str, tokenizer: Tokenizer) -> TokenIds:
        """Encode a piece after a line break, whose tokens are then removed: SentencePiece would put a space before the
        first word of a text.
        """
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
