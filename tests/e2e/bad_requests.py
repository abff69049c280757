"""Requests that nobody should send, made from a seed: each kind is a function that makes the bytes of one.

Nothing here knows what windve does with them. `gRPC` kinds are HTTP/2 by hand, since no client would write them. Bodies
that the OpenAPI document forbids are made from it by schemathesis in test_real_model.py.
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
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "PROPFIND", "post", "P\u00f6ST", "X" * 300, "")


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
        "x-request-timeout-ms", "x-windve-priority", "x-windve-trial", "authorization", "x-request-id", "traceparent",
        "application", "x-serve-request-id", "serve_multiplexed_model_id", "x-forwarded-for", "host", "content-length",
    ))  # fmt: skip
    value = chance.choice((
        "", "-1", "0", "1", "1e9", "9" * 400, "NaN", "bulk", "\xff\xfe", "a" * 8_000, "Bearer \0", "{}", "00-0-0-0",
        ",",
        "1 ", "\t", "soon", "accelerator=1,cpu=1", "../..", "%00",
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
        "/%00",
        "/%ff%fe", "/v1/models/" + "%2e%2e/" * 50, "/embed#x", "*", "", "embed", "/\xff", "/embed;a=b", "/%", "/%zz",
        "/v1/models/\x7f", "http://other/embed", "https://[::1", "http://windve:99999/embed", "/embed ", "/em\tbed",
        "/-/routes/x", "/-/healthz?" + "x" * 5_000, "/models/none/embed", "/models//", "/static/../../x", "?",
        "windve:80",
    ))  # fmt: skip
    method = chance.choice(("POST", "POST", "GET", "CONNECT", "OPTIONS"))
    return Bad(kind, post(path, _valid(chance)[1], method=method), halves=True)


def methods(chance: random.Random, kind: str) -> Bad:
    path, body = _valid(chance)
    line = chance.choice((
        f"{chance.choice(METHODS)} {path} HTTP/1.1", f"POST {path} HTTP/9.9", f"POST {path} HTTP/1.0", f"POST {path}",
        f"POST  {path}  HTTP/1.1", f"POST {path} http/1.1", f" POST {path} HTTP/1.1", f"POST {path} HTTP/1.1 x",
        "PRI * HTTP/2.0", f"POST {path} HTTP/0.9", f"POST {path} HTTP/1.1\r", f"{chance.choice(METHODS)} / HTTP/1.1",
    ))  # fmt: skip
    also = chance.choice(
        ("expect: 100-continue", "expect: 200-ok", "upgrade: websocket", "upgrade: h2c", "connection: x")
    )
    head = f"{line}\r\nhost: windve\r\n{also}\r\ncontent-length: {len(body)}\r\n\r\n"
    return Bad(kind, head.encode("latin-1") + body, halves=True)


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
        f"content-length: +{size}", f"content-length: -{size}", f"content-length: 0x{size:x}",
        f"content-length: {size} 1",
        f"content-length: \t{size}\x0b", "content-length:", f"content-length : {size}",
        f"Content-Length: {size}\r\n\tx",
        "transfer-encoding: xchunked", "transfer-encoding: chunked, identity", "transfer-encoding: identity",
        "transfer-encoding: chunked\r\ntransfer-encoding: cow", "transfer-encoding : chunked",
        " transfer-encoding: chunked",
        "transfer-encoding:\x0bchunked", 'transfer-encoding: "chunked"', "x: y\r\n transfer-encoding: chunked",
        f"x: y\ntransfer-encoding: chunked\ncontent-length: {size}", f"x: y\r{te}", f"{te}\r\nx\0: y", "te: chunked",
        f"transfer-encoding: gzip, chunked\r\ncontent-length: {size}", f"x: y\n\ncontent-length: {size}",
        f"content-length: {size}\r\nconnection: content-length", f"content-length: {size:030}",
        f"content_length: {size}",
    ))  # fmt: skip
    sent = chunked if "chunked" in framed and chance.random() < 0.7 else body
    return Bad(kind, f"{head}{framed}\r\n\r\n".encode("latin-1") + sent + behind, halves=True)


def chunks(chance: random.Random, kind: str) -> Bad:
    path, body = _valid(chance)
    coded = chance.choice((
        b"-1\r\n" + body, b"0x5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffffff\r\n" + body, b"7fffffff\r\n" + body,
        b"%x\r\n" % (len(body) + 2) + body + b"\r\n0\r\n\r\n", b"%x\r\n" % (len(body) - 2) + body + b"\r\n0\r\n\r\n",
        b"%x;%s\r\n" % (len(body), b"e" * 9_000) + body + b"\r\n0\r\n\r\n", b"zz\r\n", b"\r\n\r\n", b"5\rhello\r\n",
        b"%x\n" % len(body) + body + b"\n0\n\n", b"0\r\n" + b"t: r\r\n" * 3_000 + b"\r\n",
        b"0\r\ncontent-length: 9\r\n\r\n",
        b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n", b"1 \r\n{\r\n0\r\n\r\n", b"",
    ))  # fmt: skip
    head = f"POST {path} HTTP/1.1\r\nhost: windve\r\ntransfer-encoding: chunked\r\n\r\n"
    return Bad(kind, head.encode() + coded, halves=True)


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


def noise(chance: random.Random, kind: str) -> Bad:
    """Not HTTP at all, or no more than its beginning."""
    whole = post(*_valid(chance))
    what = chance.choice((
        chance.randbytes(chance.randint(1, 3_000)),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500),
        b"\r\n" * 500, b"\0" * 100, whole[: chance.randrange(len(whole))],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        b"SSH-2.0-x\r\n", b"*1\r\n$4\r\nPING\r\n", b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n" + whole, whole + b"\0" * 200,
        whole.replace(b"\r\n", b"\n"), whole.replace(b"\r\n", b"\r"), whole[:-1],
    ))  # fmt: skip
    return Bad(kind, what, halves=True)


# gRPC, which is HTTP/2
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
CALLS = ("Embed/Embed", "Embed/EmbedStream", "Embed/EmbedAll", "Tokenize/Tokenize", "Tokenize/Decode", "Info/Info")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", length: int | None = None) -> bytes:
    """RFC 9113, 4.1. `length`: another than the payload's."""
    return (
        struct.pack(">I", len(payload) if length is None else length)[1:]
        + struct.pack(">BBI", kind, flags, stream)
        + payload
    )


