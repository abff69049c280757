"""Rerankers that are language models: the prompt for a pair, and the two words whose logits make the score.

A score is the logit of one word minus that of the other, after the prompt's last token. A prompt consists of pieces
that are tokenized separately, as the models' authors do:
https://github.com/QwenLM/Qwen3-Embedding (README.md) and https://github.com/mixedbread-ai/mxbai-rerank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.errors import SettingsError
from deployments.models.excerpts import Excerpts
from deployments.models.model_folder import bad_model
from deployments.models.modules import module_config
from deployments.models.text_pairs import Pair, Side
from deployments.models.tokenizer_files import read_tokenizer
from deployments.settings import ModelSettings

_LEAST_ROOM = 16  # the fewest tokens that must remain for the texts of a pair


@dataclass(frozen=True, slots=True)
class Judge:
    """A reranker's prompt. `before`, `texts`, `after`: its pieces; `texts` contain {query}, {document} and
    {instruction}. `instructed`: goes before the first of `texts` if there is an instruction. `yes`, `no`: the two
    words.
    """

    before: str
    texts: tuple[str, ...]
    after: tuple[str, ...]
    yes: str
    no: str
    instruction: str = ""
    instructed: str = ""


JUDGES: Mapping[str, Judge] = {
    "qwen3-reranker": Judge(
        before="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        texts=("<Query>: {query}\n<Document>: {document}",),
        after=("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",),
        yes="yes",
        no="no",
        instruction="Given a web search query, retrieve relevant passages that answer the query",
        instructed="<Instruct>: {instruction}\n",
    ),
    "mxbai-rerank-v2": Judge(
        before="<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n",
        texts=("query: {query}", "\n", "document: {document}"),
        after=(
            "\n",
            (
                "You are a search relevance expert who evaluates how well documents match search queries. For each "
                "query-document pair, carefully analyze the semantic relationship between them, then provide your "
                "binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
            ),
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        yes="1",
        no="0",
        instructed="instruction: {instruction}\n",
    ),
}
_CONVERTED = ("Qwen3ForSequenceClassification", "Qwen2ForSequenceClassification")  # the two words' rows are one head
_NAMED = {"qwen3-reranker": "qwen3-reranker"} | dict.fromkeys(
    ("mxbai-rerank-base-v2", "mxbai-rerank-large-v2"), "mxbai-rerank-v2"
)


def judge_of(settings: ModelSettings, config: Mapping[str, Any], modules: Container[str]) -> Judge | None:
    """The prompt of a model, by `template` or by its published name. None if it is no reranker of this kind.

    Raises SettingsError if it needs a prompt and nothing says which, or if it cannot have one.
    """
    classes = config.get("architectures") or []
    is_causal = any(name.endswith("ForCausalLM") for name in classes)
    may_have_one = is_causal or any(name in _CONVERTED for name in classes)
    wanted: str = settings.template
    if wanted == "auto" and may_have_one and "Pooling" not in modules and settings.kind in {"auto", "reranker"}:
        wanted = next((template for name, template in _NAMED.items() if name in settings.id.lower()), "auto")
    if wanted == "auto":
        if is_causal and (settings.kind == "reranker" or "LogitScore" in modules):
            known = " or ".join(JUDGES)
            raise SettingsError("args.model.template", f"the model's files do not say its prompt: set {known}")
        return None
    if not may_have_one:
        named = " and ".join(classes) or "no architectures"
        also = " or ".join(_CONVERTED)
        raise SettingsError("args.model.template", f"{wanted} needs a model ForCausalLM or {also}; this one is {named}")
    judge = JUDGES[wanted]
    return judge if settings.instruction is None else replace(judge, instruction=settings.instruction)


def check_words(folder: Path, transformer: Path, judge: Judge) -> None:
    """Raises SettingsError if the model's module LogitScore compares other words than the prompt asks for."""
    said = module_config(folder, "LogitScore")
    if said is None or (fast := read_tokenizer(transformer)) is None:
        return
    for key, word in (("true_token_id", judge.yes), ("false_token_id", judge.no)):
        if said.get(key) != fast.token_to_id(word):
            raise bad_model(f"LogitScore says {key}: {said.get(key)}, and the template's {word!r} is another token")


class RerankPrompts:
    """Turns pairs into token ids with a model's own tokenizer, which reads special tokens in a prompt as such."""

    def __init__(self, judge: Judge, excerpts: Excerpts, max_tokens: int) -> None:
        """Tokenize the prompt. Raises SettingsError if it leaves no room for texts."""
        before, *after = (one.ids for one in excerpts.of_all([judge.before, *judge.after], math.inf, "right"))
        self._before, self._after = before, list(itertools.chain(*after))
        self._excerpts = excerpts
        self.special_tokens = len(self._before) + len(self._after)
        first, *others = judge.texts
        instruction = judge.instructed if judge.instruction else ""
        self._texts = [(instruction + first).replace("{instruction}", judge.instruction), *others]
        if max_tokens <= self.least_tokens:
            raise SettingsError("args.model.max_tokens", f"{max_tokens} leaves no room beside the model's prompt")

    @property
    def least_tokens(self) -> int:
        """A limit must be above this, so that a part of the texts is read."""
        return self.special_tokens + _LEAST_ROOM - 1

    def fill(
        self, pairs: Sequence[Pair], side: Side, max_tokens: int
    ) -> Iterator[tuple[int | None, npt.NDArray[np.int32]]]:
        """For each pair, yield how many tokens it has (None: too many to count), and the ids that fit. The document is
        cut to fit.
        """
        room = max_tokens - self.special_tokens
        pieces = [[_filled(text, pair) for text in self._texts] for pair in pairs]
        texts = list(dict.fromkeys(itertools.chain(*pieces)))  # a query repeats in all its pairs
        most = room if side == "right" else math.inf  # "left" cuts in the middle of the prompt
        found = dict(zip(texts, self._excerpts.of_all(texts, most, side), strict=True))
        for pair, some in zip(pairs, pieces, strict=True):
            parts: Sequence[Sequence[int]] = [found[text].ids for text in some]
            total = sum(map(len, parts))
            if total > room:
                parts = self._cut(parts, pair, side, room)
            tokens = total + self.special_tokens if all(found[text].is_whole for text in some) else None
            yield tokens, np.array([*self._before, *itertools.chain(*parts), *self._after], np.int32)

    def _cut(self, parts: Sequence[Sequence[int]], pair: Pair, side: Side, room: int) -> list[Sequence[int]]:
        *firsts, last = parts
        if firsts:
            firsts[0] = firsts[0][: room * 3 // 4]
        room -= sum(map(len, firsts))
        if side == "left":
            at = self._document_at(pair)
            over = min(len(last) - room, len(last) - at)
            last = [*last[:at], *last[at + max(0, over) :]]
        return [*firsts, last[:room]]

    def _document_at(self, pair: Pair) -> int:
        """The index of the last piece's first token that contains a part of the document."""
        start = len(_filled(self._texts[-1].partition("{document}")[0], pair))
        encoding = self._excerpts.encode(_filled(self._texts[-1], pair))
        return sum(end <= start for _, end in encoding.offsets)


def _filled(text: str, pair: Pair) -> str:
    head, document, tail = text.partition("{document}")
    return head.replace("{query}", pair.first) + (pair.second if document else "") + tail
