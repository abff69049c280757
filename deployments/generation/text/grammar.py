"""Binds answers to a grammar, such as the JSON of a schema, by the library llguidance. Pure.

A Router compiles a request's grammar to refuse what cannot be used. The replica compiles it again, and lets a token
come only if the grammar allows it. Grammars are clients' input. So llguidance's own limits bound what compiling and
each token may take (`_LIMITS`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from deployments.generation.text.sampling import Numbers

MOST_CHARACTERS = 2**15  # of a schema; with these limits, compiling one takes at most 0.1 s, and a token 3 ms
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=10_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
_OPTIONS = {"whitespace_pattern": r"[ \n]{1,16}", "lenient": False}  # no answer of blanks alone


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of the JSON that a schema describes. Raises ValueError if the schema is too large."""
    return lark_grammar([f"start: {json_of(schema)}"])


def json_of(schema: Mapping[str, Any]) -> str:
    """What stands for the JSON of a schema in a line of `lark_grammar`."""
    return f"%json {json.dumps({**schema, 'x-guidance': _OPTIONS}, ensure_ascii=False)}"


def lark_grammar(lines: Sequence[str]) -> str:
    """The grammar in llguidance's variant of Lark. Raises ValueError if it is too large."""
    text = "\n".join(lines)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, and this server accepts {MOST_CHARACTERS}")
    return str(LLMatcher.grammar_from_lark(text))


class Grammars:
    """Compiles grammars for one model's tokens, in a thread of its own."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int, end_tokens: Collection[int]) -> None:
        """`tokenizer` is called in the thread. `end_tokens`: the model's."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._tokens = self._thread.submit(_tokens, tokenizer, vocab_size, list(end_tokens))

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """A matcher at the grammar's beginning. The future raises ValueError if the grammar cannot be used."""
        return self._thread.submit(self._compiled, grammar)

    def rule(self, grammar: str, end_tokens: Collection[int]) -> GrammarRule:
        """The rule of one answer. `end_tokens`: those that end it."""
        return GrammarRule(self.compile(grammar), end_tokens)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokens.result(), grammar, log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()  # shows whether anything follows the grammar
        if matcher.is_error():
            raise ValueError(matcher.get_error().partition("\n")[0].rpartition("JSON schema: ")[2][:200])
        return matcher


def _tokens(tokenizer: Callable[[], Tokenizer], vocab_size: int, end_tokens: list[int]) -> LLTokenizer:
    """Raises ValueError if llguidance cannot read this tokenizer."""
    found = tokenizer()
    words = max(vocab_size, found.get_vocab_size())
    try:
        return LLTokenizer(found.to_str(), n_vocab=words, eos_token=end_tokens or None)
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
        raise ValueError(f"llguidance cannot read this model's tokenizer: {error}") from None


class GrammarRule:
    """A `LogitRule`: tokens continue one answer by its grammar, and end tokens come only where it is whole."""

    def __init__(self, compiled: Future[LLMatcher], end_tokens: Collection[int]) -> None:
        self._compiled, self._consumed = compiled, 0
        self._ends = np.array(sorted(end_tokens), np.intp)

    def alter(self, logits: Numbers, drawn: Sequence[int]) -> None:
        """Waits for the grammar. If a limit is exceeded, no logit stays finite, and the answer fails."""
        if self._compiled.exception() is not None:
            logits.fill(np.nan)
            return
        matcher = self._compiled.result()
        matcher.consume_tokens(list(drawn[self._consumed :]))
        self._consumed = len(drawn)
        ends, is_whole = logits[self._ends], matcher.is_accepting()
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little")
        if matcher.is_error():
            logits.fill(np.nan)
            return
        np.copyto(logits, -np.inf, where=allowed == 0)
        logits[self._ends] = ends if is_whole else -np.inf
