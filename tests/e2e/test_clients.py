"""The client libraries that people use, unmodified, against the real model: docs/use.md's lines, and more."""

import base64
import json
import re

import numpy as np
import pytest
from conftest import PROMPTS
from loopback import only_loopback
from npm import scripts
from reference import MODEL, worst
from texts import TEXTS
from transformers import AutoTokenizer
from wiretap import Wiretap

from tests.kit.service import ROOT

pytestmark = [
    pytest.mark.usefixtures("loopback_only"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # few of them close what they open
]

SECTION = (ROOT / "docs" / "use.md").read_text().partition("\n## Clients\n")[2].partition("\n## ")[0]
SHARED = re.search(r"^texts = .*$", SECTION, re.MULTILINE)[0]
EXAMPLES = dict(re.findall(r"^### (\S+)\n[^#]*?^```python\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL))
OF_NPM = dict(re.findall(r"^### (\S+) from npm\n[^#]*?^```js\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL))

NAME = "all-MiniLM-L6-v2"
SHOWN = [2, 3]  # its two texts, in TEXTS
TWO = [TEXTS[index] for index in SHOWN]

# What each of the examples sends: the path, and the JSON without the texts.
SENT = {
    "openai": ("/v1/embeddings", {"model": NAME, "input": TWO, "encoding_format": "base64"}),
    "langchain-openai": ("/v1/embeddings", {"model": NAME, "input": TWO, "encoding_format": "base64"}),
    "langchain-community": ("/embeddings", {"model": NAME, "input": sorted(TWO, key=len, reverse=True)}),
    "llama-index-embeddings-text-embeddings-inference": ("/embed", {"inputs": TWO, "truncate": True}),
    "huggingface_hub": ("/", {"inputs": TWO}),
    "huggingface-api-haystack": ("/", {"inputs": TWO, "normalize": True, "truncate": True}),
    "litellm": ("/v1/embeddings", {"model": NAME, "input": TWO, "encoding_format": None}),
    "chromadb": ("/embed", {"inputs": TWO}),
    "cohere": (
        "/v2/embed",
        {"model": NAME, "texts": TWO, "input_type": "search_document", "embedding_types": ["float"]},
    ),
    "ollama": ("/api/embed", {"model": NAME, "input": TWO}),
}
NPM = {"openai": "7.57.0", "cohere-ai": "8.1.0"}
SENT_BY_NPM = {"openai": SENT["openai"], "cohere-ai": SENT["cohere"]}


def run_example(lines, port):
    """A client's documented lines, the port changed. Returns the vectors."""
    assert lines.count("http://127.0.0.1:8000") == 1
    names = {}
    exec(lines.replace("127.0.0.1:8000", f"127.0.0.1:{port}"), names)
    return np.array(names["vectors"], np.float32)


def agree(vectors, reference):
    """Vectors of the documented texts, of any length."""
    found = np.array(vectors, np.float32)
    return worst(found / np.linalg.norm(found, axis=1, keepdims=True), reference[SHOWN]) >= 0.999


@pytest.fixture(scope="module")
def loopback_only():
    with only_loopback():
        yield


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """(lines of JavaScript, port, expression) -> the expression's value after these lines."""
    script = scripts(tmp_path_factory.mktemp("npm"), NPM)

    def run(lines, port, expression):
        assert lines.count("http://127.0.0.1:8000") == 1
        lines = lines.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        return script(f"const texts = {json.dumps(TWO)};\n{lines}", expression)

    return run


def test_the_documentation_shows_every_client():
    assert set(EXAMPLES) == set(SENT)
    assert set(OF_NPM) == set(SENT_BY_NPM)


@pytest.mark.parametrize("client", SENT)
def test_documented_lines_give_the_vectors_of_the_model(real, reference, client):
    """If what is sent changes with a client's version, read what it is now: the service must still understand it."""
    with Wiretap(real) as tap:
        vectors = run_example(f"{SHARED}\n{EXAMPLES[client]}", tap.port)
    assert worst(vectors, reference[SHOWN]) >= 0.999  # unit vectors, every one of them
    assert tap.asked == [SENT[client]]


@pytest.mark.parametrize("client", SENT_BY_NPM)
def test_documented_lines_of_npms_clients(real, reference, node, client):
    with Wiretap(real) as tap:
        vectors = node(OF_NPM[client], tap.port, "vectors")
    assert worst(np.array(vectors, np.float32), reference[SHOWN]) >= 0.999
    assert tap.asked == [SENT_BY_NPM[client]]


SAID = {  # of a text that is empty
    **dict.fromkeys(SENT, "is an empty string"),
    "llama-index-embeddings-text-embeddings-inference": r"input_value=\{'error': 'inputs\[1\]",  # looks at no status
    "chromadb": "could not convert string to float: 'error'",  # so does this one
}


@pytest.mark.parametrize("client", SENT)
def test_each_client_shows_the_sentence_of_an_error(real, client):
    with pytest.raises(Exception, match=SAID[client]):
        run_example(f"texts = ['x', '']\n{EXAMPLES[client]}", real.port)


@pytest.mark.parametrize("client", SENT_BY_NPM)
def test_npms_clients_show_the_sentence_of_an_error(real, node, client):
    imported, made = OF_NPM[client].replace(NAME, "other").split("\n\n")
    lines = f"{imported}\nlet told;\ntry {{\n{made}\n}} catch (error) {{ told = error.message; }}"
    assert "there is no model 'other' here" in node(lines, real.port, "told")


def test_langchain_with_its_own_tokenizer_is_told_of_the_switch(real):
    lines = EXAMPLES["langchain-openai"].replace(', "check_embedding_ctx_length": False', "")
    with pytest.raises(Exception, match="check_embedding_ctx_length=False"):
        run_example(f"{SHARED}\n{lines}", real.port)


def test_openai_formats_and_token_ids_say_the_same(real, reference):
    import openai

    ids = AutoTokenizer.from_pretrained(MODEL)(TWO)["input_ids"]
    with openai.OpenAI(base_url=f"{real.address}/v1", api_key="none", max_retries=0) as client:

        def ask(given, **asked):
            return [item.embedding for item in client.embeddings.create(model=NAME, input=given, **asked).data]

        encoded = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in ask(TWO, encoding_format="base64")]
        for found in (encoded, ask(TWO, encoding_format="float"), ask(ids), [*ask(TWO[0]), *ask(ids[1])]):
            assert agree(found, reference)
        assert [len(vector) for vector in ask(TWO, dimensions=128)] == [128, 128]
        assert [model.id for model in client.models.list()] == [NAME]


def test_coheres_types_and_roles(real, reference):
    """All types say what the floats say, and these what the model does."""
    import cohere

    with cohere.ClientV2(api_key="none", base_url=str(real.address)) as client:

        def ask(texts, role="search_document", types=("float",)):
            return client.embed(model=NAME, input_type=role, texts=texts, embedding_types=list(types)).embeddings

        found = ask(TWO, types=["float", "int8", "uint8", "binary", "ubinary", "base64"]).model_dump(by_alias=True)
        query, prompted = ask(TWO, "search_query"), ask([PROMPTS["query"] + text for text in TWO])
    floats, int8 = np.array(found["float"], np.float32), np.array(found["int8"])
    bits = np.packbits(floats > 0, axis=1)
    assert agree(floats, reference)
    assert agree(int8, reference)
    assert np.array_equal(found["uint8"], int8 + 128)
    assert np.array_equal(found["ubinary"], bits)
    assert np.array_equal(found["binary"], bits.astype(int) - 128)
    assert np.array_equal([np.frombuffer(base64.b64decode(one), "<f4") for one in found["base64"]], floats)
    assert np.allclose(query.float_, prompted.float_, atol=1e-5)
