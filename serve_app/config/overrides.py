"""What the command line says in place of a Serve config's own values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.errors import SettingsError

_MEASURED = ("alpha_s", "beta_s", "cost", "step_time", "host_time")  # by a calibration, of one model


@dataclass(frozen=True, slots=True)
class Overrides:
    """None: as the file says. `slo_s` in seconds; `port` is HTTP's."""

    model: str | None = None
    slo_s: float | None = None
    host: str | None = None
    port: int | None = None
    grpc_port: int | None = None

    def apply(self, config: dict[str, Any], applications: Sequence[dict[str, Any]]) -> None:
        """Change `config`, of which `applications` are windve's. What in it is no mapping is left for its check.

        Raises SettingsError that names the option which does not fit.
        """
        for section, key, value in (
            ("http_options", "host", self.host),
            ("http_options", "port", self.port),
            ("grpc_options", "port", self.grpc_port),
        ):
            if value is not None:
                config[section] = {**(config.get(section) or {}), key: value}
        for option, is_given in (("--model", self.model is not None), ("--slo", self.slo_s is not None)):
            if is_given and len(applications) != 1:
                raise SettingsError(option, f"the config has {len(applications)} applications: change it there")
        if self.model is not None:
            _set_model(applications[0], self.model)
        if self.slo_s is not None:
            _set_slo(applications[0], self.slo_s)


def _set_model(application: dict[str, Any], model: str) -> None:
    """What the file says of another model goes: its name, its revision, what a calibration measured."""
    args = application.get("args") or {}
    if not isinstance(args, dict):
        return
    if "models" in args:
        raise SettingsError("--model", "the config serves several models: change args.models there")
    before = args.get("model")
    if isinstance(before, dict) and before.get("id") == model:
        return
    application["args"] = {**args, "model": {"id": model}}
    user_config = _user_config(application)
    user_config.pop("calibration", None)
    for pool in ("accelerator", "cpu"):
        if isinstance(said := user_config.get(pool), dict):
            user_config[pool] = {key: value for key, value in said.items() if key not in _MEASURED}


def _set_slo(application: dict[str, Any], slo_s: float) -> None:
    user_config = _user_config(application)
    if "ttft_s" in user_config:
        raise SettingsError("--slo", "this application generates, by ttft_s and tpot_s: change them in the config")
    user_config["slo_s"] = slo_s


def _user_config(application: dict[str, Any]) -> dict[str, Any]:
    """The Router's, to change; made where there is none."""
    deployments = application["deployments"] = list(application.get("deployments") or [])
    router = next((one for one in deployments if one.get("name") == "Router"), None)
    if router is None:
        deployments.append(router := {"name": "Router"})
    if router.get("user_config") is None:
        router["user_config"] = {}
    found = router["user_config"]
    return found if isinstance(found, dict) else {}


NONE = Overrides()
