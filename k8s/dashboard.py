"""The Grafana dashboard: `make manifests` writes k8s/base/dashboard.yaml, a ConfigMap that Grafana's sidecar picks up.

`TOP` and `ROWS` define all panels. The tests run each expression in a real Prometheus.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

K8S = Path(__file__).parent
MANIFEST = K8S / "base" / "dashboard.yaml"
GRID = 24  # columns of a Grafana dashboard
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_HEIGHTS = {"stat": 4, "graph": 7, "table": 7}


class Query(NamedTuple):
    expr: str
    legend: str = ""
    # What the metric needs: a GPU that Ray knows, named API keys, generated text, a host with part of the cache, or
    # HAProxy's own metrics; "": nothing, in a service of embeddings.
    needs: Literal["", "gpu", "keys", "text", "host", "haproxy"] = ""


class Panel(NamedTuple):
    """`bad`: the value from which on the panel is red."""

    kind: Literal["stat", "graph", "table"]
    title: str
    about: str
    unit: str  # Grafana's name of the unit
    queries: tuple[Query, ...]
    bad: float | None = None


class Row(NamedTuple):
    title: str
    panels: tuple[Panel, ...]


def _recorded(name: str) -> str:
    """The expression of an alert's recording rule, so that the dashboard works even if Prometheus lacks the rules."""
    groups = yaml.safe_load((K8S / "base" / "alerts.yaml").read_text())["spec"]["groups"]
    exprs: list[str] = [rule["expr"] for group in groups for rule in group["rules"] if rule.get("record") == name]
    (expr,) = exprs
    return f"({expr.strip()})\nand on (application) ray_windve_slo_seconds{{{_APP}}}"


def _rate(counter: str, by: str = "", *, tags: str = "") -> str:
    """The rate of a counter, summed over replicas and their processes, which Ray reports separately."""
    aggregate = f"sum by ({by})" if by else "sum"
    return f"{aggregate} (rate({counter}{{{_APP}{tags}}}[$__rate_interval]))"


def _quantile(q: float, histogram: str, by: str = "") -> str:
    return f"histogram_quantile({q}, {_rate(f'{histogram}_bucket', f'le, {by}' if by else 'le')})"


def _quantiles(histogram: str) -> tuple[Query, Query]:
    return (
        Query(_quantile(0.5, histogram), "p50", needs="text"),
        Query(_quantile(0.99, histogram), "p99", needs="text"),
    )


def _missed(promise: str) -> str:
    """The share of missed promises; 0 if none was missed."""
    promised = _rate(f"ray_windve_{promise}_promised_total")
    return f"({_rate(f'ray_windve_{promise}_missed_total')} or 0 * {promised}) / ({promised} > 0)"


def _gauge(name: str, aggregate: str = "max", by: str = "pool") -> str:
    return f"{aggregate} by ({by}) ({name}{{{_APP}}})"


def _most_of_late(gauge: str) -> str:
    """The maximum over the interval: a queue is sampled, and shrinks at the end of each batch."""
    return f"max_over_time(({gauge})[$__rate_interval:])"


def _of_our_nodes(expr: str) -> str:
    """Restrict Ray's own metrics, which have no application label, to the application's cluster by its session."""
    return f"{expr} and on (SessionName) ray_windve_slo_seconds{{{_APP}}}"


