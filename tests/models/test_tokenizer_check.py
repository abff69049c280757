"""The Router's tokens against transformers' for tokenizers of several families; wrong ones are refused."""

import json
import shutil
from functools import partial

import pytest
import transformers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import RobertaProcessing
from transformers import AutoTokenizer

from deployments.errors import SettingsError
from deployments.models import reference_tokenizer
from deployments.models.model_files import ModelCard
from deployments.models.reference_tokenizer import Question
from deployments.models.tokenizer_check import ODD, PAIRS, PLAIN, checked_tokenizer
from tests.kit import tiny_tokenizers as tiny
from tests.kit.kinds_of_models import PACKAGE

TEXTS = [*PLAIN.values(), *ODD.values(), "x [CLS] y", "</s><s> <|im_start|>user\nhello"]


def card(folder, **changes):
    about = {"name": "m", "folder": folder, "revision": None, "model_type": "m", "dimension": 8, "vocab_size": 40_000}
    about |= {"max_tokens": 64, "pooling": "mean", "normalize": True, "lower_case": False, "trust_remote_code": False}
    return ModelCard(**(about | {"layers": 1, "parameters": 1} | changes))


def minilm(folder, config=(), change=None):
    """all-MiniLM-L6-v2's tokenizer; `change` of its tokenizer.json."""
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    told = json.loads((folder / "tokenizer_config.json").read_text()) | dict(config)
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    if change is not None:
        fast = json.loads((folder / "tokenizer.json").read_text())
        change(fast)
        (folder / "tokenizer.json").write_text(json.dumps(fast))


def cased(fast):
    fast["normalizer"]["lowercase"] = False


def ids(fast, texts=TEXTS):
    return [encoding.ids for encoding in fast.encode_batch(texts)]


