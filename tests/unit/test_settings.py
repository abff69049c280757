import contextlib
import pickle
from pathlib import Path

import pytest
import yaml

import serve_app
from deployments.embedding.config import RouterConfig
from deployments.errors import SettingsError
from deployments.settings import Settings
from serve_app.config.service_config import check_config, load_config

MODEL = {"model": {"id": "x"}}
COST = {"query_s": 0.0, "token_s": 0.001, "token2_s": 0.0}
EMULATED = {"engine": "emulated", "emulated": {"alpha_s": 0.1, "beta_s": 0.2}}


def user_config(raw):
    return RouterConfig.parse(raw, ("cpu",))


BAD_ARGS = [
    (None, "args: missing; set it"),
    ([], "args: should be a mapping of settings, not a list"),
    ({}, "args.model: missing"),
    ({"model": {"id": ""}}, "args.model.id: must not be empty"),
    ({**MODEL, "foo": 1}, "args.foo: there is no such setting"),
    ({**MODEL, True: 1}, "args: YAML reads a key as True: put it in quotes"),
    ({**MODEL, 1.5: 1}, "args: YAML reads a key as 1.5: put it in quotes"),
    ({"model": {"id": "x", "aliases": "y"}}, "args.model.aliases: should be a valid list, not 'y'"),
    ({"model": {"id": "x", "aliases": ["y", ""]}}, "args.model.aliases[1]: must not be empty"),
    ({**MODEL, "cpu": {"cores": "two"}}, "args.cpu.cores: should be 'auto' or a valid integer, not 'two'"),
    ({**MODEL, "cpu": {"cores": 0}}, "args.cpu.cores: should be 'auto' or greater than or equal to 1, not 0"),
    ({**MODEL, "cpu": {"engine": "emulated"}}, "args.cpu: engine: emulated needs"),
    ({**MODEL, "cpu": {"emulated": EMULATED["emulated"]}}, "args.cpu: `emulated` is given but the engine is torch"),
    ({**MODEL, "cpu": EMULATED}, "args: accelerator.engine and cpu.engine: emulated and real engines cannot be mixed"),
    ({**MODEL, "accelerator": {"replicas_per_device": 0}}, "args.accelerator.replicas_per_device: should be greater"),
    (
        {**MODEL, "accelerator": {"device": "cpu", "replicas_per_device": 2}},
        "args.accelerator.replicas_per_device: 2 replicas need an accelerator to share, but device is cpu",
    ),
    (
        {**MODEL, "accelerator": {"replicas_per_device": 2, "device": "none"}},
        "args.accelerator.replicas_per_device: 2 replicas need an accelerator to share, but device is none",
    ),
    ({**MODEL, "accelerator": {"device": "tpu"}}, "args.accelerator.device: should be 'auto', 'npu', 'cuda'"),
    ({**MODEL, "heterogeneous": True}, "args.heterogeneous: there is no such setting"),
    ({**MODEL, "cpu_overflow": "yes"}, "args.cpu_overflow: should be 'auto' or a valid boolean, not 'yes'"),
    ({**MODEL, "traces": {"endpoint": "collector:4317"}}, "args.traces.endpoint: "),
    ({**MODEL, "traces": {"sample_ratio": 2}}, "args.traces.sample_ratio: "),
]
BAD_USER_CONFIGS = [
    (None, "user_config: missing"),
    ({"slo_s": 61}, "user_config.slo_s: 61 s are promised, request_timeout_s gives up after 60 s: raise that as"),
    ({"slo_s": 1, "admission": "depth"}, "user_config.cpu.queue_depth: missing: admission: depth requires one for"),
    ({"slo_s": 1, "admission": "both"}, "user_config.admission: should be 'deadline' or 'depth', not 'both'"),
    ({"slo_s": 1, "cpu": {"cost": COST}}, "user_config.cpu: cost requires alpha_s and beta_s: set them too"),
    ({"slo_s": 1, "cpu": {"alpha_s": 0.1}}, "user_config.cpu: set both alpha_s and beta_s"),
    ({"slo_s": 1, "cpu": {"alpha_s": 0, "beta_s": 1}}, "user_config.cpu.alpha_s: should be greater than 0, not 0"),
    (
        {"slo_s": 1, "cpu": {"alpha_s": 0.1, "beta_s": 1, "cost": dict.fromkeys(COST, 0)}},
        "user_config.cpu.cost: a query would cost nothing: set query_s, token_s or token2_s above 0",
    ),
    ({"slo_s": 1, "cpu": {"queue_depth": -1}}, "user_config.cpu.queue_depth: should be greater than or equal to 0"),
    ({"slo_s": 1, "cpu": {"queue_depth": 1.5}}, "user_config.cpu.queue_depth: should be a valid integer, not 1.5"),
    ({"slo_s": 1, "cpu": {"queue_dept": 1}}, "user_config.cpu.queue_dept: there is no such setting"),
    ({"slo_s": 1, "cpu": {"queue_depth": 0}}, "user_config.cpu.queue_depth: 0 closes a pool, and all pools would be"),
    ({"slo_s": 0, "cpu": {"queue_depth": 1}}, "user_config.slo_s: should be greater than 0, not 0"),
    ({"slo_s": float("nan"), "cpu": {"queue_depth": 1}}, "user_config.slo_s: should be a finite number, not nan"),
]