_APP = 'application="$application"'
_OK = _rate("ray_windve_queries_total", tags=',outcome="ok"')
_OK_OF_CPU = _rate("ray_windve_queries_total", tags=',outcome="ok",pool="cpu"')
_BUSY = _rate("ray_windve_queries_total", tags=',outcome="busy"')
_ENDED = _rate("ray_windve_queries_total", tags=',outcome=~"ok|busy"')
_LATE = f"{_rate('ray_windve_slo_missed_total')} / ({_rate('ray_windve_requests_total')} > 0)"
_SLO = f"max(ray_windve_slo_seconds{{{_APP}}})"
_QUEUE = _most_of_late(_gauge("ray_windve_free_seconds", "avg"))
_DEPTH = f"({_gauge('ray_windve_depth')} > 0) * {_gauge('ray_windve_live_replicas')}"  # none where none is set
_IN_FLIGHT = _most_of_late(_gauge("ray_windve_in_flight", "sum"))
_RUNS = _rate("ray_windve_batches_total", "pool")
_AGAINST_PLAN = (
    f"{_rate('ray_windve_batch_seconds_total', 'pool')} / ({_rate('ray_windve_planned_seconds_total', 'pool')} > 0)"
)
_DRIFT = _recorded("windve:drift:ratio_rate15m")
_REPLICAS = 'ray_serve_deployment_replica_healthy{application="$application"'
_KV_USED = _gauge("ray_windve_kv_blocks_used", "sum")
_HOST_USED = _gauge("ray_windve_cpu_blocks_used", "sum")
_AT_DOOR = '{proxy=~"(http|grpc)-$application"}'  # HAProxy's names of an application's Routers
_GPU = "{{ip}} GPU {{GpuIndex}}"

TOP = (
    Panel("stat", "Late or failed", "Share of the requests that the SLO is for; more than 1 % misses it", "percentunit",
          (Query(_LATE),), bad=0.01),
    Panel("stat", "p99 against the SLO", "1 is the SLO", "percentunit",
          (Query(f"{_quantile(0.99, 'ray_windve_request_seconds')} / scalar({_SLO})"),), bad=1.0),
    Panel("stat", "Queue against the SLO", "Seconds of work that the replicas of a pool hold, as a share of the SLO. "
          "At 1 there is no room; more is work that may wait longer", "percentunit",
          (Query(f"{_QUEUE} / scalar({_SLO})", "{{pool}}"),), bad=0.95),
    Panel("stat", "Overflow to the CPU", "Share of the answered queries that the CPU pool answered", "percentunit",
          (Query(f"{_OK_OF_CPU} / ({_OK} > 0)"),)),
    Panel("stat", "Refused", "Share of the queries that were refused because no pool had room", "percentunit",
          (Query(f"{_BUSY} / ({_ENDED} > 0)"),), bad=0.05),
    Panel("stat", "Batches against the calibration", "Time of the engines' batches, as a share of what the calibration "
          "says. Above 1.2 it is no longer true; none without a calibration", "percentunit",
          (Query(_DRIFT, "{{pool}}"),), bad=1.2),
    Panel("graph", "Latency against the SLO", "From arrival to answer; bulk requests aside", "s",
          (Query(_quantile(0.5, "ray_windve_request_seconds"), "p50"),
           Query(_quantile(0.99, "ray_windve_request_seconds"), "p99"),
           Query(_SLO, "SLO"))),
    Panel("graph", "Queue", "Seconds until a replica has done all that it holds; mean of a pool's replicas", "s",
          (Query(_QUEUE, "{{pool}}"), Query(_SLO, "SLO"))),
    Panel("graph", "Answered", "By the pool that did it", "qps",
          (Query(_rate("ray_windve_queries_total", "pool", tags=',outcome="ok"'), "{{pool}}"),)),
    Panel("graph", "Late or failed", "Share of the requests that the SLO is for", "percentunit",
          (Query(_LATE, "late or failed"),)),
    Panel("graph", "Not answered", "busy: refused, no pool had room; error: it failed here; cancelled: the client hung "
          "up, or its deadline has passed or cannot be met; invalid: the client's mistake", "qps",
          (Query(_rate("ray_windve_queries_total", "outcome", tags=',outcome!="ok"'), "{{outcome}}"),)),
    Panel("graph", "Batches against the model", "Actual over planned time of the engines' batches, calibrated or not. "
          "Admission follows it", "percentunit", (Query(_AGAINST_PLAN, "{{pool}}"),)),
)  # fmt: skip

