"""docs/index-many-texts.md: its lines, and the parameters that its table names, in the clients themselves.

A stub answers each request 429 once. The client must come back, with the header both times.
"""

import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "index-many-texts.md").read_text()
(LINES,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
HEADERS = {"x-windve-priority": "bulk"}
ANSWERS = {
    "/v1/embeddings": lambda asked: {
        "data": [{"index": at, "embedding": [float(at)], "object": "embedding"} for at, _ in enumerate(asked["input"])],
        "model": "m",
        "object": "list",
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
    },
    "/v2/embed": lambda asked: {"id": "1", "embeddings": {"float": [[0.0] for _ in asked["texts"]]}, "texts": []},
    "/api/embed": lambda asked: {"model": "m", "embeddings": [[0.0] for _ in asked["input"]]},
    "/": lambda asked: [[0.0] for _ in asked["inputs"]],
}


@pytest.fixture
def stub():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with server.lock:
                server.asked.append(self.headers.get("x-windve-priority"))
                refused = server.refuses > 0
                server.refuses -= 1
            told = {"error": {"message": "busy"}} if refused else ANSWERS[self.path](asked)
            self.send_response(429 if refused else 200)
            self.send_header("retry-after-ms", "1")
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.lock, server.refuses = [], threading.Lock(), 1
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_the_lines_give_each_text_its_vector(stub):
    names = {}
    exec(LINES.replace("http://127.0.0.1:8000", stub.url), names)
    texts = [f"text {number}" for number in range(25)]
    assert [(text, vector) for text, vector in names["embed_all"](texts, size=10)] == [
        (text, [float(at % 10)]) for at, text in enumerate(texts)
    ]
    assert stub.asked == ["bulk"] * 4  # three requests, one of them twice
    names["client"].close()


def of_langchain(url):
    from langchain_openai import OpenAIEmbeddings

    more = {"default_headers": HEADERS, "max_retries": 5, "timeout": 700, "check_embedding_ctx_length": False}
    return OpenAIEmbeddings(base_url=f"{url}/v1", api_key="none", model="m", **more).embed_documents(["a", "b"])


def of_litellm(url):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks nobody else
    import litellm

    more = {"extra_headers": HEADERS, "max_retries": 5, "timeout": 700}
    return litellm.embedding("openai/m", ["a", "b"], api_base=f"{url}/v1", api_key="none", **more).data


def of_cohere(url):
    import cohere

    client = cohere.ClientV2(api_key="none", base_url=url, max_retries=5, timeout=700)
    asked = {"model": "m", "input_type": "search_document", "embedding_types": ["float"]}
    return client.embed(texts=["a", "b"], request_options={"additional_headers": HEADERS}, **asked).embeddings.float_


def of_hugging_face(url):
    from huggingface_hub import InferenceClient

    return InferenceClient(url, headers=HEADERS, timeout=700).feature_extraction(["a", "b"])


def of_ollama(url):
    from ollama import Client

    return Client(host=url, headers=HEADERS, timeout=700).embed(model="m", input=["a", "b"]).embeddings


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("client", [of_langchain, of_litellm, of_cohere])
def test_clients_that_come_back(stub, client):
    assert len(client(stub.url)) == 2
    assert stub.asked == ["bulk"] * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("client", [of_hugging_face, of_ollama])
def test_clients_that_do_not(stub, client):
    with pytest.raises(Exception, match=r"429|busy"):
        client(stub.url)
    assert len(client(stub.url)) == 2
    assert stub.asked == ["bulk"] * 2
