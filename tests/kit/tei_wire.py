"""A gRPC client of text-embeddings-inference, built from its messages and field numbers (its proto/tei.proto at
0d124dc, copied by hand). Nothing here comes from windve's .proto.
"""

import contextlib

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2

PACKAGE = "tei.v1"
ENUMS = {
    "ModelType": ["MODEL_TYPE_EMBEDDING", "MODEL_TYPE_CLASSIFIER", "MODEL_TYPE_RERANKER"],
    "TruncationDirection": ["TRUNCATION_DIRECTION_RIGHT", "TRUNCATION_DIRECTION_LEFT"],
}
# message: fields in the order of their numbers, from 1; `?` is optional, `*` repeated
MESSAGES = {
    "InfoRequest": "",
    "InfoResponse": "string version, string? sha, string? docker_label, string model_id, string? model_sha, "
    "string model_dtype, ModelType model_type, uint32 max_concurrent_requests, uint32 max_input_length, "
    "uint32 max_batch_tokens, uint32? max_batch_requests, uint32 max_client_batch_size, uint32 tokenization_workers",
    "Metadata": "uint32 compute_chars, uint32 compute_tokens, uint64 total_time_ns, uint64 tokenization_time_ns, "
    "uint64 queue_time_ns, uint64 inference_time_ns",
    "EmbedRequest": "string inputs, bool truncate, bool? normalize, TruncationDirection truncation_direction, "
    "string? prompt_name, uint32? dimensions",
    "EmbedResponse": "float* embeddings, Metadata metadata",
    "EmbedSparseRequest": "string inputs, bool truncate, TruncationDirection truncation_direction, string? prompt_name",
    "SparseValue": "uint32 index, float value",
    "EmbedSparseResponse": "SparseValue* sparse_embeddings, Metadata metadata",
    "EmbedAllRequest": "string inputs, bool truncate, TruncationDirection truncation_direction, string? prompt_name",
    "TokenEmbedding": "float* embeddings",
    "EmbedAllResponse": "TokenEmbedding* token_embeddings, Metadata metadata",
    "PredictRequest": "string inputs, bool truncate, bool raw_scores, TruncationDirection truncation_direction",
    "PredictPairRequest": "string* inputs, bool truncate, bool raw_scores, TruncationDirection truncation_direction",
    "Prediction": "float score, string label",
    "PredictResponse": "Prediction* predictions, Metadata metadata",
    "RerankRequest": "string query, string* texts, bool truncate, bool raw_scores, bool return_text, "
    "TruncationDirection truncation_direction",
    "RerankStreamRequest": "string query, string text, bool truncate, bool raw_scores, bool return_text, "
    "TruncationDirection truncation_direction",
    "Rank": "uint32 index, string? text, float score",
    "RerankResponse": "Rank* ranks, Metadata metadata",
    "EncodeRequest": "string inputs, bool add_special_tokens, string? prompt_name",
    "SimpleToken": "uint32 id, string text, bool special, uint32? start, uint32? stop",
    "EncodeResponse": "SimpleToken* tokens",
    "DecodeRequest": "uint32* ids, bool skip_special_tokens",
    "DecodeResponse": "string text",
}
# call: its request and its answer
UNARY = {
    "Info/Info": ("InfoRequest", "InfoResponse"),
    "Embed/Embed": ("EmbedRequest", "EmbedResponse"),
    "Embed/EmbedSparse": ("EmbedSparseRequest", "EmbedSparseResponse"),
    "Embed/EmbedAll": ("EmbedAllRequest", "EmbedAllResponse"),
    "Predict/Predict": ("PredictRequest", "PredictResponse"),
    "Predict/PredictPair": ("PredictPairRequest", "PredictResponse"),
    "Rerank/Rerank": ("RerankRequest", "RerankResponse"),
    "Tokenize/Tokenize": ("EncodeRequest", "EncodeResponse"),
    "Tokenize/Decode": ("DecodeRequest", "DecodeResponse"),
}
STREAMS = {
    "Embed/EmbedStream": ("EmbedRequest", "EmbedResponse"),
    "Embed/EmbedSparseStream": ("EmbedSparseRequest", "EmbedSparseResponse"),
    "Embed/EmbedAllStream": ("EmbedAllRequest", "EmbedAllResponse"),
    "Predict/PredictStream": ("PredictRequest", "PredictResponse"),
    "Predict/PredictPairStream": ("PredictPairRequest", "PredictResponse"),
    "Tokenize/TokenizeStream": ("EncodeRequest", "EncodeResponse"),
    "Tokenize/DecodeStream": ("DecodeRequest", "DecodeResponse"),
}
# many requests, one answer
COLLECTED = {"Rerank/RerankStream": ("RerankStreamRequest", "RerankResponse")}

_Field = descriptor_pb2.FieldDescriptorProto


def file_descriptor():
    """The messages and enums as a FileDescriptorProto."""
    file = descriptor_pb2.FileDescriptorProto(name="by_hand.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, written in enumerate(filter(None, fields.split(", ")), 1):
            kind, field = written.split()
            _add_field(message, field, number, kind)
    return file


def _add_field(message, name, number, kind):
    field = message.field.add(name=name, number=number)
    field.label = _Field.LABEL_REPEATED if kind.endswith("*") else _Field.LABEL_OPTIONAL
    if kind.endswith("?"):
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    kind = kind.rstrip("?*")
    if kind in ENUMS or kind in MESSAGES:
        field.type = _Field.TYPE_ENUM if kind in ENUMS else _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")


def _classes():
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file_descriptor())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


CLASSES = _classes()


class Client:
    """`client.call("Embed/Embed", inputs="text")`; `client.unary(...)` and `client.stream(...)` are grpcio's own."""

    def __init__(self, port, options=()):
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=list(options))

    def unary(self, call):
        return self._made(self.channel.unary_unary, call, UNARY)

    def stream(self, call):
        return self._made(self.channel.stream_stream, call, STREAMS)

    @staticmethod
    def _made(make, call, calls):
        _, answer = calls[call]
        read = CLASSES[answer].FromString
        return make(f"/{PACKAGE}.{call}", request_serializer=_serialize, response_deserializer=read)

    def health(self, service=""):
        """The standard health check's Check of a service, or of the whole server."""
        return self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=_serialize,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest(service=service), timeout=30).status

    def watch(self, timeout=60):
        """The standard health check's Watch, of the whole server."""
        return self.channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=_serialize,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest(), timeout=timeout)

    def call(self, call, *, timeout=30, metadata=(), **fields):
        return self.unary(call)(request(call, **fields), timeout=timeout, metadata=list(metadata))

    def refused(self, call, *, timeout=30, metadata=(), **fields):
        """The error that the call gets: `.code()`, `.details()`, `.trailing_metadata()`."""
        try:
            answer = self.call(call, timeout=timeout, metadata=metadata, **fields)
        except grpc.RpcError as error:
            return error
        raise AssertionError(f"answered: {answer}")


def request(call, **fields):
    kind, _ = {**UNARY, **STREAMS, **COLLECTED}[call]
    return CLASSES[kind](**fields)


def _serialize(message):
    return message if isinstance(message, bytes) else message.SerializeToString()


@contextlib.contextmanager
def connected(port, options=()):
    client = Client(port, options)
    with client.channel:
        yield client