ROWS = (
    Row("Admission", (
        Panel("graph", "At the door", "Requests: waiting in HAProxy for a Router; in the Routers' hands; and how many "
              "more these take", "short",
              (Query(f"sum (haproxy_backend_current_queue{_AT_DOOR})", "waiting", needs="haproxy"),
               Query(f"sum (ray_windve_router_in_hand{{{_APP}}})", "in hand"),
               Query(f"sum (ray_windve_router_free_places{{{_APP}}})", "free"))),
        Panel("graph", "Refused at the door", "By HAProxy, because no Router had a place", "reqps",
              (Query(f"sum (rate(haproxy_backend_requests_denied_total{_AT_DOOR}[$__rate_interval]))", "refused",
                     needs="haproxy"),)),
        Panel("graph", "In flight", "Most of late. Depth x live replicas beside it, where a depth is set: a limit with "
              "admission: depth only", "short",
              (Query(_IN_FLIGHT, "{{pool}}"), Query(_DEPTH, "{{pool}} depth"))),
        Panel("graph", "Refused by the replicas", "Of the queries that Routers sent there. full: no room before the "
              "deadline; never: late on an idle device, too. Another replica may have taken them", "qps",
              (Query(_rate("ray_windve_refusals_total", "pool, reason"), "{{pool}} {{reason}}"),)),
        Panel("graph", "Learned", "Factor: what work takes, as a share of what the model says. Margin: what is added "
              "for its scatter. The largest of a pool's replicas", "percentunit",
              (Query(_gauge("ray_windve_slowdown_ratio"), "{{pool}} slowdown"),
               Query(_gauge("ray_windve_safety_margin_ratio"), "{{pool}} margin"))),
    )),
    Row("Generation", (
        Panel("graph", "First token", "From arrival, against the promise", "s",
              (*_quantiles("ray_windve_time_to_first_token_seconds"), Query(_SLO, "promised"))),
        Panel("graph", "Pace", "Seconds for each token of an answer after its first, against the promise", "s",
              (*_quantiles("ray_windve_time_per_output_token_seconds"),
               Query(f"max(ray_windve_tpot_seconds{{{_APP}}})", "promised", needs="text"))),
        Panel("graph", "Worst gap", "The longest wait within an answer", "s",
              _quantiles("ray_windve_worst_gap_seconds")),
        Panel("graph", "Late", "Share of those that were promised, or failed", "percentunit",
              (Query(_missed("ttft"), "first tokens", needs="text"),
               Query(_missed("tpot"), "paces", needs="text"))),
        Panel("graph", "Tokens", "Of admitted prompts; of answers by the pool that generates them", "tokens/s",
              (Query(_rate("ray_windve_prompt_tokens_total"), "prompts", needs="text"),
               Query(_rate("ray_windve_answer_tokens_total", "pool"), "{{pool}}", needs="text"))),
        Panel("graph", "How answers end", "length: with the most tokens that were asked for; cancelled: the client "
              "hung up", "ops", (Query(_rate("ray_windve_answers_total", "reason"), "{{reason}}", needs="text"),)),
        Panel("graph", "Cache in use", "Blocks of keys and values, of all that there are", "percentunit",
              (Query(f"{_KV_USED} / ({_KV_USED} + {_gauge('ray_windve_kv_blocks_free', 'sum')})", "{{pool}}",
                     needs="text"),
               Query(f"{_HOST_USED} / ({_HOST_USED} + {_gauge('ray_windve_cpu_blocks_free', 'sum')})", "host",
                     needs="host"))),
        Panel("graph", "Steps by mode", "Where a host has a part of the cache. pipelined: it computed answers' "
              "attention beside the accelerator; asynchronous: what it computed joins later steps", "ops",
              (Query(_rate("ray_windve_mode_steps_total", "mode"), "{{mode}}", needs="host"),)),
        Panel("graph", "With the host", "Tokens of accelerator and host, and what the accelerator alone would have "
              "made meanwhile; between them is the gain. Prompts count as the answers' tokens then", "tokens/s",
              (Query(_rate("ray_windve_hybrid_tokens_total"), "accelerator and host", needs="host"),
               Query(_rate("ray_windve_alone_tokens_total"), "accelerator alone", needs="host"),
               Query(_rate("ray_windve_host_tokens_total"), "of the host", needs="host"))),
    )),
    Row("Who uses it", (
        Panel("graph", "Device seconds by key", "A second, of answered queries; keys without a name are not here. "
              "1 is one device all the time", "short",
              (Query(_rate("ray_windve_tenant_device_seconds_total", "tenant"), "{{tenant}}", needs="keys"),)),
        Panel("graph", "Queries by key", "Answered", "qps",
              (Query(_rate("ray_windve_tenant_queries_total", "tenant", tags=',outcome="ok"'), "{{tenant}}",
                     needs="keys"),)),
        Panel("graph", "Refused by key", "busy: there was no room; share: the client asks for more than its share; "
              "quota: it has used up its own", "qps",
              (Query(_rate("ray_windve_tenant_queries_total", "tenant, outcome", tags=',outcome=~"busy|share|quota"'),
                     "{{tenant}} {{outcome}}", needs="keys"),)),
    )),
    Row("Where the time goes", (
        Panel("graph", "Tokenisation", "Of one request", "s", tuple(
            Query(_quantile(q, "ray_windve_tokenization_seconds"), f"p{q * 100:.0f}") for q in (0.5, 0.99))),
        Panel("graph", "Queue", "The longest wait for a device among a request's queries", "s", tuple(
            Query(_quantile(q, "ray_windve_queue_seconds"), f"p{q * 100:.0f}") for q in (0.5, 0.99))),
        Panel("graph", "Inference", "One run of an engine", "s", tuple(
            Query(_quantile(q, "ray_windve_inference_seconds", "pool"), f"{{{{pool}}}} p{q * 100:.0f}")
            for q in (0.5, 0.99))),
    )),
    Row("Batches", (
        Panel("graph", "Queries in a run", "On average", "short",
              (Query(f"{_rate('ray_windve_batched_queries_total', 'pool')} / ({_RUNS} > 0)", "{{pool}}"),)),
        Panel("graph", "Runs", "Of the engines", "ops", (Query(_RUNS, "{{pool}}"),)),
        Panel("graph", "Tokens", "In these", "tokens/s",
              (Query(_rate("ray_windve_tokens_total", "pool"), "{{pool}}"),)),
    )),
    Row("Replicas", (
        Panel("graph", "Live replicas", "That the Routers may send to", "short",
              (Query(_gauge("ray_windve_live_replicas"), "{{pool}}"),)),
        Panel("graph", "Failed runs", "Of the engines", "ops",
              (Query(f"{_rate('ray_windve_failed_batches_total', 'pool')}\nor 0 * {_gauge('ray_windve_live_replicas')}",
                     "{{pool}}"),)),
        Panel("graph", "Replaced replicas", "In the last half hour", "short",
              (Query(f"count by (deployment) (max_over_time({_REPLICAS}}}[30m]))\n"
                     f"- count by (deployment) ({_REPLICAS}}})", "{{deployment}}"),)),
        Panel("table", "What they run", "", "short",
              (Query(_gauge("ray_windve_info", by="pool, model, engine, dtype, version, replica")),)),
    )),
    Row("Hosts", (
        Panel("graph", "Routers", "Share of time in which each was busy; above 0.6 Serve adds one", "percentunit",
              (Query(_gauge("ray_windve_router_busy_ratio", by="replica"), "{{replica}}"),)),
        Panel("graph", "CPU", "Of the whole host", "percent",
              (Query(_of_our_nodes("max by (ip, SessionName) (ray_node_cpu_utilization)"), "{{ip}}"),)),
        Panel("graph", "Memory", "Taken, of what there is", "percentunit",
              (Query(_of_our_nodes("max by (ip, SessionName) (ray_node_mem_used) "
                                   "/ max by (ip, SessionName) (ray_node_mem_total)"), "{{ip}}"),)),
        Panel("graph", "GPU", "NVIDIA's; Ray does not tell of an NPU's", "percent",
              (Query(_of_our_nodes("max by (ip, GpuIndex, SessionName) (ray_node_gpus_utilization)"), _GPU,
                     needs="gpu"),)),
    )),
)  # fmt: skip


