import dataclasses
import json
import logging
import shutil
import threading
from unittest.mock import Mock

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import Sequence

from deployments.engines import Stopped, TokenBatch, embed
from deployments.engines.emulated import EmulatedEngine, run_seconds
from deployments.engines.micro_batches import window_tokens
from deployments.engines.packed.families import bert
from deployments.errors import EmptyInput, InvalidInput, SettingsError
from deployments.models.text_pairs import Cuts
from deployments.models.tokenizer import Tokenizer
from deployments.settings import EmulatedDevice
from tests.kit.engines import NEVER, card_of, engine_of, rows_of
from tests.kit.kinds_of_models import PACKAGE

LENGTHS = [3, 256, 7, 40, 5, 75, 120, 6, 4, 33, 9, 200, 12]


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    """all-MiniLM-L6-v2, the first two of its layers."""
    folder = shutil.copytree(PACKAGE, tmp_path_factory.mktemp("minilm") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return card_of(folder)


@pytest.fixture(scope="module")
def queries(card):
    random = np.random.default_rng(1)
    return [random.integers(1000, card.vocab_size, length, dtype=np.int32) for length in LENGTHS]


@pytest.fixture(scope="module")
def exact(card):
    return engine_of(card, form="padded")


def cosines(one, other):
    return np.sum(one * other, axis=1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


@pytest.mark.parametrize(("dtype", "most_tokens"), [("float32", 16384), ("float32", 300), ("bfloat16", 16384)])
def test_same_vector_alone_in_a_batch_and_in_small_passes(card, queries, exact, dtype, most_tokens):
    made = engine_of(card, dtype=dtype, max_batch_tokens=most_tokens)
    made.probe()
    alone = np.concatenate([rows_of(exact, [query]) for query in queries])
    assert cosines(rows_of(made, queries), alone).min() >= (0.9999 if dtype == "float32" else 0.999)


def test_a_model_that_does_not_compute_is_noticed(card, monkeypatch):
    """A product of its own says nothing of the model's."""
    made = engine_of(card)
    made.probe()
    monkeypatch.setattr(made, "_encoder", Mock(side_effect=RuntimeError("no kernel image is available")))
    with pytest.raises(RuntimeError, match="no kernel image"):
        made.probe()
    monkeypatch.setattr(made, "passes", lambda *_: [(np.array([0]), (np.full((1, 4), np.nan, np.float32),))])
    with pytest.raises(RuntimeError, match="not finite"):
        made.probe()


def test_auto_says_why(card):
    info = engine_of(card, dtype="auto").info
    assert info.engine == "torch"
    assert "packed" in info.why
    assert info.dtype in {"bfloat16", "float32"}
    assert info.agreement is None or info.agreement >= 0.999
    assert not info.emulated


def test_weights_that_are_not_there_are_not_made_up(card, tmp_path):
    """transformers would fill them with random numbers and say so in its log only."""
    folder = tmp_path / "model"
    shutil.copytree(card.folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.0.attention.self.other.weight"] = weights.pop("encoder.layer.0.attention.self.query.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingsError, match=r"1 weights of a bert model are missing .*trust_remote_code"):
        engine_of(card_of(folder))


def mean_of_tokens(vectors):
    return np.stack([one.mean(0) for one in np.split(vectors, np.cumsum(LENGTHS)[:-1])])


@pytest.mark.parametrize(("form", "threads"), [("packed", 2), ("padded", 2)])
def test_passes_are_every_query_once_with_its_own_vectors(card, queries, exact, form, threads):
    engine = engine_of(card, form=form, threads=threads, max_batch_tokens=200)
    assert engine.micro_batch_tokens == window_tokens(200, threads, padded=form != "packed")
    for output in ("text", "tokens"):
        batch = TokenBatch.pack(queries, (output,))
        passes = list(engine.passes(batch, NEVER))
        assert len(passes) > 2
        assert sorted(np.concatenate([chosen for chosen, _ in passes]).tolist()) == list(range(len(queries)))
        whole = embed(engine, batch, NEVER)
        for chosen, (vectors,) in passes:
            assert vectors.dtype == np.float32
            assert vectors.shape == (len(batch.rows(chosen, output)), card.dimension)
            assert np.allclose(vectors, whole[batch.rows(chosen, output)], atol=1e-6)
            alone = embed(engine, batch.select(chosen[:1]), NEVER)
            assert np.allclose(vectors[: len(alone)], alone, atol=1e-4)
        pooled = mean_of_tokens(whole) if output == "tokens" else whole
        assert np.allclose(pooled, rows_of(exact, queries), atol=1e-4)


def test_a_run_is_stopped_between_two_passes(card, queries):
    engine = engine_of(card, max_batch_tokens=40)
    stop = threading.Event()
    passes = engine.passes(TokenBatch.pack(queries), stop)
    next(passes)
    stop.set()
    with pytest.raises(Stopped):
        next(passes)


def test_a_form_that_fails_is_left_out(card, monkeypatch, caplog):
    """As packed does where torch's own attention takes no `scale` yet."""

    def lacks_it(qkv, layout):
        raise TypeError("varlen_attn() got an unexpected keyword argument 'scale'")

    monkeypatch.setattr(bert, "attention_for", lambda *_, **__: lacks_it)
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    assert engine_of(card).form == "padded"
    (told,) = {record.getMessage() for record in caplog.records if "left out" in record.getMessage()}
    assert told.startswith("the packed form in float32 is left out: TypeError: varlen_attn()")


class Clock:
    """Time that passes only while somebody waits. It stands for the event that stops a run, too."""

    def __init__(self, stop_at=float("inf")):
        self.now, self.stop_at = 100.0, 100.0 + stop_at

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now = min(self.now + seconds, self.stop_at)
        return self.now >= self.stop_at


def emulated(card, clock, **device):
    return EmulatedEngine(card, EmulatedDevice(**{"alpha_s": 0.01, "beta_s": 0.2, **device}), clock)


def ends(engine, clock, lengths):
    """When each pass of a run ends, from the run's start, and its queries."""
    started = clock.now
    batch = TokenBatch.pack([np.arange(length, dtype=np.int32) for length in lengths])
    return [(round(clock.now - started, 9), queries.tolist()) for queries, _ in engine.passes(batch, clock)]


@pytest.mark.parametrize(
    ("lengths", "device", "wanted_s"),
    [
        ([75] * 10, {}, 0.3),
        ([150] * 5, {}, 0.3),
        ([25, 50], {}, 0.21),
        ([75] * 10, {"time_scale": 0.1, "noise": 0.5, "drift": 2.0}, 0.3),  # all that is not Eq. 12
        ([75], {"tile_queries": 8}, 0.28),
        ([75] * 8, {"tile_queries": 8}, 0.28),
        ([75] * 9, {"tile_queries": 8}, 0.36),
        ([75] * 16, {"tile_queries": 8}, 0.36),
        ([30, 60] * 9, {"tile_queries": 2}, 0.2 + 18 * 0.006),
        ([75] * 10, {"curvature": 2.0}, 0.2 + 0.1 * 1.2),
        ([75] * 20, {"curvature": 2.0}, 0.2 + 0.2 * 1.4),
    ],
)
def test_an_emulated_run_takes_as_long_as_its_tokens(lengths, device, wanted_s):
    emulated_device = EmulatedDevice(alpha_s=0.01, beta_s=0.2, **device)
    assert run_seconds(emulated_device, np.array(lengths, np.int32)) == pytest.approx(wanted_s)


@pytest.mark.parametrize(
    ("lengths", "device", "micro_batch_tokens", "wanted"),
    [
        ([75, 150, 75], {}, 0, [(0.24, [0, 1, 2])]),
        ([75, 150, 75, 75, 75], {"micro_batch_queries": 2}, 150, [(0.23, [0, 1]), (0.25, [2, 3]), (0.26, [4])]),
        (
            [75] * 4,
            {"micro_batch_queries": 2, "curvature": 10.0, "time_scale": 10.0},
            150,
            [(2.28, [0, 1]), (2.56, [2, 3])],
        ),
    ],
)
def test_emulated_answers_come_pass_by_pass_or_at_the_end_of_the_run(card, lengths, device, micro_batch_tokens, wanted):
    clock = Clock()
    engine = emulated(card, clock, **device)
    assert engine.micro_batch_tokens == micro_batch_tokens
    assert ends(engine, clock, lengths) == wanted


def test_an_emulated_device_that_becomes_slower(card):
    clock = Clock()
    engine = emulated(card, clock, drift=1.5, drift_after_s=0.5)
    took = [ends(engine, clock, [75] * 10)[0][0] for _ in range(4)]
    assert took == [0.3, 0.3, 0.45, 0.45]  # the second one starts before the half second is over
    quick = emulated(card, clock, drift=1.5, drift_after_s=0.5, time_scale=0.1)
    assert [ends(quick, clock, [75] * 10)[0][0] for _ in range(3)] == [0.03, 0.03, 0.045]


@pytest.mark.parametrize("micro_batch_queries", [None, 3])
def test_an_emulated_run_is_stopped_while_it_waits(card, micro_batch_queries):
    clock = Clock(stop_at=0.25)
    with pytest.raises(Stopped):
        ends(emulated(card, clock, micro_batch_queries=micro_batch_queries), clock, [75] * 10)
    assert clock.now == 100.25


def test_emulated_vectors_are_of_unit_length_and_the_same_for_the_same_query(card, queries):
    at_once, by_pass = (
        EmulatedEngine(card, EmulatedDevice(alpha_s=0, beta_s=0, micro_batch_queries=micro_batch_queries))
        for micro_batch_queries in (None, 5)
    )
    for output, rows in (("text", len(LENGTHS)), ("tokens", sum(LENGTHS))):
        vectors = rows_of(by_pass, queries, output)
        assert (vectors.dtype, vectors.shape) == (np.float32, (rows, card.dimension))
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        first = rows_of(at_once, queries[:1], output)
        assert np.array_equal(vectors[: len(first)], first)


def test_emulated_noise_and_outliers_are_seeded(card):
    def latencies(**noise):
        clock = Clock()
        engine = emulated(card, clock, **noise)
        return [ends(engine, clock, [75] * 10)[0][0] for _ in range(2000)]

    assert latencies() == pytest.approx([0.3] * 2000)
    noisy = latencies(noise=0.03, seed=1)
    assert noisy == latencies(noise=0.03, seed=1) != latencies(noise=0.03, seed=2)
    assert np.std(noisy) == pytest.approx(0.009, rel=0.1)
    outliers = np.array(latencies(outlier_rate=0.05, outlier_factor=3))
    assert np.mean(outliers > 0.8) == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize(
    "wrong",
    [{"micro_batch_queries": 0}, {"tile_queries": 0}, {"curvature": -0.1}, {"drift": 0.9}, {"drift_after_s": -1.0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_an_emulated_device_cannot_be(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        EmulatedDevice(alpha_s=0.01, beta_s=0.2, **wrong)


def test_tokenizer(card):
    tokenizer = Tokenizer(card)
    short, long = tokenizer.encode(["hello world", "word " * 400], Cuts(truncate=True))
    assert short.tolist() == [101, 7592, 2088, 102]
    assert (len(long), long[0], long[-1]) == (256, 101, 102)
    with pytest.raises(InvalidInput, match="input 1 has 402 tokens and the model takes 256; shorten it"):
        tokenizer.encode(["hello", "word " * 400], Cuts(truncate=False))
    with pytest.raises(EmptyInput, match="input 1 is an empty string"):
        tokenizer.encode(["a", ""], Cuts(truncate=True))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("most", [3, 4, 9, 256])
def test_too_long_texts_are_cut_as_by_the_library(card, side, most):
    library = FastTokenizer.from_file(str(card.folder / "tokenizer.json"))
    library.no_padding()
    library.enable_truncation(most, direction=side)
    ours = Tokenizer(dataclasses.replace(card, max_tokens=most))
    texts = [
        "a",
        "one two three four five six seven",
        "[SEP] the [CLS] in a text [MASK]",
        "队列深度" * 200,
        "word " * 400,
    ]
    cut = ours.encode(texts, Cuts(truncate=True, side=side))
    assert [ids.tolist() for ids in cut] == [library.encode(text).ids for text in texts]


def test_too_little_room_is_refused_at_the_start(card):
    with pytest.raises(SettingsError, match=r"args\.model\.max_tokens: 2 leaves no room beside the special tokens"):
        Tokenizer(dataclasses.replace(card, max_tokens=2))


def test_tokens_are_told_with_their_bytes(card):
    tokenizer = Tokenizer(card)
    text = "Été: 队列 👍 unbelievableness"
    told, bare = (tokenizer.tokens([text], special_tokens=special)[0] for special in (True, False))
    assert told[1:-1] == bare
    assert [(token.id, token.text, token.special, token.start) for token in (told[0], told[-1])] == [
        (101, "[CLS]", True, None),
        (102, "[SEP]", True, None),
    ]
    assert [token.text for token in bare[-5:]] == ["队", "列", "👍", "unbelievable", "ness"]
    for token in bare:
        assert text.encode()[token.start : token.stop].decode() == token.text
    assert len(tokenizer.tokens(["word " * 400], special_tokens=True)[0]) == 402


def test_token_ids_are_read_back(card):
    tokenizer = Tokenizer(card)
    ids = [[101, 7592, 2088, 102], [7592]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == ["hello world", "hello"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == ["[CLS] hello world [SEP]", "hello"]
    with pytest.raises(InvalidInput, match=r"token id 30522 in ids\[1\] is outside"):
        tokenizer.decode([[1], [30522]], skip_special_tokens=True)


def test_token_ids_are_checked(card):
    tokenizer = Tokenizer(card)
    assert tokenizer.check([101, 5, 6, 102], 0, Cuts(truncate=True)).tolist() == [101, 5, 6, 102]
    cut = tokenizer.check([101, *range(1000, 1300), 102], 0, Cuts(truncate=True))
    assert cut.tolist() == [101, *range(1000, 1254), 102]  # as a text is cut
    left = tokenizer.check([101, *range(1000, 1300), 102], 0, Cuts(truncate=True, side="left"))
    assert left.tolist() == [101, *range(1046, 1300), 102]
    with pytest.raises(InvalidInput, match="input 2 has 302 tokens"):
        tokenizer.check([101, *[5] * 300, 102], 2, Cuts(truncate=False))
    with pytest.raises(EmptyInput):
        tokenizer.check([], 0, Cuts(truncate=True))


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([1, 30522], "token id 30522 in input 1"),
        ([101, -1, 102], "token id -1 in input 1"),
        ([15339], r"should begin with \[101\] and end with \[102\]"),  # "hello" by OpenAI's cl100k_base
        ([101], "should begin"),
        ([101, 7592], "should begin"),
        ([7592, 102], "should begin"),
        ([101, 7592, 102, 0, 0], "should begin"),  # padded: the padding would count as text
    ],
)
def test_token_ids_of_another_tokenizer_are_refused(card, ids, sentence):
    with pytest.raises(InvalidInput, match=rf"{sentence}.*check_embedding_ctx_length=False"):
        Tokenizer(card).check(ids, 1, Cuts(truncate=True))


def test_a_tokenizer_without_special_tokens_takes_any_ids(card, tmp_path):
    plain = FastTokenizer.from_file(str(card.folder / "tokenizer.json"))
    plain.post_processor = Sequence([])
    plain.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(dataclasses.replace(card, folder=tmp_path))
    assert tokenizer.encode(["hello world"], Cuts(truncate=True))[0].tolist() == [7592, 2088]
    assert tokenizer.check([7592, 2088], 0, Cuts(truncate=True)).tolist() == [7592, 2088]
    assert tokenizer.check([5] * 300, 0, Cuts(truncate=True)).tolist() == [5] * 256
