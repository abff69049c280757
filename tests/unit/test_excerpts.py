"""An excerpt's tokens are the whole text's."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from deployments.errors import InvalidInput
from deployments.models import excerpts
from deployments.models.excerpts import Excerpts
from deployments.models.model_files import read_model_card
from deployments.models.text_pairs import Cuts, Pair
from deployments.models.tokenizer import Tokenizer as ModelTokenizer
from deployments.models.tokenizer_files import read_tokenizer
from tests.kit import tiny_tokenizers
from tests.kit.router_world import SETTINGS

CARD = read_model_card(SETTINGS.model)
EDGE = excerpts._EDGE
FAMILIES = {
    "llama": functools.partial(tiny_tokenizers.llama, add_eos_token=False),
    "qwen": tiny_tokenizers.qwen,
    "bert": tiny_tokenizers.bert_words,
    "roberta": tiny_tokenizers.roberta_words,
    "xlm-roberta": tiny_tokenizers.xlm_roberta_words,
}
PIECES = [
    *("the quick fox ", "playing", ", it's. ", "去哪里？", "다람쥐", "привет мир ", "ﬁnd①™ ", "12345", " ", "\n", "\t"),
    *("a", "\u0301", "e\u0301", "\u1161", "\u200b", "\x00", "\ufeff", "\u3000", "👩‍👩‍👧", "🇩🇪", "!", "▁", "Σ", "``"),
    *("_", "\u0d4e", "[SEP]", "<mask>", "</s>", "<|endoftext|>"),
]
RUNS = st.tuples(st.sampled_from(PIECES), st.sampled_from([1, 1, 1, 2, 3, 30, 30, EDGE + 9]))
TEXTS = st.lists(RUNS, min_size=1, max_size=40).map(lambda runs: "".join(piece * count for piece, count in runs))
WORDS = "The quick brown fox, jumping. "
LONG = WORDS * 100


@functools.cache
def tokenizer(name):
    if name == "MiniLM":
        return read_tokenizer(CARD.folder)
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES[name](Path(folder))
        return AutoTokenizer.from_pretrained(folder)._tokenizer


class Recorder:
    """A tokenizer that counts the characters which it is given."""

    def __init__(self, fast):
        self.fast, self.characters = fast, 0

    def __getattr__(self, name):
        return getattr(self.fast, name)

    def encode_batch(self, texts, **how):
        self.characters += sum(map(len, texts))
        return self.fast.encode_batch(texts, **how)

    def encode_batch_fast(self, texts, **how):
        self.characters += sum(map(len, texts))
        return self.fast.encode_batch_fast(texts, **how)


@pytest.mark.parametrize("name", [*FAMILIES, "MiniLM"])
@given(text=TEXTS, tokens=st.integers(1, 60))
def test_the_tokens_of_an_excerpt_are_those_of_the_whole_text(name, text, tokens):
    fast = tokenizer(name)
    whole = fast.encode(text, add_special_tokens=False).ids
    for side in ("right", "left"):
        ((ids, is_whole),) = Excerpts(fast).of_all([text], tokens, side)
        kept = len(whole) if is_whole else tokens + 1
        assert len(ids) >= kept
        assert ids[:kept] == whole[:kept] if side == "right" else ids[-kept:] == whole[-kept:]


@pytest.mark.parametrize(
    ("name", "text", "side", "is_whole"),
    [
        ("MiniLM", LONG, "right", False),
        ("MiniLM", LONG, "left", False),
        ("qwen", LONG, "right", False),
        ("xlm-roberta", LONG, "left", False),
        ("MiniLM", "去哪里" * 900, "right", False),
        ("MiniLM", "去哪里" * 900, "left", True),  # no blank to begin with
        ("llama", LONG, "right", True),  # one word
        ("MiniLM", "x" * 3000, "right", True),
        ("MiniLM", "a b c d e " + "\x00" * 3000 + "f", "right", True),  # which may be "ef"
        ("qwen", "a b c d e " + "\u0301" * 3000, "right", True),
        ("MiniLM", "a b c d e " + " " * 3000 + "[MASK]", "right", True),
    ],
)
def test_where_an_excerpt_says_enough(name, text, side, is_whole):
    (found,) = Excerpts(tokenizer(name)).of_all([text], 4, side)
    assert found.is_whole is is_whole


def test_up_to_which_length_a_text_is_tokenized_whole():
    one = Excerpts(tokenizer("MiniLM"))
    assert one.characters(4) == 4 * 8 + 2 * EDGE
    text = LONG[: 4 * 8 + 2 * EDGE + 1]
    assert [found.is_whole for found in one.of_all([text[:-1], text], 4, "right")] == [True, False]
    assert one.of_all([text[:-1]], 4, "right")[0].is_whole


def split(pattern):
    return pre_tokenizers.Split(pattern, "isolated")


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "added", "can_cut"),
    [
        (None, None, "", True),
        (normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]), None, "", True),
        (normalizers.Replace(" ", "▁"), split(" "), "", True),
        (normalizers.Replace(Regex(".*"), ""), None, "", False),
        (None, split(Regex(tiny_tokenizers.PRETOKENIZE_REGEX)), "", True),
        (None, split(Regex("a(?=.*z)")), "", False),  # it looks far ahead
        (None, split("x y"), "", False),  # and over a blank between words
        (None, pre_tokenizers.UnicodeScripts(), "", False),
        (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.FixedLength(3)]), "", False),
        (None, None, "x" * 64, True),
        (None, None, "x" * 65, False),
        (None, None, "<x y>", False),
    ],
)
def test_what_a_tokenizer_must_be_made_of(normalizer, pre_tokenizer, added, can_cut):
    fast = Tokenizer(models.BPE())
    if normalizer is not None:
        fast.normalizer = normalizer
    if pre_tokenizer is not None:
        fast.pre_tokenizer = pre_tokenizer
    fast.add_tokens([AddedToken(added)] if added else [])
    assert (Excerpts(fast).characters(1) < 1e9) is can_cut


@pytest.mark.parametrize("side", ["right", "left"])
def test_of_eight_mebibytes_a_few_lines_are_tokenized(side):
    recorder = Recorder(tokenizer("MiniLM"))
    one = ModelTokenizer(CARD, recorder)
    text, before = WORDS * (2**23 // len(WORDS)), recorder.characters
    (ids,) = one.encode([text], Cuts(truncate=True, side=side))
    few = text[:9000] if side == "right" else text[-9000:]
    assert (
        ids.tolist()
        == ModelTokenizer(CARD, tokenizer("MiniLM")).encode([few], Cuts(truncate=True, side=side))[0].tolist()
    )
    with pytest.raises(InvalidInput, match=f"input 7 has more than {CARD.max_tokens} tokens and the model takes"):
        one.encode([text], Cuts(truncate=False), first=7)
    assert recorder.characters - before <= 2 * one.whole_characters


@given(
    first=st.sampled_from([WORDS, LONG, LONG * 2, LONG + WORDS]),
    second=st.sampled_from([WORDS, LONG, LONG * 2, LONG + WORDS]),
    side=st.sampled_from(["right", "left"]),
    max_tokens=st.integers(20, 31),
)
def test_pairs_of_long_texts_are_cut_as_if_all_were_tokenized(first, second, side, max_tokens):
    card = replace(CARD, kind="reranker", max_tokens=max_tokens)
    one, other = (ModelTokenizer(card, tokenizer("MiniLM")) for _ in range(2))
    other._excerpts._can_cut = False
    cut, whole = (it.encode_pairs([Pair(first, second)], Cuts(truncate=True, side=side))[0] for it in (one, other))
    assert cut.tolist() == whole.tolist()
