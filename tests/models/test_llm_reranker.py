"""Rerankers that are language models, against transformers by the code that their authors publish, in float32."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen3Config,
)

from deployments.errors import InvalidInput, SettingsError
from deployments.models.text_pairs import Cuts, Pair
from deployments.models.tokenizer import Tokenizer
from tests.kit.engines import card_of, check_rows, engine_of
from tests.kit.heads_of_models import save_causal

EXACT = {"atol": 5e-5, "rtol": 1e-4}
PAIRS = [
    Pair("where does the overflow go", "to the CPU"),
    Pair("a", ""),
    Pair("", "no query"),
    Pair("where does the overflow go", "it is told busy " * 12),
    Pair("过载 {document} {query}", "队列 {query} <|im_end|> ünïcode\n"),
    Pair("what is it", "word " * 700),
    Pair("long query " * 300, "the document"),
]
QWEN3, MXBAI = ("qwen3-reranker", Qwen3Config), ("mxbai-rerank-v2", Qwen2Config)
TASK = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.fixture(scope="module", params=[(*QWEN3, True), (*QWEN3, False), (*MXBAI, True)], ids=str)
def judge(request, tmp_path_factory):
    template, config, tied = request.param
    return template, save_causal(tmp_path_factory.mktemp(template), config, tied=tied)


def qwen3_ids(tokenizer, pair, max_length, instruction=None):
    """`process_inputs` of Qwen3-Reranker's model card."""
    prefix = tokenizer.encode(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        add_special_tokens=False,
    )
    suffix = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", add_special_tokens=False)
    text = f"<Instruct>: {instruction or TASK}\n<Query>: {pair.first}\n<Document>: {pair.second}"
    most = max_length - len(prefix) - len(suffix)
    return prefix + tokenizer(text, truncation="longest_first", max_length=most)["input_ids"] + suffix


