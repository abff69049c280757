"""Requests that nobody should send, made from a seed: each kind is a function that makes the bytes of one.

Nothing here knows what windve does with them. `gRPC` kinds are HTTP/2 by hand, since no client would write them. What
is no HTTP, chunk or frame at all is left out: it ends in the HAProxy. Bodies that the OpenAPI document forbids are made
from it by schemathesis in test_real_model.py.
"""

import gzip
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

VALID = {  # what each route takes
    "/v1/embeddings": {"input": ["a text", "another"], "encoding_format": "float", "dimensions": 8, "user": "me"},
    "/embed": {"inputs": ["a text", "another"], "truncate": True, "normalize": False, "prompt_name": "query"},
    "/": {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}, "parameters": {"truncate": True}},
    "/v2/embed": {"texts": ["a"], "input_type": "search_query", "embedding_types": ["int8", "float"]},
    "/api/embed": {"model": "all-MiniLM-L6-v2", "input": ["a text"]},
    "/tokenize": {"inputs": ["a text"], "add_special_tokens": True},
    "/decode": {"ids": [[101, 102], [7592]], "skip_special_tokens": False},
}
NASTY = (  # in JSON, or nearly so
    "1e999", "-1e999", "9" * 5_000, "0." + "0" * 5_000 + "1", "NaN", "-Infinity", "01", "0x10", "1e", "-0",
    "1" + "0" * 400, "18446744073709551616", "null", "[]", "{}", '{"":""}', "[[]]", "[null]", "[[2147483648]]", "[-1]",
    '["a",1]', '""', r'"\u0000"', r'"\ud800"', r'"\udfff\ud800"', r'"\uFFFF"', r'"\x41"', r'"\u12"', '"\0"', '"\n"',
    '"\x7f\x1b[31m"', '"\ufeff"', '"' + "e\u0301" * 500 + '"', '"' + "👩‍👩‍👧‍👦" * 40 + '"', '"' + "word " * 3_000 + '"',
    "[" * 300_000, '{"a":' * 10_000, "[" * 1_100 + "]" * 1_100, "[" + "0," * 5_000 + "0]",
    '["a"' + ',"a"' * 3_000 + "]", '"../../etc/passwd"', '"${jndi:ldap://x}"',
)  # fmt: skip
NO_UTF_8 = (b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80" * 50, b"\xe2\x82")


@dataclass(frozen=True, slots=True)
class Bad:
    """`halves`: the client shuts its side when it has sent this, so that nobody waits for more. `late`: it may ask for
    less time than there is, so 504 is what it wants. `grpc`: it goes to the other port. `internal`: gRPC's own library
    says INTERNAL to it.
    """

    kind: str
    sent: bytes
    halves: bool = False
    late: bool = False
    grpc: bool = False
    internal: bool = False


def many(count: int, seed: int) -> Iterator[Bad]:
    """`count` of all kinds, in an order that the seed shuffles. Made one by one: together they would fill memory."""
    chance = random.Random(seed)
    kinds = list(KINDS.items())
    made = [kinds[number % len(kinds)] for number in range(count)]
    chance.shuffle(made)
    return (make(chance, kind) for kind, make in made)


def post(path: str, body: bytes, *headers: str, method: str = "POST", length: str | None = None) -> bytes:
    told = f"content-length: {len(body) if length is None else length}"
    lines = [f"{method} {path} HTTP/1.1", "host: windve", "content-type: application/json", told, *headers]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body


def _valid(chance: random.Random) -> tuple[str, bytes]:
    path = chance.choice(list(VALID))
    return path, json.dumps(VALID[path]).encode()


def bodies(chance: random.Random, kind: str) -> Bad:
    """A field holds what it should not, the name is another one, or bytes are changed."""
    path = chance.choice(list(VALID))
    name = chance.choice([*VALID[path], "", "unknown"])
    body = json.dumps({**VALID[path], name: 4711}).encode()
    value = chance.choice((*(one.encode() for one in NASTY), *(b'"' + one + b'"' for one in NO_UTF_8)))
    body = value if chance.random() < 0.1 else body.replace(b"4711", value)
    for _ in range(chance.choice((0, 0, 3))):
        at = chance.randrange(len(body))
        body = body[:at] + chance.randbytes(chance.randint(0, 3)) + body[at + chance.randint(0, 2) :]
    return Bad(kind, post(path, body or b" "))


def whole_bodies(chance: random.Random, kind: str) -> Bad:
    """Not the JSON object that belongs there, or not what the headers say."""
    path, body = _valid(chance)
    whole = chance.choice((
        body, b"\xef\xbb\xbf" + body, body.decode().encode("utf-16"), body.decode().encode("utf-32"), body + b"\0",
        body + body, body[:-2], b"\0" * 64, b"", b" " * 4_000, b"null", b"[]", b"input=a&b=c", b"--x\r\n\r\n",
        gzip.compress(body), gzip.compress(b"[" * 1_000_000),
    ))  # fmt: skip
    header = chance.choice((
        "content-encoding: gzip", "content-encoding: br", "content-encoding: deflate, gzip", "content-encoding: \xff",
        "content-type: text/plain; charset=utf-7", "content-type: multipart/form-data", "content-type: " + "x" * 4_000,
        "content-type:", "accept-encoding: identity;q=0", "accept: nothing/at-all", "range: bytes=0-1", "if-match: *",
    ))  # fmt: skip
    return Bad(kind, post(path, whole, header))


def own_headers(chance: random.Random, kind: str) -> Bad:
    path, body = _valid(chance)
    name = chance.choice((
        "x-request-timeout-ms", "x-windve-priority", "authorization", "x-request-id", "traceparent",
        "application", "x-serve-request-id", "serve_multiplexed_model_id", "x-forwarded-for", "host", "content-length",
    ))  # fmt: skip
    value = chance.choice((
        "", "-1", "0", "1", "1e9", "9" * 400, "NaN", "bulk", "\xff\xfe", "a" * 8_000, "Bearer \0", "{}", "00-0-0-0",
        ",", "1 ", "\t", "soon", "accelerator=1,cpu=1", "../..", "%00",
    ))  # fmt: skip
    return Bad(kind, post(path, body, f"{name}: {value}"), late=name == "x-request-timeout-ms", halves=True)


def many_headers(chance: random.Random, kind: str) -> Bad:
    path, body = _valid(chance)
    count, length = chance.choice(((50, 10), (99, 100), (101, 1), (150, 50), (2_000, 4), (20_000, 1), (3, 40_000)))
    headers = [f"x-{number}: {'v' * length}" for number in range(count)]
    headers = headers if chance.random() < 0.7 else [f"cookie: {'c=d; ' * length}"] * count
    return Bad(kind, post(path, body, *headers), halves=True)


def paths(chance: random.Random, kind: str) -> Bad:
    path = chance.choice((
        "/" + "a" * 9_000, "/" + "a" * 100_000, "/v1/embeddings?" + "q=1&" * 10_000, "/embed/../info", "//embed",
        "/%00", "/%ff%fe", "/v1/models/" + "%2e%2e/" * 50, "/embed#x", "*", "", "/\xff", "/embed;a=b", "/%", "/%zz",
        "/v1/models/\x7f", "http://other/embed", "https://[::1", "http://windve:99999/embed", "/em\tbed", "/-/routes/x",
        "/-/healthz?" + "x" * 5_000, "/models/none/embed", "/models//", "/static/../../x", "?", "windve:80",
    ))  # fmt: skip
    method = chance.choice(("POST", "POST", "GET", "CONNECT", "OPTIONS"))
    return Bad(kind, post(path, _valid(chance)[1], method=method), halves=True)


def smuggled(chance: random.Random, kind: str) -> Bad:
    """Where two servers in a row could disagree on where the body ends. A second request hides behind that end."""
    path, body = _valid(chance)
    behind = f"GET /smuggled-{chance.randrange(10**9)} HTTP/1.1\r\nhost: windve\r\n\r\n".encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    te, size = "transfer-encoding: chunked", len(body)
    head = f"POST {path} HTTP/1.1\r\nhost: windve\r\n"
    framed = chance.choice((
        f"{te}\r\ncontent-length: {len(chunked)}", f"content-length: 4\r\n{te}", f"{te}\r\ncontent-length: 0",
        f"content-length: {size}\r\ncontent-length: {size + 9}", f"content-length: {size}, {size}",
        f"content-length: +{size}", f"content-length: -{size}", f"content-length : {size}", f"content_length: {size}",
        "transfer-encoding: xchunked", "transfer-encoding: chunked, identity", "transfer-encoding : chunked",
        "transfer-encoding: chunked\r\ntransfer-encoding: cow", "x: y\r\n transfer-encoding: chunked",
        f"x: y\ntransfer-encoding: chunked\ncontent-length: {size}", f"x: y\r{te}", f"{te}\r\nx\0: y",
        f"transfer-encoding: gzip, chunked\r\ncontent-length: {size}", f"x: y\n\ncontent-length: {size}",
    ))  # fmt: skip
    sent = chunked if "chunked" in framed and chance.random() < 0.7 else body
    return Bad(kind, f"{head}{framed}\r\n\r\n".encode("latin-1") + sent + behind, halves=True)


def lengths(chance: random.Random, kind: str) -> Bad:
    """More is promised than comes, or too much."""
    path, body = _valid(chance)
    length = chance.choice((
        2**31, 2**31 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64, 10**40, 17 * 2**20, 16 * 2**20 + 1, len(body) + 1,
        len(body) * 2, 70_000, 65_536,
    ))  # fmt: skip
    some = body if chance.random() < 0.7 else body + b" " * chance.choice((60_000, 63_000, 200_000))
    expect = ["expect: 100-continue"] if chance.random() < 0.2 else []
    return Bad(kind, post(path, some, *expect, length=str(length)), halves=chance.random() < 0.8)


def large(chance: random.Random, kind: str) -> Bad:
    """As large as a server takes, or larger, and whole."""
    path = chance.choice(("/v1/embeddings", "/embed", "/tokenize"))
    name = "input" if path == "/v1/embeddings" else "inputs"
    size = chance.choice((80_000, 300_000, 1_000_000) * 6 + (17 * 2**20,))
    inputs = chance.choice(
        ('"%s"' % ("w " * (size // 2)), "[" + "1," * (size // 2) + "1]", '["' + '","' * (size // 3) + '"]')
    )
    body = f'{{"{name}": {inputs}}}'.encode()
    if chance.random() < 0.3:
        return Bad(kind, f"POST {path} HTTP/1.1\r\nhost: windve\r\ntransfer-encoding: chunked\r\n\r\n".encode()
                   + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))  # fmt: skip
    return Bad(kind, post(path, body))


# gRPC, which is HTTP/2
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, GOAWAY = 0, 1, 3, 4, 7
END_STREAM, END_HEADERS = 1, 4
CALLS = ("Embed/Embed", "Embed/EmbedStream", "Embed/EmbedAll", "Tokenize/Tokenize", "Tokenize/Decode", "Info/Info")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """RFC 9113, 4.1."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field as RFC 7541, 6.2.2 has it: not indexed, no Huffman code."""
    return b"\0" + _sized(name) + _sized(value)


def _sized(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)]) + text
    rest, size = len(text) - 127, b"\x7f"
    while rest > 127:
        size, rest = size + bytes([rest % 128 + 128]), rest // 128
    return size + bytes([rest]) + text


def call(path: str, *more: tuple[bytes, bytes]) -> bytes:
    fields = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode("latin-1")), (b":authority", b"windve"),
        (b"content-type", b"application/grpc"), (b"te", b"trailers"), *more,
    ]  # fmt: skip
    return b"".join(_literal(*field) for field in fields)