def at_stream(whole: bytes, stream: int) -> bytes:
    """The same frame for another stream."""
    return whole[:5] + struct.pack(">I", stream) + whole[9:]


def literal(name: bytes, value: bytes) -> bytes:
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
    return b"".join(literal(*field) for field in fields)


def message(content: bytes, compressed: int = 0, length: int | None = None) -> bytes:
    """gRPC's length-prefixed message."""
    return struct.pack(">BI", compressed, len(content) if length is None else length) + content


def opened(*frames: bytes) -> bytes:
    return PREFACE + frame(SETTINGS, 0, 0) + b"".join(frames)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + bytes([len(content)]) + content


def grpc_messages(chance: random.Random, kind: str) -> Bad:
    """Protobuf that is none, or holds what the service does not take."""
    content = chance.choice((
        b"", chance.randbytes(chance.randint(1, 300)), b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\xff" * 20, b"\x08\x01",
        b"\x0b",
        _field(1, b"\xff\xfe"), _field(1, b"a\xed\xa0\x80"), _field(1, b"a") + b"\x20\x09",
        _field(1, b"a") + b"\x30\x00",
        _field(1, b"a") + b"\x30\xff\xff\xff\xff\x0f", _field(1, b"\0"), _field(1, b"a") * 500, b"\x10" + b"\x80" * 11,
        _field(5, b"nowhere") + _field(1, b"a"), b"\x0a\x80\x80\x80\x80\x10", _field(1, b"") + _field(2, b""),
        (b"\x0b" * 200) + (b"\x0c" * 200), b"\x0a\xff\xff\x03" + b"w " * 32_767, _field(1, b"\xff\xff\xff\xff\x0f"),
    ))  # fmt: skip
    path = f"/tei.v1.{chance.choice(CALLS)}"
    headers = frame(HEADERS, END_HEADERS, 1, call(path))
    body = message(content)
    parts = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
    data = [frame(DATA, END_STREAM * (part is parts[-1]), 1, part) for part in parts]
    return Bad(kind, opened(headers, *data), grpc=True)


def grpc_prefixes(chance: random.Random, kind: str) -> Bad:
    """Messages whose length or flag is wrong."""
    good = _field(1, b"a text")
    body = chance.choice((
        message(good, compressed=1), message(good, compressed=7), message(good, length=len(good) + 5), b"", b"\0",
        b"\0\0\0",
        message(good, length=2**32 - 1), message(good, length=2**31), message(good, length=2), message(good) * 3,
        message(good) + b"\0\0", message(gzip.compress(good), compressed=1), message(b"", length=64 * 2**20 + 1),
    ))  # fmt: skip
    more = chance.choice((
        (), (b"grpc-encoding", b"gzip"), (b"grpc-encoding", b"nothing"), (b"grpc-encoding", b"deflate"),
        (b"grpc-timeout", b"1n"), (b"grpc-timeout", b"soon"), (b"content-length", b"3"),
    ))  # fmt: skip
    headers = frame(HEADERS, END_HEADERS, 1, call(f"/tei.v1.{chance.choice(CALLS)}", *([more] if more else [])))
    # A call that ends within its message is never answered by gRPC's Python server: whoever waits for that hangs up.
    return Bad(kind, opened(headers, frame(DATA, END_STREAM, 1, body)), grpc=True, halves=True, internal=True)


