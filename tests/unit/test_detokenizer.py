"""Text that comes token by token is the whole text's; stops are found across tokens and never shown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deployments.generation.text import detokenizer
from deployments.generation.text.detokenizer import Detokenizer

BYTES = pre_tokenizers.ByteLevel.alphabet()


@pytest.fixture(scope="module")
def tokenizer():
    """Each byte is a token: characters come in pieces."""
    made = Tokenizer(models.BPE({byte: number for number, byte in enumerate(sorted(BYTES))}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


def streamed(tokenizer, text, stops=()):
    """The pieces, the last from the end."""
    stream = Detokenizer(tokenizer, stops)
    pieces = [stream.add(token) for token in tokenizer.encode(text).ids]
    return [*pieces, stream.end()], stream.stopped


def up_to_the_first_stop(text, stops):
    """The stop that is whole first counts: text is given out as it comes."""
    for end in range(len(text) + 1):
        if found := [text[:end].find(stop) for stop in stops if stop in text[:end]]:
            return text[: min(found)], True
    return text, False


SOME = "ab €ß漢🙂\n"


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=SOME, min_size=1), st.lists(st.text(alphabet=SOME, min_size=1, max_size=4), max_size=3))
def test_the_pieces_are_the_text_up_to_the_first_stop(tokenizer, text, stops):
    pieces, stopped = streamed(tokenizer, text, stops)
    assert ("".join(pieces), stopped) == up_to_the_first_stop(text, stops)


def test_half_a_character_at_the_end_is_left_out(tokenizer):
    stream = Detokenizer(tokenizer)
    tokens = tokenizer.encode("a🙂").ids[:-1]
    assert "".join(stream.add(token) for token in tokens) + stream.end() == "a"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("€1", ["", "", "€", "1", ""]),
        ("ab<eab", ["a", "b", "", "", "<ea", "b", ""]),
        ("a<en", ["a", "", "", "", "<en"]),
    ],
)
def test_half_a_character_and_what_may_be_a_stop_are_held_back(tokenizer, text, pieces):
    assert streamed(tokenizer, text, ["<end>"]) == (pieces, False)


@pytest.mark.parametrize("silent", ["<end>", "\ufffd"])
def test_thousands_of_tokens_without_text_are_not_decoded_again_with_each_more(tokenizer, monkeypatch, silent):
    """With `ignore_eos` a model may say nothing else."""
    held = []

    class Counting:
        def __init__(self, **more):
            self.stream, self.count = decoders.DecodeStream(**more), 0

        def step(self, *what):
            text = self.stream.step(*what)
            self.count = 0 if text else self.count + 1
            held.append(self.count)
            return text

    monkeypatch.setattr(detokenizer, "DecodeStream", Counting)
    made = Tokenizer.from_str(tokenizer.to_str())
    made.add_special_tokens(["<end>"])
    token, *_ = made.encode("<end>" if silent == "<end>" else "🙂").ids
    for count in [*range(60, 70), 1000]:  # it begins anew at each byte of the character
        stream = Detokenizer(made)
        texts = [stream.add(one) for one in [*made.encode("a").ids, *[token] * count, *made.encode("🙂bc").ids]]
        assert texts[0] == "a"
        assert "".join(texts[1:]).lstrip("\ufffd") == "🙂bc"
    assert max(held) < 70


@settings(deadline=None)
@given(st.lists(st.integers(0, 299), max_size=60))
def test_bytes_that_are_no_text_end_no_answer(ids):
    """Models with byte tokens, such as Llama's first ones, may say any bytes at a high temperature."""
    words = {f"<0x{byte:02X}>": byte for byte in range(256)} | {f"\u2581w{n}": 256 + n for n in range(44)}
    made = Tokenizer(models.WordLevel(words, unk_token="<0x00>"))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    stream = Detokenizer(made)
    text = "".join([*map(stream.add, ids), stream.end()])
    if all(token >= 256 for token in ids):
        assert text == made.decode(ids)


def test_a_text_that_continues_a_prompt_keeps_its_first_blank(tokenizer):
    """As Llama's first tokenizers: a text's first blank is the tokenizer's own."""
    words = Tokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1, "</s>": 2}, unk_token="</s>"))
    words.add_special_tokens(["</s>"])
    metaspace = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words.decoder = decoders.Sequence(metaspace)
    for before, text in (((), "two one"), ((0,), " two one"), ((0, 0, 0, 0), " two one"), ((2,), "two one")):
        stream = Detokenizer(words, before=before)
        assert "".join(map(stream.add, (1, 0))) + stream.end() == text
    half = tokenizer.encode("a\u20ac").ids
    for cut in (1, 2, 3):  # a prompt of token ids may end within a character
        stream = Detokenizer(tokenizer, before=half[:cut])
        assert "".join(map(stream.add, [*half[cut:], *tokenizer.encode("b").ids])) == "\u20acb"


def test_the_text_of_the_least_tokens_is_not_searched_for_stops(tokenizer):
    for least, text in ((0, "a"), (1, "a"), (2, "aba"), (3, "aba"), (4, "abab")):
        stream = Detokenizer(tokenizer, ["b"], min_tokens=least)
        assert "".join(map(stream.add, tokenizer.encode("abab").ids)) + stream.end() == text
        assert stream.stopped == (least < 4)
