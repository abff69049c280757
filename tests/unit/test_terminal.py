"""What `make serve` shows of an application that runs."""

import io

import pytest
from rich.console import Console

from serve_app.local.console import _show_model, show_examples
from serve_app.local.serve import first_reason

POOL = {
    "live_replicas": 1,
    "queue_depth": None,
    "replicas": {"r": {"device": "cpu", "dtype": "float32", "cores": [0, 1]}},
    "latency_model": {"alpha_s": 0.01, "beta_s": 0.2, "source": "estimated"},
}


def info(**ours):
    about = {"kind": "embedding", "kinds": ["embedding"], "dimension": 64, "topology": "CPU only", "slo_s": 1.0}
    windve = {**about, "emulated": False, "pools": {"cpu": POOL}, **ours}
    return {"model_id": "m3", "max_input_length": 512, "windve": windve}


def shown(show, *about):
    console = Console(width=200, file=io.StringIO())
    show(console, *about)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ({}, "model: m3, embedding of 64 numbers, 512 tokens"),
        ({"kinds": ["embedding", "sparse", "multi_vector"]}, "embedding of 64 numbers (also sparse, multi_vector), "),
        ({}, "topology: CPU only; SLO 1.0 s"),
        ({}, "cpu   1         cpu     float32  0,1    -      0.0100 C + 0.2000 (estimated)"),
        ({"emulated": True}, "the devices are EMULATED"),
    ],
)
def test_a_model(ours, words):
    assert words in shown(_show_model, info(**ours))


def test_a_model_that_generates():
    replica = {"device": "cuda:0", "dtype": "bfloat16", "cores": [3], "blocks": 7, "host": {"blocks": 9}}
    pools = {"accelerator": {"live_replicas": 2, "replicas": {"r": replica}}}
    text = shown(_show_model, info(kind="generation", ttft_s=1.0, tpot_s=0.2, emulated=True, pools=pools))
    for words in (
        "model: m3, generation, 512 tokens with the answer",
        "first token within 1 s, then 0.2 s a token",
        "the tokens are meaningless",
        "accelerator  2         cuda:0  bfloat16  7 + 9 of the host  3",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("models", "address", "key", "lines"),
    [
        ([("m", "embedding")], "http://h/one", None, ["curl -s http://h/one/v1/embeddings -H 'content-type"]),
        ([("m", "reranker")], "http://h/two", None, ["curl -s http://h/two/rerank -H 'content-type"]),
        ([("m", "embedding")], "http://h", "sk-secret", ['embeddings -H "authorization: Bearer KEY" -H']),
        (
            [("m", "embedding"), ("n", "sparse")],
            "http://h",
            None,
            ['{"model": "m", "input"', '{"model": "n", "inputs"'],
        ),
    ],
)
def test_lines_to_try(models, address, key, lines):
    text = shown(show_examples, models, address, key)
    for line in lines:
        assert line in text
    assert "sk-secret" not in text


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (["Traceback\n  x\nSettingsError: args.a: wrong\n", "more"], "args.a: wrong"),
        (["", "Traceback\n  x\nOSError: no\n"], "OSError: no"),
        (["Request failed with status code 500: Traceback\nOSError: no\n\n."], "OSError: no"),  # Ray puts a dot behind
    ],
)
def test_the_first_reason(messages, reason):
    assert first_reason(messages) == reason