def grpc_headers(chance: random.Random, kind: str) -> Bad:
    path = chance.choice((
        "/tei.v1.Embed/Nothing", "/nothing", "/", "", "*", "/tei.v1.Embed/Embed", "/tei.v1.Embed/Embed?x", "/\xff\0",
        "/ray.serve.RayServeAPIService/Nothing", "/" + "a" * 7_000, "tei.v1.Embed/Embed",
        "/tei.v1.Embed/../Embed/Embed",
    ))  # fmt: skip
    more = chance.choice((
        (b"model", b"none"), (b"application", b"none"), (b"application", b"\xff"), (b"x-windve-priority", b"\xff"),
        (b"x-request-timeout-ms", b"-1"), (b"x-bin-bin", b"%%%"), (b"Upper", b"case"), (b"x y", b"z"), (b"", b""),
        (b"connection", b"close"), (b":late", b"pseudo"), (b":path", b"/twice"), (b"x", b"a\r\nb: c"), (b"x", b"a\0b"),
        (b"x", b"v" * 9_000), (b"content-type", b"text/html"), (b"transfer-encoding", b"chunked"), (b"host", b"other"),
        (b"content-length", b"99"), (b"te", b"gzip"), (b"multiplexed_model_id", b"\xff"), (b"request_id", b"x" * 3_000),
    ))  # fmt: skip
    headers = frame(HEADERS, END_HEADERS, 1, call(path, more))
    sent = opened(headers, frame(DATA, END_STREAM, 1, message(_field(1, b"a"))))
    return Bad(kind, sent, grpc=True, internal=more[0] == b"x-bin-bin")  # what it holds is no base64


def grpc_frames(chance: random.Random, kind: str) -> Bad:
    """Frames that HTTP/2 forbids, or that are cut off."""
    good = frame(HEADERS, END_HEADERS, 1, call("/tei.v1.Embed/Embed"))
    data = frame(DATA, END_STREAM, 1, message(_field(1, b"a")))
    shapes = (
        opened(good, data)[: chance.randint(1, 200)], opened(data), opened(frame(DATA, 0, 0, b"x")),
        b"GET / HTTP/1.1\r\n\r\n",
        opened(good, frame(DATA, END_STREAM, 1, b"", length=2**24 - 1)),
        opened(frame(HEADERS, END_HEADERS, 2, b"\x82")),
        opened(frame(HEADERS, END_HEADERS, 1, b"\xff" * 50)), opened(frame(HEADERS, 0, 1, b"\x82"), data), PREFACE,
        opened(frame(HEADERS, 0, 1, b"\x82"), *[frame(CONTINUATION, 0, 1, b"\0\1x\1y" * 900)] * 40),
        opened(good, good, data),
        opened(*[frame(PING, 0, 0, bytes(8))] * 500), opened(*[frame(SETTINGS, 0, 0, bytes(6))] * 500),
        opened(frame(PING, 0, 0, b"x")),
        opened(*[at_stream(good, 2 * n + 1) + frame(RST, 0, 2 * n + 1, bytes(4)) for n in range(100)]),
        opened(frame(WINDOW, 0, 0, bytes(4)), good, data),
        opened(frame(SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff"), good, data),
        opened(frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff"), good, data), opened(frame(GOAWAY, 0, 0, bytes(8)), good, data),
        opened(frame(PUSH, END_HEADERS, 1, bytes(4)), good), opened(frame(99, 255, 1, b"?" * 99), good, data),
        chance.randbytes(500),
        opened(frame(PRIORITY, 0, 1, b"\0\0\0\1\0"), good, data), opened(good, frame(DATA, 8, 1, b"\xff"), data),
    )  # fmt: skip
    return Bad(kind, chance.choice(shapes), halves=True, grpc=True)


KINDS: dict[str, Callable[[random.Random, str], Bad]] = {
    "fields": bodies,
    "bodies and what headers say of them": whole_bodies,
    "values of headers": own_headers,
    "many or long headers": many_headers,
    "paths": paths,
    "methods and request lines": methods,
    "smuggling": smuggled,
    "chunks": chunks,
    "lengths that are not kept": lengths,
    "large bodies": large,
    "no HTTP": noise,
    "gRPC: messages": grpc_messages,
    "gRPC: lengths and flags": grpc_prefixes,
    "gRPC: headers": grpc_headers,
    "gRPC: frames": grpc_frames,
}
