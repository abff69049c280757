"""What comes after transformer and pooling, against transformers and plain products, in float32."""

from functools import cache

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from deployments.engines import TokenBatch
from deployments.models.encoder import Encoder
from deployments.models.outputs import join, unpack
from deployments.models.text_pairs import Cuts
from deployments.models.tokenizer import Tokenizer
from tests.kit.engines import FORMS, NEVER, card_of, check_rows, engine_of, rows_of
from tests.kit.heads_of_models import GEMMA, HIDDEN, NORMALIZE, dense, save_bert, save_m3

EXACT = {"atol": 2e-5, "rtol": 1e-5}
TEXTS = ["to the CPU", "a", "it is told busy " * 12, "word " * 400, "队列 深度 ünïcode", "the overflow " * 30]
LABSE = [((HIDDEN, HIDDEN), "torch.nn.modules.activation.Tanh", {})]
EMBEDDING_GEMMA = [((HIDDEN, 3 * HIDDEN), "torch.nn.modules.linear.Identity", {"bias": False}),
         ((3 * HIDDEN, HIDDEN), "torch.nn.modules.linear.Identity", {"bias": False})]  # fmt: skip
OTHERS = [((HIDDEN, 24), "torch.nn.GELU", {}), ((24, 24), "torch.nn.ReLU", {"use_residual": True}),
          ((24, 16), "torch.nn.SiLU", {"use_residual": True}), ((16, 8), "torch.nn.Sigmoid", {})]  # fmt: skip
ACTIVATIONS = {
    "Tanh": torch.tanh,
    "GELU": torch.nn.GELU(),
    "ReLU": torch.relu,
    "SiLU": torch.nn.SiLU(),
    "Sigmoid": torch.sigmoid,
}


@cache
def transformers_own(folder):
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def states(folder, text):
    """[tokens, numbers] of the transformer, and the token ids."""
    tokenizer, model = transformers_own(folder)
    inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        return model(**inputs).last_hidden_state[0], inputs["input_ids"][0].tolist()


def encode(card, texts):
    return Tokenizer(card).encode(texts, Cuts(truncate=True))


@pytest.mark.parametrize(
    ("pooling", "stack", "config"), [("cls", LABSE, None), ("mean", EMBEDDING_GEMMA, GEMMA), ("last", OTHERS, None)]
)
def test_dense_modules_after_pooling(tmp_path, pooling, stack, config):
    made = [dense(tmp_path, f"{n}_Dense", *how[:2], **how[2]) for n, how in enumerate(stack, 2)]
    save_bert(tmp_path, pooling, *(module for module, _ in made), NORMALIZE, config=config)
    wanted = []
    for text in TEXTS:
        hidden, _ = states(tmp_path, text)
        x = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1]}[pooling]
        for (_, tensors), (_, activation, config) in zip(made, stack, strict=True):
            y = tensors["linear.weight"] @ x + tensors.get("linear.bias", 0)
            y = ACTIVATIONS.get(activation.rpartition(".")[2], lambda y: y)(y)
            if config.get("use_residual"):
                y = y + (tensors["residual.weight"] @ x if "residual.weight" in tensors else x)
            x = y
        wanted.append(x[None].numpy())
    card = card_of(tmp_path)
    assert (card.dimension, card.normalize, card.pooling) == (stack[-1][0][1], True, pooling)
    ids = encode(card, TEXTS)
    engine = engine_of(card, threads=2)
    assert engine.info.dimension == card.dimension
    for form in FORMS:
        engine.use(form, "float32")
        check_rows(engine, ids, wanted, **EXACT)
        assert rows_of(engine, ids, "tokens").shape == (sum(map(len, ids)), HIDDEN)  # as they leave the transformer
    units = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(units, [row[0] / np.linalg.norm(row) for row in wanted], **EXACT)


