"""The client libraries that people use, unmodified, against the real model: docs/use.md's lines, and more."""

import asyncio
import base64
import json
import re

import numpy as np
import pytest
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
MANY = [f"text {number}" for number in range(300)]
SORTED = sorted(TWO, key=len, reverse=True)

# What each of the examples sends: the path, and the JSON without the texts.
SENT = {
    "openai": ("/v1/embeddings", {"model": NAME, "input": TWO, "encoding_format": "base64"}),
    "langchain-openai": ("/v1/embeddings", {"model": NAME, "input": TWO, "encoding_format": "base64"}),
    "langchain-community": ("/embeddings", {"model": NAME, "input": SORTED}),
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


def run_example(client, port):
    """The documented lines for a client, the port changed. Returns the names they leave."""
    assert EXAMPLES[client].count("http://127.0.0.1:8000") == 1
    names = {}
    exec(SHARED + "\n" + EXAMPLES[client].replace("127.0.0.1:8000", f"127.0.0.1:{port}"), names)
    return names


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


@pytest.fixture
def openai_address(real):
    return {"base_url": f"http://127.0.0.1:{real.port}/v1", "api_key": "none"}


@pytest.fixture
def address(real):
    return f"http://127.0.0.1:{real.port}"


def test_the_documentation_shows_every_client():
    assert set(EXAMPLES) == set(SENT)
    assert set(OF_NPM) == set(SENT_BY_NPM)


@pytest.mark.parametrize("client", SENT)
def test_documented_lines_give_the_vectors_of_the_model(real, reference, client):
    """If what is sent changes with a client's version, read what it is now: the service must still understand it."""
    with Wiretap(real) as tap:
        vectors = np.array(run_example(client, tap.port)["vectors"], np.float32)
    assert worst(vectors, reference[SHOWN]) >= 0.999  # unit vectors, every one of them
    assert tap.asked == [SENT[client]]


@pytest.mark.parametrize("client", SENT_BY_NPM)
def test_documented_lines_of_npms_clients(real, reference, node, client):
    with Wiretap(real) as tap:
        vectors = node(OF_NPM[client], tap.port, "vectors")
    assert worst(np.array(vectors, np.float32), reference[SHOWN]) >= 0.999
    assert tap.asked == [SENT_BY_NPM[client]]


# --- openai ----------------------------------------------------------------------------------------------------------


def test_openai_formats_and_token_ids_say_the_same(openai_address, reference):
    from openai import OpenAI

    ids = AutoTokenizer.from_pretrained(MODEL)(TWO)["input_ids"]
    with OpenAI(**openai_address, max_retries=0) as client:
        answers = [
            client.embeddings.create(model=NAME, **asked)
            for asked in (
                {"input": TWO},  # base64 is the client's default
                {"input": TWO, "encoding_format": "base64"},  # and this one is left to the caller to decode
                {"input": TWO, "encoding_format": "float"},
                {"input": ids},
            )
        ]
        one = [client.embeddings.create(model=NAME, input=given).data[0].embedding for given in (TWO[0], ids[0])]
        short = client.embeddings.create(model=NAME, input=TWO, dimensions=128)
        models = [model.id for model in client.models.list()]
    by_default, encoded, floats, from_ids = ([item.embedding for item in answer.data] for answer in answers)
    for found in (by_default, [np.frombuffer(base64.b64decode(vector), "<f4") for vector in encoded], floats, from_ids):
        assert agree(found, reference)
    assert agree([one[0], by_default[1]], reference)
    assert agree([one[1], by_default[1]], reference)
    assert [len(item.embedding) for item in short.data] == [128, 128]
    assert models == [NAME]


def test_openai_errors_show_the_sentence(openai_address):
    import openai

    with openai.OpenAI(**openai_address, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="this server has 'all-MiniLM-L6-v2'"):
            client.embeddings.create(model="ada", input="x")
        with pytest.raises(openai.BadRequestError, match=r"input\[1\] is an empty string") as caught:
            client.embeddings.create(model=NAME, input=["x", ""])
    assert (caught.value.type, caught.value.code, caught.value.param) == (
        "invalid_request_error",
        "empty_input",
        "input",
    )


# --- langchain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [TEXTS[9], TEXTS[0]], ids=["ids that are too large", "ids that this model has too"])
def test_langchain_openai_with_its_own_tokenizer_is_told_of_the_switch(openai_address, text):
    import openai
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(model=NAME, **openai_address)
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        embeddings.embed_documents([text])


def test_langchain_openai(openai_address, reference):
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(model=NAME, check_embedding_ctx_length=False, **openai_address)
    assert agree([embeddings.embed_query(TWO[0]), *asyncio.run(embeddings.aembed_documents(TWO[1:]))], reference)
    assert len(embeddings.embed_documents([f"text {number}" for number in range(1001)])) == 1001  # two calls


def test_langchain_infinity(real, address, reference):
    from langchain_community.embeddings import InfinityEmbeddings

    with Wiretap(real) as tap:
        embeddings = InfinityEmbeddings(model=NAME, infinity_api_url=f"http://127.0.0.1:{tap.port}")
        found = embeddings.embed_documents([*MANY, *TWO])
    assert sorted(len(asked["input"]) for _, asked in tap.asked) == [46, 128, 128]  # side by side
    assert len(found) == 302
    assert agree(found[-2:], reference)  # each where its text was, though it sorts them

    wrong = InfinityEmbeddings(model="other", infinity_api_url=address)
    with pytest.raises(Exception, match=r"status 404: .*there is no model 'other' here"):
        wrong.embed_query("x")


# --- clients of text-embeddings-inference ----------------------------------------------------------------------------


def test_llama_index(address, reference):
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    embedding = TextEmbeddingsInference(NAME, base_url=address)
    assert agree([embedding.get_query_embedding(TWO[0]), embedding.get_text_embedding(TWO[1])], reference)
    batch = asyncio.run(embedding.aget_text_embedding_batch([*MANY[:20], *TWO]))  # ten a call
    assert agree(batch[-2:], reference)


def test_llama_index_shows_the_sentence_of_a_batch(address):
    """It looks at no status: what it says is that the body of the error is no list of vectors."""
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    embedding = TextEmbeddingsInference(NAME, base_url=address)
    with pytest.raises(ValueError, match=r"input_value=\{'error': 'inputs\[0\] is a"):  # as many texts as keys
        embedding.get_text_embedding_batch(["", "x"])
    with pytest.raises(KeyError):
        embedding.get_text_embedding("")


def test_huggingface_hub(address, reference):
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import BadRequestError, HfHubHTTPError

    with InferenceClient(f"{address}/embed") as client:
        raw = client.feature_extraction(TWO, normalize=False, truncate=True)
        assert agree(raw, reference)
        assert np.all(np.linalg.norm(raw, axis=1) > 2)  # the model's own lengths
        assert client.feature_extraction(TWO[0]).shape == (1, 384)
        assert client.feature_extraction(TWO, dimensions=128).shape == (2, 128)
    with InferenceClient(address) as client:
        with pytest.raises(BadRequestError, match=r"inputs\[1\] is an empty string"):
            client.feature_extraction(["x", ""])
        with pytest.raises(HfHubHTTPError, match="has 402 tokens and the model takes 256"):
            client.feature_extraction("word " * 400, truncate=False)


def test_haystack(address, reference):
    from haystack import Document
    from haystack_integrations.components.embedders.huggingface_api import (
        HuggingFaceAPIDocumentEmbedder,
        HuggingFaceAPITextEmbedder,
    )

    server = {"api_type": "text_embeddings_inference", "api_params": {"url": address}}
    documents = [Document(content=text) for text in [*MANY[:40], *TWO]]  # 32 a call
    of_text, of_documents = HuggingFaceAPITextEmbedder(**server), HuggingFaceAPIDocumentEmbedder(**server)
    assert agree([of_text.run(text)["embedding"] for text in TWO], reference)  # it does not ask for unit vectors
    assert agree([document.embedding for document in of_documents.run(documents)["documents"][-2:]], reference)
    with pytest.raises(Exception, match="inputs is an empty string"):
        of_text.run("")


def test_chroma_shows_that_there_is_an_error(address):
    """It looks at no status: one keeps the sentence to oneself."""
    from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer

    with pytest.raises(ValueError, match="could not convert string to float: 'error'"):
        HuggingFaceEmbeddingServer(f"{address}/embed")([""])


# --- litellm ---------------------------------------------------------------------------------------------------------


def test_litellm(openai_address, reference):
    import litellm

    server = {"api_base": openai_address["base_url"], "api_key": "none", "model": f"openai/{NAME}"}
    asynchronous = asyncio.run(litellm.aembedding(input=TWO, **server))
    floats = litellm.embedding(input=TWO, encoding_format="float", **server)
    for answer in (asynchronous, floats):
        assert agree([item["embedding"] for item in answer.data], reference)
    with pytest.raises(litellm.BadRequestError, match=r"input\[1\] is an empty string"):
        litellm.embedding(input=["x", ""], **server)


# --- cohere ----------------------------------------------------------------------------------------------------------

TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


def agree_in_each_type(found, reference):
    """`found`: vectors of the documented texts by type. All say what the floats say, and these what the model does."""
    floats = np.array(found["float"], np.float32)
    bits = np.packbits(floats > 0, axis=1)
    return (
        agree(floats, reference)
        and agree(found["int8"], reference)
        and np.array_equal(np.array(found["uint8"]), np.array(found["int8"]) + 128)
        and np.array_equal(found["ubinary"], bits)
        and np.array_equal(found["binary"], bits.astype(int) - 128)
        and np.array_equal([np.frombuffer(base64.b64decode(one), "<f4") for one in found["base64"]], floats)
    )


def test_cohere_types_and_roles(address, reference):
    import cohere
    from conftest import PROMPTS

    with cohere.ClientV2(api_key="none", base_url=address) as client:
        asked = {"model": NAME, "input_type": "search_document"}
        answer = client.embed(texts=TWO, embedding_types=TYPES, **asked)
        assert agree_in_each_type(answer.embeddings.model_dump(by_alias=True), reference)
        assert answer.texts == TWO
        assert answer.meta.billed_units.input_tokens > 2
        parts = [{"content": [{"type": "text", "text": text}]} for text in TWO]
        assert agree(client.embed(inputs=parts, **asked).embeddings.float_, reference)
        short = client.embed(texts=TWO, output_dimension=128, embedding_types=["ubinary"], **asked)
        assert [len(row) for row in short.embeddings.ubinary] == [16, 16]
        query = client.embed(model=NAME, input_type="search_query", texts=TWO).embeddings.float_
        prompted = client.embed(texts=[PROMPTS["query"] + text for text in TWO], **asked).embeddings.float_
        assert np.allclose(query, prompted, atol=1e-5)


def test_cohere_v1_sends_many_side_by_side(address, reference):
    import cohere

    with cohere.Client(api_key="none", base_url=address) as client:
        found = client.embed(model=NAME, texts=[*MANY, *TWO], input_type="search_document")  # 96 a call
    assert len(found.embeddings) == 302
    assert agree(found.embeddings[-2:], reference)


def test_cohere_errors(address):
    import cohere

    with cohere.ClientV2(api_key="none", base_url=address) as client:
        with pytest.raises(cohere.NotFoundError) as caught:
            client.embed(model="embed-v4.0", texts=TWO, input_type="clustering")
        assert "there is no model 'embed-v4.0' here" in caught.value.body["message"]
        with pytest.raises(cohere.BadRequestError, match="send texts"):
            client.embed(model=NAME, images=["data:image/png;base64,AAAA"], input_type="image")
        with pytest.raises(cohere.BadRequestError, match="has 402 tokens and the model takes 256"):
            client.embed(model=NAME, texts=["word " * 400], input_type="search_document", truncate="NONE")


def test_cohere_of_npm(real, reference, node):
    made, _, _ = OF_NPM["cohere-ai"].partition("const asked")
    asked = f"{{ model: '{NAME}', texts, inputType: 'search_document', embeddingTypes: {TYPES} }}"
    found = node(made, real.port, f"(await client.embed({asked})).embeddings")
    assert agree_in_each_type(found, reference)
    wrong = f"await client.embed({asked.replace(NAME, 'other')}).catch((error) => [error.statusCode, error.body])"
    status, body = node(made, real.port, wrong)
    assert status == 404
    assert "there is no model 'other' here" in body["message"]


def test_openai_of_npm(real, reference, node):
    made, _, _ = OF_NPM["openai"].partition("const answer")
    ask = f"client.embeddings.create({{ model: '{NAME}', input: texts, encoding_format: 'float' }})"
    floats, short, status, message = node(
        made,
        real.port,
        f"[await {ask}, await {ask.replace('input', 'dimensions: 128, input')},"
        f" ...await {ask.replace(NAME, 'ada')}.catch((error) => [error.status, error.message])]",
    )
    assert agree([item["embedding"] for item in floats["data"]], reference)
    assert [len(item["embedding"]) for item in short["data"]] == [128, 128]
    assert status == 404
    assert f"this server has '{NAME}'" in message


# --- ollama ----------------------------------------------------------------------------------------------------------


def test_ollama(address, reference):
    import ollama

    with ollama.Client(host=address) as client:
        answer = client.embed(model=NAME, input=TWO)
        assert agree(answer.embeddings, reference)
        assert answer.prompt_eval_count > 2
        assert answer.total_duration > 0
        assert [len(vector) for vector in client.embed(model=NAME, input=TWO[0], dimensions=128).embeddings] == [128]
        assert agree([client.embeddings(model=NAME, prompt=text).embedding for text in TWO], reference)
        with pytest.raises(ollama.ResponseError, match="there is no model 'llama' here") as caught:
            client.embed(model="llama", input="x")
        assert caught.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="has 402 tokens and the model takes 256"):
            client.embed(model=NAME, input="word " * 400, truncate=False)