MODELS = {
    "BERT": (minilm, []),
    "BERT without tokenizer.json": (tiny.bert_words, []),
    "RoBERTa without tokenizer.json": (tiny.roberta_words, []),
    "XLM-R without tokenizer.json": (tiny.xlm_roberta_words, []),
    "Mistral": (partial(tiny.llama, add_eos_token=False), []),
    "Mistral with an end token (e5-mistral)": (partial(tiny.llama, add_eos_token=True), ["</s>"]),
    "Llama": (partial(tiny.llama, add_eos_token=False, model_type="llama"), []),
    "Qwen2 with an end token (gte-Qwen2)": (partial(tiny.qwen, add_eos_token=True), ["<|endoftext|>"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers_and_the_end_token_is_there(tmp_path, name):
    make, end = MODELS[name]
    make(tmp_path / "model")
    try:
        own = AutoTokenizer.from_pretrained(tmp_path / "model")
    except Exception as error:
        if "Cannot parse precompiled_charsmap" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} does not read it")
    fast = checked_tokenizer(card(tmp_path / "model", vocab_size=len(own)))
    ends = own.convert_tokens_to_ids(end)
    assert ids(fast) == [[*own(text)["input_ids"], *ends] for text in TEXTS]


@pytest.mark.parametrize("types", [True, False])
def test_a_template_of_pairs_that_transformers_has_in_code_is_taken(tmp_path, types):
    minilm(tmp_path / "model")
    fast = FastTokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    fast.post_processor = RobertaProcessing(("[SEP]", 102), ("[CLS]", 101))  # of another family, its texts alike
    fast.save(str(tmp_path / "model" / "tokenizer.json"))
    found = checked_tokenizer(card(tmp_path / "model", kind="reranker", token_types=types))
    own = AutoTokenizer.from_pretrained(tmp_path / "model")
    for pair in PAIRS.values():
        encoding, wanted = found.encode(*pair), own(*pair)
        assert (encoding.ids, encoding.type_ids) == (wanted["input_ids"], wanted["token_type_ids"])


@pytest.mark.parametrize(("types", "taken"), [([0, 0, 0, 1, 1], True), (None, True), ([0, 0, 0, 0, 0], False)])
def test_a_tokenizer_that_gives_other_types_in_python_is_not_its_fast_one(monkeypatch, types, taken):
    own = AutoTokenizer.from_pretrained(PACKAGE)

    class Wrapped:
        backend_tokenizer = own.backend_tokenizer

        def __call__(self, *text):
            found = own(*text)
            return {"input_ids": found["input_ids"]} | ({} if types is None else {"token_type_ids": types})

    monkeypatch.setattr(reference_tokenizer, "_build", lambda _: Wrapped())
    answer = reference_tokenizer._answer(Question(str(PACKAGE), False, [("a", "b")]))
    assert (answer["backend"] is not None) is taken


XLM_ROBERTA = {"config.json": {"model_type": "xlm-roberta"}}
REFUSED = {
    "another case": (
        partial(minilm, change=cased),
        r"tokenizer: token 1 of English is 100 by tokenizer\.json and 1996 by .* file ",
    ),
    "other scripts": (
        partial(minilm, config={"tokenize_chinese_chars": False}),
        r"tokenizer: token \d+ of Chinese is \d+ by tokenizer\.json and 100 by transformers",
    ),
    "no end token": (
        partial(tiny.llama, add_eos_token=True, eos_token=None),
        r"id: tokenizer_config\.json says add_eos_token, and it names no such token$",
    ),
    "a foreign end token": (
        partial(tiny.qwen, add_eos_token=True, eos_token="</s>"),
        r"id: .* says add_eos_token, and </s> is not in the vocabulary$",
    ),
    "none": (
        partial(tiny.write, files={"config.json": {"model_type": "bert"}}),
        r"tokenizer: .* holds no tokenizer\.json and no older vocabulary$",
    ),
    "an old one under another name": (
        partial(tiny.write, files=XLM_ROBERTA | {"a.model": "none"}),
        r"id: transformers finds 5 of the model's 40000 tokens in ",
    ),
    "a broken old one": (
        partial(tiny.write, files=XLM_ROBERTA | {"sentencepiece.bpe.model": "none"}),
        r"id: transformers cannot build the tokenizer of ",
    ),
    "a broken one": (
        partial(tiny.write, files={"config.json": {"model_type": "bert"}, "tokenizer.json": "{}"}),
        r"id: .*tokenizer\.json cannot be read: ",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_wrong_tokenizers_are_refused_in_one_sentence(tmp_path, why):
    make, sentence = REFUSED[why]
    make(tmp_path / "model")
    with pytest.raises(SettingsError, match=rf"args\.model\.{sentence}") as caught:
        checked_tokenizer(card(tmp_path / "model"))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused():
    sentence = r"^args\.model\.id: the tokenizer is not this model's: .* has token \d+, .* 100$"
    with pytest.raises(SettingsError, match=sentence):
        checked_tokenizer(card(PACKAGE, vocab_size=100))


def test_the_settings_decide_by_hand(tmp_path):
    minilm(tmp_path / "model", change=cased)
    of_file = checked_tokenizer(card(tmp_path / "model"), "file")
    assert ids(of_file, ["The"]) == [[101, 100, 102]]
    assert ids(checked_tokenizer(card(tmp_path / "model"), "transformers"), ["The"]) == [[101, 1996, 102]]
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(SettingsError, match=r"args\.model\.tokenizer: .* holds no tokenizer\.json$"):
        checked_tokenizer(card(tmp_path / "model"), "file")


def test_code_of_a_tokenizer_is_run_only_if_the_settings_say_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))  # the copy of the code goes there
    ran = tmp_path / "ran"
    minilm(tmp_path / "model", {"auto_map": {"AutoTokenizer": [None, "code.Words"]}, "tokenizer_class": "Words"})
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "somebodys"}))
    (tmp_path / "model" / "code.py").write_text(
        f"import os\nos.mkdir({str(ran)!r})\nfrom transformers import BertTokenizer\nclass Words(BertTokenizer): pass\n"
    )
    assert ids(checked_tokenizer(card(tmp_path / "model")), ["The"]) == [[101, 1996, 102]]
    assert not ran.exists()
    assert ids(checked_tokenizer(card(tmp_path / "model", trust_remote_code=True)), ["The"]) == [[101, 1996, 102]]
    assert ran.exists()


def test_a_tokenizer_that_transformers_cannot_build_is_used_as_it_is(tmp_path, caplog):
    minilm(tmp_path / "model")
    found = checked_tokenizer(card(tmp_path / "model"), ask=lambda question: "it is too new")
    assert ids(found, ["The"]) == [[101, 1996, 102]]
    assert "used unchecked: transformers cannot build the model's tokenizer: it is too new" in caplog.text
    with pytest.raises(SettingsError, match=r"transformers cannot build the tokenizer of .*: it is too new$"):
        checked_tokenizer(card(tmp_path / "model"), "transformers", ask=lambda question: "it is too new")


def test_a_tokenizer_that_is_not_only_fast_is_refused(tmp_path):
    minilm(tmp_path / "model", {"auto_map": {"AutoTokenizer": [None, "code.Words"]}, "tokenizer_class": "Words"})
    (tmp_path / "model" / "code.py").write_text(
        "from transformers import BertTokenizer\nclass Words(BertTokenizer):\n"
        "    def __call__(self, *texts):\n"
        "        return {'input_ids': [*super().__call__(*texts)['input_ids'], 7]}\n"
    )
    sentence = r"^args\.model\.tokenizer: Words of transformers is no fast tokenizer, which alone is served"
    for wanted in ("auto", "transformers"):
        with pytest.raises(SettingsError, match=sentence):
            checked_tokenizer(card(tmp_path / "model", trust_remote_code=True), wanted)


def test_prompts_are_compared_too(tmp_path):
    asked = []
    checked_tokenizer(
        card(PACKAGE, prompts={"query": "query: "}), ask=lambda question: asked.append(question) or "enough"
    )
    assert [text for (text,) in asked[0].texts if text.startswith("query: The accelerator")]