def test_dense_modules_stay_in_float32(tmp_path):
    """Whatever the transformer computes in; and a narrow format is held against float32 behind them."""
    module, _ = dense(tmp_path, "2_Dense", (HIDDEN, 8), "torch.nn.Tanh")
    save_bert(tmp_path, "mean", module)
    engine = engine_of(card_of(tmp_path), dtype="bfloat16")
    assert engine.info.agreement > 0.9
    assert all(parameter.dtype == torch.float32 for parameter in engine._heads.parameters())


OUTPUTS = ("text", "sparse", "multi_vector")  # of bge-m3


@pytest.fixture(scope="module")
def m3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m3")
    return folder, save_m3(folder)


@pytest.fixture(scope="module")
def wanted(m3):
    """Of each text: the rows of each output as they leave the engine, and what FlagEmbedding makes of them."""
    folder, heads = m3
    tokenizer = AutoTokenizer.from_pretrained(folder)
    without = {tokenizer.convert_tokens_to_ids(token) for token in ("[CLS]", "[SEP]", "[PAD]", "[UNK]")}
    found = []
    for text in TEXTS:
        hidden, ids = states(folder, text)
        sparse, colbert = heads["sparse_linear"], heads["colbert_linear"]
        weights = torch.relu(hidden @ sparse["weight"].T + sparse["bias"])
        vectors = torch.nn.functional.normalize(hidden @ colbert["weight"].T + colbert["bias"], dim=-1)
        largest = {}
        for number, weight in zip(ids, weights[:, 0].tolist(), strict=True):
            if number not in without and weight > 0:
                largest[number] = max(largest.get(number, 0), weight)
        rows = {"text": hidden[:1].numpy(), "sparse": weights.numpy(), "multi_vector": vectors.numpy()}
        found.append((rows, largest, vectors[1:].numpy()))
    return found


def embed_all(engine, batch):
    """The rows of each output, of all passes, in the order of the batch."""
    passes = list(engine.passes(batch, NEVER))
    for number, output in enumerate(batch.outputs):
        order = np.concatenate([batch.rows(queries, output) for queries, _ in passes])
        yield np.concatenate([found[number] for _, found in passes])[np.argsort(order)]


@pytest.mark.parametrize("form", FORMS)
def test_m3_gives_each_output_alone_and_all_from_one_run(m3, wanted, form):
    card = card_of(m3[0])
    assert card.kinds == ("embedding", "sparse", "multi_vector")
    assert card.token_widths == {"tokens": HIDDEN, "sparse": 1, "multi_vector": 24}
    engine = engine_of(card, form=form, threads=2, max_batch_tokens=200)
    ids = encode(card, TEXTS)
    for output in OUTPUTS:
        check_rows(engine, ids, [rows[output] for rows, *_ in wanted], output, **EXACT)
    together = embed_all(engine, TokenBatch.pack(ids, OUTPUTS))
    for output, found in zip(OUTPUTS, together, strict=True):
        np.testing.assert_allclose(found, np.concatenate([rows[output] for rows, *_ in wanted]), **EXACT)


def test_what_the_router_makes_of_the_numbers(m3, wanted):
    card = card_of(m3[0])
    encoder = Encoder(card, auto_truncate=True)
    ids = encode(card, TEXTS)
    found = list(embed_all(engine_of(card), TokenBatch.pack(ids, OUTPUTS)))
    numbers = join(found, OUTPUTS, list(map(len, ids)))
    for tokens, one, (rows, largest, vectors) in zip(ids, numbers, wanted, strict=True):
        said = encoder.rows(one, tokens, outputs=OUTPUTS, role="document")
        np.testing.assert_allclose(said["text"], rows["text"][0], **EXACT)
        np.testing.assert_allclose(said["multi_vector"], vectors, **EXACT)
        index, weights = unpack(said["sparse"])
        assert index.tolist() == sorted(largest)
        np.testing.assert_allclose(weights, [largest[number] for number in index], **EXACT)
    assert any(len(largest) > 1 for _, largest, _ in wanted)


def test_m3_as_an_embedding_model_has_the_one_kind(m3):
    assert card_of(m3[0], kind="embedding").kinds == ("embedding",)