@pytest.mark.parametrize(
    ("read", "raw", "sentence"),
    [*((Settings.parse, *row) for row in BAD_ARGS), *((user_config, *row) for row in BAD_USER_CONFIGS)],
)
def test_what_is_wrong_is_said_by_its_key(read, raw, sentence):
    with pytest.raises(SettingsError) as caught:
        read(raw)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "pools", [{}, {"cpu": {"alpha_s": 0.1, "beta_s": 0.2, "cost": COST}}, {"accelerator": {"queue_depth": 0}}]
)
def test_by_predicted_finish_a_pool_needs_no_depth(pools):
    config = RouterConfig.parse({"slo_s": 1, **pools}, ("accelerator", "cpu"))
    assert (config.admission, config.pool("cpu").queue_depth) == ("deadline", None)


def test_a_depth_for_a_pool_that_is_not_there_is_fine():
    """One file runs on any machine."""
    config = RouterConfig.parse({"slo_s": 1, "accelerator": {"queue_depth": 9}, "cpu": {"queue_depth": 3}}, ("cpu",))
    assert config.cpu.queue_depth == 3


def test_the_error_survives_the_way_from_a_replica():
    error = pickle.loads(pickle.dumps(SettingsError("a.b", "is wrong")))
    assert (str(error), error.key) == ("a.b: is wrong", "a.b")


@pytest.mark.parametrize("name", ["config.yaml", "rehearsal.yaml", "two_models.yaml"])
def test_shipped_configs_are_good(name):
    load_config(Path(serve_app.__file__).parent / name)


def shipped():
    return yaml.safe_load((Path(serve_app.__file__).parent / "config.yaml").read_text())


@pytest.mark.parametrize("where", [(), ("http_options",), ("applications", 0), ("applications", 0, "deployments", 0)])
def test_keys_that_serve_would_ignore_are_refused(where):
    config = place = shipped()
    for key in where:
        place = place[key]
    place["aplications"] = 1
    with pytest.raises(SettingsError) as caught:
        check_config(config)
    path = "".join(f"[{key}]" if key == 0 else f".{key}" for key in (*where, "aplications")).removeprefix(".")
    hint = "" if where else "; did you mean applications?"
    assert str(caught.value) == f"{path}: is not a setting of Serve, which would ignore it{hint}"


def test_a_config_without_our_application():
    config = shipped()
    config["applications"][0]["import_path"] = "somebody.elses:app"
    with pytest.raises(SettingsError, match="applications: none is a windve application"):
        check_config(config)


@pytest.mark.parametrize(("text", "problem"), [
    (b"a: [", "is not valid YAML"),
    (b"a: \xff", "is not valid YAML"),
    (b"3", "is not a Serve config"),
    (b"applications: [{import_path: [a]}]", "import_path"),
])  # fmt: skip
def test_broken_files(tmp_path, text, problem):
    (tmp_path / "c.yaml").write_bytes(text)
    with pytest.raises(SettingsError, match=problem):
        load_config(tmp_path / "c.yaml")
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(("max_waiting", "max_inputs", "is_refused"), [(99, 100, True), (100, 100, False)])
def test_the_largest_request_may_wait_as_bulk(max_waiting, max_inputs, is_refused):
    config = shipped()
    application = config["applications"][0]
    application["args"]["limits"] = {"max_inputs_per_request": max_inputs}
    application["deployments"][0]["user_config"]["bulk"] = {"max_waiting": max_waiting}
    refusal = pytest.raises(SettingsError, match=r"user_config.bulk.max_waiting: 99 .*limits.max_inputs_per_request")
    with refusal if is_refused else contextlib.nullcontext():
        check_config(config)
