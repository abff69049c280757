"""Turns queries into token ids: texts, pairs and token ids, with prompts before them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from deployments.errors import InvalidInput
from deployments.models.colbert import Role
from deployments.models.model_files import ModelCard
from deployments.models.outputs import Numbers, Output, Outputs, largest_weights, split
from deployments.models.text_pairs import Cuts, Pair
from deployments.models.tokenizer import Query, Token, TokenIds, Tokenizer, check_texts
from deployments.models.tokenizing import Tokenizing

_NUMBERS_OF_TOKENS = 4_000_000  # 10,000 tokens of 384 numbers; as text about 45 MB


class Encoder:
    """A Router's encoder. `auto_truncate`: the setting `limits.auto_truncate`."""

    def __init__(self, card: ModelCard, *, auto_truncate: bool, fast: FastTokenizer | None = None) -> None:
        self._card, self._auto_truncate = card, auto_truncate
        self._tokenizer = Tokenizer(card, fast)
        self.tokenizing = Tokenizing(self._tokenizer.whole_characters)
        self._tokenizer.encode(["warm"], Cuts(truncate=True))

    async def encode(
        self, queries: Sequence[Query], prompt: str, *, cuts: Cuts, role: Role, characters: int
    ) -> tuple[list[TokenIds], float]:
        """The token ids of each query, int32 [tokens], with `prompt` before each, and the seconds as in `Tokenizing`.
        `characters`: of all queries together.

        Raises EmptyInput or InvalidInput.
        """
        known = cuts._replace(truncate=self._auto_truncate) if cuts.truncate is None else cuts

        def encode(some: Sequence[Query], first: int) -> list[TokenIds]:
            return self._token_ids(some, prompt, first, role, known)

        return await self.tokenizing.encode(queries, characters, encode)

    def _token_ids(self, queries: Sequence[Query], prompt: str, first: int, role: Role, cuts: Cuts) -> list[TokenIds]:
        if prompt:
            queries = [prompt + self._text(query, index) for index, query in enumerate(queries, first)]
        found: list[TokenIds] = []
        for kind, group in itertools.groupby(queries, type):
            some: Any = list(group)
            at = first + len(found)
            if kind is str:
                found += self._tokenizer.encode(some, cuts, first=at, role=role)
            elif kind is Pair:
                found += self._tokenizer.encode_pairs(some, cuts, first=at)
            else:
                found += [self._tokenizer.check(ids, index, cuts, role=role) for index, ids in enumerate(some, at)]
        return found

    def _text(self, query: Query, index: int) -> str:
        """The text of a query that gets a prompt. Token ids are decoded, as in TEI."""
        if isinstance(query, str):
            check_texts([query], index)
            return query
        assert not isinstance(query, Pair)  # kinds that read pairs have no prompts
        return self._tokenizer.decode([query], skip_special_tokens=True)[0]

    def prompt(self, name: str | None) -> str:
        """The prompt of that name. Empty: no prompt; None: the model's default, if any. Raises InvalidInput."""
        prompts = self._card.prompts
        name = self._card.default_prompt_name if name is None else name
        if not name:
            return ""
        if name not in prompts:
            there = f"only {', '.join(prompts)}" if prompts else "the model has none"
            raise InvalidInput(f"this model has no prompt named '{name}': {there}", param="prompt_name")
        return prompts[name]

    def check_numbers(self, token_ids: Sequence[TokenIds], outputs: Outputs) -> None:
        """Raises InvalidInput if the rows of all tokens have too many numbers for one answer."""
        tokens = sum(map(len, token_ids))
        width = sum(self._card.token_widths[output] for output in outputs if output != "text")
        most = max(_NUMBERS_OF_TOKENS // width, self._card.max_tokens)
        if tokens > most:
            raise InvalidInput(
                f"the inputs have {tokens} tokens, and the vectors of {most} are answered at once; send fewer at once",
                param="inputs",
            )

    def rows(self, numbers: Numbers, ids: TokenIds, *, outputs: Outputs, role: Role) -> dict[Output, Numbers]:
        """Split the numbers of a query's answer into its outputs: a vector for "text", a row for `outputs.unpack` for
        "sparse", float32 [tokens, numbers] for others.
        """
        found = split(numbers, outputs, len(ids), self._card.token_widths)
        if "text" in found:
            found["text"] = found["text"][0]
        if "sparse" in found:
            found["sparse"] = largest_weights(ids, found["sparse"][:, 0], self._tokenizer.weightless)
        if "multi_vector" in found:
            found["multi_vector"] = found["multi_vector"][self._tokenizer.compared(ids, role)]
        return found

    async def tokenize(
        self, texts: Sequence[str], *, special_tokens: bool = True, prompt_name: str | None = None
    ) -> list[list[Token]]:
        """Each text's tokens, including its prompt's, without truncation. Raises EmptyInput or InvalidInput."""
        prompt = self.prompt(prompt_name)
        check_texts(texts)
        prompted = [prompt + text for text in texts]
        return await asyncio.to_thread(self._tokenizer.tokens, prompted, special_tokens=special_tokens)

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Decode token ids into texts. Raises EmptyInput or InvalidInput."""
        return await asyncio.to_thread(self._tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