def message(content: bytes) -> bytes:
    """gRPC's length-prefixed message."""
    return struct.pack(">BI", 0, len(content)) + content


def opened(*frames: bytes) -> bytes:
    return PREFACE + frame(SETTINGS, 0, 0) + b"".join(frames)


def _field(content: bytes) -> bytes:
    """The first one, of protobuf."""
    return b"\x0a" + bytes([len(content)]) + content


def grpc_messages(chance: random.Random, kind: str) -> Bad:
    """Protobuf that is none, or holds what the service does not take."""
    content = chance.choice((
        b"", chance.randbytes(chance.randint(1, 300)), b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\xff" * 20, b"\x08\x01",
        b"\x0b", _field(b"\xff\xfe"), _field(b"a\xed\xa0\x80"), _field(b"a") + b"\x20\x09", _field(b"a") + b"\x30\x00",
        _field(b"a") + b"\x30\xff\xff\xff\xff\x0f", _field(b"\0"), _field(b"a") * 500, b"\x10" + b"\x80" * 11,
        b"\x2a\x07nowhere" + _field(b"a"), b"\x0a\x80\x80\x80\x80\x10", b"\x0b" * 200 + b"\x0c" * 200,
        b"\x0a\xff\xff\x03" + b"w " * 32_767,
    ))  # fmt: skip
    path = f"/tei.v1.{chance.choice(CALLS)}"
    headers = frame(HEADERS, END_HEADERS, 1, call(path))
    body = message(content)
    parts = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
    data = [frame(DATA, END_STREAM * (part is parts[-1]), 1, part) for part in parts]
    return Bad(kind, opened(headers, *data), grpc=True)