def queries() -> Iterator[tuple[str, Query]]:
    """All queries, each with its panel's title."""
    for panels in (TOP, *(row.panels for row in ROWS)):
        for panel in panels:
            for query in panel.queries:
                yield panel.title, query


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model, without values that equal Grafana's defaults."""
    return {
        "uid": "windve",
        "title": "windve",
        "description": "Is the SLO kept? Is there room? Does the CPU help? Who is refused? Is the model true?",
        "tags": ["windve"],
        "schemaVersion": 41,
        "graphTooltip": 1,  # a crosshair on all graphs
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "refresh": "10s",
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"},
                {
                    "type": "query",
                    "name": "application",
                    "label": "Application",
                    "datasource": _DATASOURCE,
                    "query": "label_values(ray_windve_slo_seconds, application)",
                    "refresh": 2,  # when the time range changes
                },
            ]
        },
        "panels": [{"id": identity, **panel} for identity, panel in enumerate(_laid_out(), start=1)],
    }


def _laid_out() -> Iterator[dict[str, Any]]:
    """Lay out the panels: those of a kind share the width, with at most three graphs per line."""
    y = 0
    for title, panels in (("", TOP), *ROWS):
        if title:
            place = {"x": 0, "y": y, "w": GRID, "h": 1}
            yield {"type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []}
            y += 1
        x = 0
        for panel in panels:
            alike = sum(other.kind == panel.kind for other in panels)
            width = GRID // (alike if panel.kind == "stat" else min(alike, 3))
            yield _panel(panel) | {"gridPos": {"x": x, "y": y, "w": width, "h": _HEIGHTS[panel.kind]}}
            x = (x + width) % GRID
            y += 0 if x else _HEIGHTS[panel.kind]
        y += _HEIGHTS[panels[-1].kind] if x else 0


def _panel(panel: Panel) -> dict[str, Any]:
    shown: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any] = {}
    if panel.kind == "stat":
        red = [] if panel.bad is None else [{"value": panel.bad, "color": "red"}]
        shown["thresholds"] = {"mode": "absolute", "steps": [{"value": None, "color": "green"}, *red]}
        shown["noValue"] = "none"
        options["options"] = {"graphMode": "none", "reduceOptions": {"calcs": ["lastNotNull"]}}
    elif panel.kind == "graph":
        shown |= {"min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}}
    else:
        hidden = {"excludeByName": {"Time": True, "Value": True}}
        options["transformations"] = [{"id": "organize", "options": hidden}]
    return {
        "type": {"stat": "stat", "graph": "timeseries", "table": "table"}[panel.kind],
        "title": panel.title,
        **({"description": panel.about} if panel.about else {}),
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": shown, "overrides": []},
        **options,
        "targets": [_target(panel, *each) for each in zip("ABC", panel.queries, strict=False)],
    }


def _target(panel: Panel, letter: str, query: Query) -> dict[str, Any]:
    graph = panel.kind == "graph"  # a single number shows the current value
    return {
        "refId": letter,
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": graph,
        "instant": not graph,
        **({"format": "table"} if panel.kind == "table" else {}),
    }


def manifest() -> str:
    """The ConfigMap as YAML, with one panel per line."""
    board = dashboard()
    panels = ",\n".join(f"      {json.dumps(panel)}" for panel in board.pop("panels"))
    return f"""\
# Generated by `make manifests` from k8s/dashboard.py: change that.
apiVersion: v1
kind: ConfigMap
metadata:
  name: windve-dashboard
  labels:
    app.kubernetes.io/name: windve
    grafana_dashboard: "1"
data:
  windve.json: |
    {json.dumps(board)[:-1]}, "panels": [
{panels}
    ]}}
"""


if __name__ == "__main__":
    MANIFEST.write_text(manifest())