def mxbai_ids(tokenizer, pair, max_length, instruction=None):
    """`MxbaiRerankV2.prepare_inputs` of mixedbread-ai/mxbai-rerank."""

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    before = ids("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
                 "<|im_start|>user\n")  # fmt: skip
    task = (
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
    )
    after = ids("\n") + ids(task) + ids("<|im_end|>\n<|im_start|>assistant\n")
    room = max_length - len(before) - len(after)
    query = ids((f"instruction: {instruction}\n" if instruction else "") + f"query: {pair.first}")[: room * 3 // 4]
    return before + (query + ids("\n") + ids(f"document: {pair.second}"))[:room] + after


MAKE_IDS = {"qwen3-reranker": qwen3_ids, "mxbai-rerank-v2": mxbai_ids}
WORDS = {"qwen3-reranker": ("yes", "no"), "mxbai-rerank-v2": ("1", "0")}


def reference(folder, template, pairs, max_length):
    """The logit of the one word less that of the other, by the whole model and its whole last matrix."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in WORDS[template])
    scores = []
    with torch.inference_mode():
        for pair in pairs:
            logits = model(torch.tensor([MAKE_IDS[template](tokenizer, pair, max_length)])).logits[0, -1]
            scores.append([float(logits[yes] - logits[no])])
    return np.array(scores)


def test_scores_are_the_authors_own_alone_and_in_a_batch(judge):
    template, folder = judge
    card = card_of(folder, template=template)
    assert (card.kind, card.dimension, card.labels) == ("reranker", 1, (WORDS[template][0],))
    wanted = reference(folder, template, PAIRS, card.max_tokens)
    assert np.ptp(wanted) > 0.1  # else they would agree whatever is computed
    ids = Tokenizer(card).encode_pairs(PAIRS, Cuts(truncate=True))
    check_rows(engine_of(card), ids, wanted[:, None], **EXACT)


def test_one_that_was_converted_to_a_classifier_scores_as_it_did(judge, tmp_path):
    """Such as tomaarsen/Qwen3-Reranker-0.6B-seq-cls: the rows of the two words have become a head with one label."""
    template, source = judge
    tokenizer = AutoTokenizer.from_pretrained(source)
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in WORDS[template])
    rows = AutoModelForCausalLM.from_pretrained(source).lm_head.weight.detach()
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    model.score.weight.data = (rows[yes] - rows[no])[None].clone()
    folder = tmp_path / f"{template}-base-v2"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    card = card_of(folder, template=template)
    assert card_of(folder).judge == (card.judge if template == "qwen3-reranker" else None)  # known by its name
    wanted = reference(source, template, PAIRS, card.max_tokens)
    ids = Tokenizer(card).encode_pairs(PAIRS, Cuts(truncate=True))
    check_rows(engine_of(card), ids, wanted[:, None], **EXACT)


def test_prompts_are_the_authors_own_at_any_length(judge):
    template, folder = judge
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for most in (400, 600, 1200):
        card = card_of(folder, template=template, max_tokens=most)
        wanted = [MAKE_IDS[template](tokenizer, pair, most) for pair in PAIRS]
        assert [ids.tolist() for ids in Tokenizer(card).encode_pairs(PAIRS, Cuts(truncate=True))] == wanted
        assert max(map(len, wanted)) == most
    asked = "Judge the colour"
    card = card_of(folder, template=template, instruction=asked)
    (found,) = Tokenizer(card).encode_pairs(PAIRS[:1], Cuts(truncate=True))
    assert found.tolist() == MAKE_IDS[template](tokenizer, PAIRS[0], 1200, asked)


def test_what_is_cut_on_the_left_is_the_document_and_its_end_stays(judge):
    template, folder = judge
    card = card_of(folder, template=template, max_tokens=400)
    long = Pair("what is it", "first " + "word " * 300 + "last")
    tokenizer = Tokenizer(card)
    for side, end, cut in (("right", "first", "last"), ("left", "last", "first")):
        (ids,) = tokenizer.encode_pairs([long], Cuts(truncate=True, side=side))
        assert len(ids) == 400
        said = tokenizer.decode([ids.tolist()], skip_special_tokens=True)[0]
        assert "what is it" in said
        assert end in said
        assert cut not in said
    with pytest.raises(InvalidInput, match=r"input 3 has (\d+|more than 400) tokens and the model takes 400"):
        tokenizer.encode_pairs([long], Cuts(truncate=False), first=3)


def test_a_lone_text_is_a_document_without_a_query(judge):
    template, folder = judge
    tokenizer = Tokenizer(card_of(folder, template=template))
    (one,) = tokenizer.encode(["text"], Cuts(truncate=True))
    (pair,) = tokenizer.encode_pairs([Pair("", "text")], Cuts(truncate=True))
    assert one.tolist() == pair.tolist()


@pytest.mark.parametrize(
    ("name", "config", "template"),
    [
        ("Qwen3-Reranker-0.6B", Qwen3Config, "yes"),
        ("mxbai-rerank-base-v2", Qwen2Config, "1"),
        ("mxbai-rerank-large-v2", Qwen2Config, "1"),
    ],
)
def test_published_models_are_known_by_their_names(tmp_path, name, config, template):
    folder = tmp_path / name
    folder.mkdir()
    card = card_of(save_causal(folder, config))
    assert (card.kind, card.pooling, card.judge.yes) == ("reranker", "last", template)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "reranker"}, r"template: .* do not say its prompt: set qwen3-reranker or mxbai-rerank"),
        ({"template": "qwen3-reranker", "kind": "classifier"}, r"kind: a reranker has one label"),
        ({"template": "qwen3-reranker", "max_tokens": 64}, r"max_tokens: 64 leaves no room beside the model's prompt"),
        ({}, r"pooling: the model's files do not say how it pools"),
    ],
)
def test_what_the_files_do_not_say_is_asked_for_by_name(tmp_path, settings, sentence):
    with pytest.raises(SettingsError, match=rf"args\.model\.{sentence}"):
        Tokenizer(card_of(save_causal(tmp_path, Qwen3Config), **settings))
