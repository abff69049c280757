"""Command-line options that override values of a Serve config. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.errors import SettingsError

_MEASURED = ("alpha_s", "beta_s", "cost", "step_time", "host_time")  # by a calibration of one model


@dataclass(frozen=True, slots=True)
class Overrides:
    """None keeps the file's value. `port`: HTTP's."""

    model: str | None = None
    slo_s: float | None = None
    host: str | None = None
    port: int | None = None
    grpc_port: int | None = None

    def apply(self, config: dict[str, Any], applications: Sequence[dict[str, Any]]) -> None:
        """Change `config` in place; `applications` are the windve applications in it. Values of the wrong type are
        left for `check_config` to refuse. Raises SettingsError that names the option that does not fit.
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
                raise SettingsError(option, f"the config has {len(applications)} applications: set it there")
        if self.model is not None:
            _set_model(applications[0], self.model)
        if self.slo_s is not None:
            _set_slo(applications[0], self.slo_s)


def _set_model(application: dict[str, Any], model: str) -> None:
    """Replace the model, and drop what belonged to the old one: name, revision, calibrated values."""
    args = application.get("args") or {}
    if not isinstance(args, dict):
        return
    if "models" in args:
        raise SettingsError("--model", "the config serves several models: set args.models there")
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
        raise SettingsError("--slo", "this application generates: set ttft_s and tpot_s in the config instead")
    user_config["slo_s"] = slo_s


def _user_config(application: dict[str, Any]) -> dict[str, Any]:
    """The Router's `user_config`, to be changed in place; created if there is none."""
    deployments = application["deployments"] = list(application.get("deployments") or [])
    router = next((one for one in deployments if one.get("name") == "Router"), None)
    if router is None:
        deployments.append(router := {"name": "Router"})
    if router.get("user_config") is None:
        router["user_config"] = {}
    found = router["user_config"]
    return found if isinstance(found, dict) else {}


NONE = Overrides()
