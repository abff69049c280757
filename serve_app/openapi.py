"""The OpenAPI document: what each route takes and answers. The checks themselves are in `requests.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments import trial
from deployments.models.model_files import ModelCard
from serve_app.kinds import ROOT, ROUTES
from serve_app.requests import PRIORITY, TIMEOUT, Rules

Schema = dict[str, Any]

_MEANINGS = {
    400: "The request must change; the sentence says how.",
    401: "No API key, or none of this service's.",
    403: "A trial without the secret of a calibration that runs.",
    404: "There is no such model here.",
    413: "The body is larger than the server takes.",
    422: "The request must change; the sentence says how.",
    424: "The model run failed, or the route is for models of another kind.",
    429: "Busy: no device has room before the deadline. Retry-After and retry-after-ms say when to come back.",
    500: "The model run failed.",
    503: "No pool can answer now.",
    504: f"The time that {TIMEOUT} allows has passed, or one query alone takes longer than its deadline.",
}
_TEXT: Schema = {"type": "string", "minLength": 1}
_NULL: Schema = {"type": "null"}
_NUMBERS: Schema = {"type": "array", "items": {"type": "number"}}
_OPENAI_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_TEI_ERROR: Schema = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
    "required": ["error", "error_type"],
}
_MODEL: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
    },
    "required": ["id", "object", "created", "owned_by"],
}
_TOKEN: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "text": {"type": "string"},
        "special": {"type": "boolean"},
        "start": {"type": ["integer", "null"], "description": "In bytes of the text as UTF-8, its prompt included."},
        "stop": {"type": ["integer", "null"]},
    },
    "required": ["id", "text", "special", "start", "stop"],
}
_TRUNCATE: Schema = {
    "type": ["boolean", "null"],
    "description": "Cut inputs longer than the model takes, or refuse them. Null: as the server's settings say.",
}
_RAW: Schema = {
    "type": ["boolean", "null"],
    "default": False,
    "description": "Logits instead of their sigmoid (one label) or softmax (several).",
}
_SIDE: Schema = {
    "enum": ["left", "right", "Left", "Right", None],
    "description": "The side on which a too long input is cut: right, unless the request says left.",
}
_TIMES = ("compute-time", "compute-characters", "compute-tokens", "total-time", "tokenization-time", "queue-time",
          "inference-time")  # fmt: skip


def document(rules: Rules, version: str, card: ModelCard, *, api_keys: bool) -> dict[str, Any]:
    """The document of a service with these rules and this model, with or without API keys."""
    build = _Builder(rules, card, api_keys=api_keys)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "windve",
            "version": version,
            "summary": "Embeddings, reranking, classification: accelerator first, CPU for the overflow.",
        },
        "paths": build.paths(),
    }
    if api_keys:
        found["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        found["security"] = [{"key": []}]
    return found


class _Builder:
    def __init__(self, rules: Rules, card: ModelCard, *, api_keys: bool) -> None:
        self._rules = rules
        self._kind = card.kind
        self._labels = card.labels
        self._statuses = (401,) if api_keys else ()
        ids = {
            "type": "array",
            "minItems": 1,
            "items": {"type": "integer", "minimum": 0, "maximum": card.vocab_size - 1},
        }
        self._ids: Schema = {"description": "Token ids of this model, special tokens included.", **ids}
        self._prompt = {
            "enum": [*card.prompts, None],
            "description": "Which of the model's prompts is put before each input. Null: the default, if there is one.",
        }
        self._dimensions = {
            "anyOf": [{"type": "integer", "minimum": 1, "maximum": rules.dimension}, _NULL],
            "description": "Keep the first so many numbers (Matryoshka models).",
        }

    def paths(self) -> dict[str, Any]:
        """Those of the model's kind, and those of all."""
        builders = {
            "/v1/embeddings": self._openai_embeddings,
            "/embeddings": lambda: {**self._openai_embeddings(), "operationId": "embeddings"},
            "/embed": self._embed,
            "/embed_all": self._embed_all,
            "/similarity": self._similarity,
            "/rerank": self._rerank,
            "/v1/rerank": lambda: self._cohere_rerank("1"),
            "/v2/rerank": lambda: self._cohere_rerank("2"),
            "/predict": self._predict,
            "/embed_sparse": self._embed_sparse,
        }
        return {
            **{path: {"post": builders[path]()} for path in ROUTES[self._kind]},
            "/": {"post": {**builders[ROOT[self._kind]](), "operationId": "root"}},
            "/tokenize": {"post": self._tokenize()},
            "/decode": {"post": self._decode()},
            "/v1/models": {"get": self._get("models", "The model that is served", self._list("list", _MODEL))},
            "/v1/models/{id}": {"get": self._openai_model()},
            "/info": {"get": self._get("info", "Model, limits, pools, depths, counters", {"type": "object"})},
            "/health": {"get": self._open("health", "200 while a pool can answer", 503)},
            "/ping": {"get": self._open("ping", "200 while the Router lives")},
        }

    def _openai_embeddings(self) -> dict[str, Any]:
        fields = {
            "input": self._inputs(),
            "model": {"enum": [self._rules.model, None]},
            "encoding_format": {"enum": ["float", "base64", None]},
            "dimensions": self._dimensions,
            "user": {"description": "Ignored."},
            **self._encoding(),
        }
        embedding = {"object": {"const": "embedding"}, "index": {"type": "integer"}}
        item = _object({**embedding, "embedding": {"anyOf": [_NUMBERS, {"type": "string", "format": "byte"}]}})
        usage = _object({"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}})
        answer = self._list("list", item, model={"type": "string"}, usage=usage)
        statuses = (400, 403, 404, 413, 429, 500, 503, 504)
        return {
            **_about("openai_embeddings", "Embed texts (OpenAI)", "embed"),
            **self._takes(fields, ["input"]),
            "responses": self._responses(answer, _OPENAI_ERROR, statuses, timed=True),
        }

    def _embed(self) -> dict[str, Any]:
        fields = {
            "inputs": self._inputs(),
            "normalize": {"type": ["boolean", "null"], "default": True},
            "dimensions": self._dimensions,
            **self._encoding(),
        }
        return self._tei_model_route("embed", "Embed texts", fields, {"type": "array", "items": _NUMBERS})

    def _embed_all(self) -> dict[str, Any]:
        fields = {"inputs": self._inputs(), **self._encoding()}
        answer = {"type": "array", "items": {"type": "array", "items": _NUMBERS}}
        return self._tei_model_route("embed_all", "The vectors of each text's tokens", fields, answer)

    def _similarity(self) -> dict[str, Any]:
        most = self._rules.max_inputs - 1
        inputs = {"source_sentence": _TEXT, "sentences": _many(_TEXT, most)}
        fields = {
            "inputs": _object(inputs),
            "parameters": {"anyOf": [{"type": "object", "properties": self._encoding()}, _NULL]},
        }
        return self._tei_model_route("similarity", "Cosines of a source sentence and others", fields, _NUMBERS)

    def _rerank(self) -> dict[str, Any]:
        fields = {
            "query": {"type": "string"},
            "texts": _many({"type": "string"}, self._rules.max_inputs),
            "raw_scores": _RAW,
            "return_text": {"type": ["boolean", "null"], "default": False},
            **self._encoding(),
        }
        rank = _object({"index": {"type": "integer"}, "score": {"type": "number"}})
        rank["properties"]["text"] = {"type": "string"}
        answer = {"type": "array", "items": rank, "description": "The best first."}
        return self._tei_model_route("rerank", "Score texts by a query", fields, answer, required=["query", "texts"])

    def _cohere_rerank(self, version: str) -> dict[str, Any]:
        document: Schema = {"anyOf": [{"type": "string"}, _object({"text": {"type": "string"}})]}
        fields: dict[str, Schema] = {
            "model": {"enum": [self._rules.model, None]},
            "query": {"type": "string"},
            "documents": _many(document, self._rules.max_inputs),
            "top_n": {"anyOf": [{"type": "integer", "minimum": 1}, _NULL], "description": "The best so many only."},
            "return_documents": {"type": ["boolean", "null"], "default": False},
            **self._encoding(),
        }
        result = _object({"index": {"type": "integer"}, "relevance_score": {"type": "number"}})
        result["properties"]["document"] = _object({"text": {"type": "string"}})
        usage = _object({"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}})
        answer = _object(
            {
                "id": {"type": "string"},
                "model": {"type": "string"},
                "results": {"type": "array", "items": result, "description": "The best first."},
                "meta": {"type": "object"},
                "usage": usage,
            }
        )
        return {
            **_about(f"cohere_rerank_{version}", f"Score texts by a query (Cohere, version {version})", "embed"),
            **self._takes(fields, ["query", "documents"]),
            "responses": self._responses(answer, _OPENAI_ERROR, (400, 403, 404, 413, 429, 500, 503, 504), timed=True),
        }

    def _predict(self) -> dict[str, Any]:
        text_or_pair = {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "string"}}
        fields = {
            "inputs": {
                "description": "A text, a list of one text or a pair, or a list of such lists.",
                "anyOf": [_TEXT, text_or_pair, _many({"anyOf": [_TEXT, text_or_pair]}, self._rules.max_inputs)],
            },
            "raw_scores": _RAW,
            **self._encoding(),
        }
        prediction = _object({"score": {"type": "number"}, "label": {"enum": list(self._labels)}})
        one = {"type": "array", "items": prediction, "description": "The likeliest first."}
        answer = {"anyOf": [one, {"type": "array", "items": one}]}
        return self._tei_model_route("predict", "Classify texts", fields, answer)

    def _embed_sparse(self) -> dict[str, Any]:
        fields = {"inputs": self._inputs(), **self._encoding()}
        weight = _object({"index": {"type": "integer"}, "value": {"type": "number"}})
        answer = {"type": "array", "items": {"type": "array", "items": weight}}
        return self._tei_model_route("embed_sparse", "Texts -> weights of words", fields, answer)

    def _tokenize(self) -> dict[str, Any]:
        fields: dict[str, Schema] = {
            "inputs": {"anyOf": [_TEXT, _many(_TEXT, self._rules.max_inputs)]},
            "add_special_tokens": {"type": ["boolean", "null"], "default": True},
            "prompt_name": self._prompt,
        }
        answer = {"type": "array", "items": {"type": "array", "items": _TOKEN}}
        return self._tei_tokenizer_route("tokenize", "Texts -> tokens", fields, "inputs", answer)

    def _decode(self) -> dict[str, Any]:
        fields: dict[str, Schema] = {
            "ids": {"anyOf": [self._ids, _many(self._ids, self._rules.max_inputs)]},
            "skip_special_tokens": {"type": ["boolean", "null"], "default": True},
        }
        answer = {"type": "array", "items": {"type": "string"}}
        return self._tei_tokenizer_route("decode", "Token ids -> texts", fields, "ids", answer)

    def _openai_model(self) -> dict[str, Any]:
        name = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        return {
            **_about("model", "The model, if it has this name", "about"),
            "parameters": [name],
            "responses": self._responses(_MODEL, _OPENAI_ERROR, (404,)),
        }

    def _tei_model_route(
        self, name: str, summary: str, fields: dict[str, Schema], answer: Schema, required: Sequence[str] = ("inputs",)
    ) -> dict[str, Any]:
        return {
            **_about(name, f"{summary} (text-embeddings-inference)", "embed"),
            **self._takes(fields, list(required)),
            "responses": self._responses(answer, _TEI_ERROR, (400, 403, 413, 422, 424, 429, 503, 504), timed=True),
        }

    def _tei_tokenizer_route(
        self, name: str, summary: str, fields: dict[str, Schema], required: str, answer: Schema
    ) -> dict[str, Any]:
        return {
            **_about(name, f"{summary} (text-embeddings-inference)", "tokenizer"),
            "requestBody": _body(fields, [required]),
            "responses": self._responses(answer, _TEI_ERROR, (400, 413, 422)),
        }

    def _get(self, name: str, summary: str, answer: Schema) -> dict[str, Any]:
        error = _OPENAI_ERROR if name == "models" else _TEI_ERROR
        return {**_about(name, summary, "about"), "responses": self._responses(answer, error, ())}

    def _open(self, name: str, summary: str, *statuses: int) -> dict[str, Any]:
        """A route that needs no key."""
        responses = {"200": {"description": "It is so; the body is empty."}, **_errors(_TEI_ERROR, statuses)}
        return {**_about(name, summary, "about"), "security": [], "responses": responses}

    def _takes(self, fields: dict[str, Schema], required: list[str]) -> dict[str, Any]:
        return {"parameters": _PARAMETERS, "requestBody": _body(fields, required)}

    def _responses(
        self, answer: Schema, error: Schema, statuses: Sequence[int], *, timed: bool = False
    ) -> dict[str, Any]:
        good = {"description": "The answer.", **_json(answer), **({"headers": _HEADERS} if timed else {})}
        return {"200": good, **_errors(error, [*self._statuses, *statuses])}

    def _inputs(self) -> Schema:
        query = {"anyOf": [_TEXT, self._ids]}
        return {
            "description": "A text, a list of texts, a list of token ids, or a list of such lists.",
            "anyOf": [_TEXT, _many(query, self._rules.max_inputs), self._ids],
        }

    def _encoding(self) -> dict[str, Schema]:
        return {"truncate": _TRUNCATE, "truncation_direction": _SIDE, "prompt_name": self._prompt}

    @staticmethod
    def _list(kind: str, item: Schema, **more: Schema) -> Schema:
        return _object({"object": {"const": kind}, "data": {"type": "array", "items": item}, **more})


_PARAMETERS = [
    {
        "name": PRIORITY,
        "in": "header",
        "schema": {"type": "string", "enum": ["normal", "bulk"]},
        "description": "bulk: the queries enter as room comes free, after single ones.",
    },
    {
        "name": trial.HEADER,
        "in": "header",
        "schema": {"type": "string"},
        "description": "The secret of a calibration that runs, and the depths by which it wants this request admitted.",
    },
    {
        "name": TIMEOUT,
        "in": "header",
        "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
        "description": "How long the client waits: what still waits for a device then is given up, and answered 504.",
    },
]
_HEADERS = {
    "x-windve-pool": {"schema": {"type": "string"}, "description": "Which pool answered: accelerator, cpu, or both."},
    **{f"x-{name}": {"schema": {"type": "integer"}} for name in _TIMES},
}


def _about(name: str, summary: str, tag: str) -> dict[str, Any]:
    return {"operationId": name, "summary": summary, "tags": [tag]}


def _object(properties: dict[str, Schema]) -> Schema:
    """All properties are required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _many(item: Schema, most: int) -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": most, "items": item}


def _body(fields: dict[str, Schema], required: list[str]) -> dict[str, Any]:
    return {"required": True, **_json({"type": "object", "properties": fields, "required": required})}


def _json(schema: Schema) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _errors(schema: Schema, statuses: Sequence[int]) -> dict[str, Any]:
    return {str(status): {"description": _MEANINGS[status], **_json(schema)} for status in statuses}