def grpc_headers(chance: random.Random, kind: str) -> Bad:
    path = chance.choice((
        "/tei.v1.Embed/Nothing", "/nothing", "/", "", "*", "/tei.v1.Embed/Embed", "/tei.v1.Embed/Embed?x", "/\xff\0",
        "/ray.serve.RayServeAPIService/Nothing", "/" + "a" * 7_000, "tei.v1.Embed/Embed", "/tei.v1.Embed/../Info",
    ))  # fmt: skip
    more = chance.choice((
        (b"model", b"none"), (b"application", b"none"), (b"application", b"\xff"), (b"x-windve-priority", b"\xff"),
        (b"x-request-timeout-ms", b"-1"), (b"x-bin-bin", b"%%%"), (b"Upper", b"case"), (b"x y", b"z"), (b"", b""),
        (b"connection", b"close"), (b":late", b"pseudo"), (b":path", b"/twice"), (b"x", b"a\r\nb: c"), (b"x", b"a\0b"),
        (b"x", b"v" * 9_000), (b"content-type", b"text/html"), (b"transfer-encoding", b"chunked"), (b"host", b"other"),
        (b"content-length", b"99"), (b"te", b"gzip"), (b"multiplexed_model_id", b"\xff"), (b"request_id", b"x" * 3_000),
    ))  # fmt: skip
    headers = frame(HEADERS, END_HEADERS, 1, call(path, more))
    sent = opened(headers, frame(DATA, END_STREAM, 1, message(_field(b"a"))))
    return Bad(kind, sent, grpc=True, internal=more[0] == b"x-bin-bin")  # what it holds is no base64


KINDS: dict[str, Callable[[random.Random, str], Bad]] = {
    "fields": bodies,
    "bodies and what headers say of them": whole_bodies,
    "values of headers": own_headers,
    "many or long headers": many_headers,
    "paths": paths,
    "smuggling": smuggled,
    "lengths that are not kept": lengths,
    "large bodies": large,
    "gRPC: messages": grpc_messages,
    "gRPC: headers": grpc_headers,
}
