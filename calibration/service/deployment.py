"""Deploys a Serve config on a cluster that serves nothing yet, for a calibration on dedicated devices."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibration.service.application import CalibrationFailed, deploy_config, serve_details
from deployments.errors import SettingsError
from serve_app.local.serve import first_reason

_START_TIMEOUT_S = 1800.0  # enough for a large model from a slow disk or hub
_POLL_S = 0.5


def deploy(path: Path, dashboard: str) -> None:
    """Deploy the Serve config `path` at `dashboard` and wait until all of its applications run.

    Raises SettingsError if the config is invalid or the cluster already serves something else, CalibrationFailed if it
    does not start.
    """
    from serve_app.config.service_config import load_config

    config = for_the_devices_there(load_config(path))
    wanted = {application.get("name", "default"): application.get("args") for application in config["applications"]}
    there = serve_details(dashboard)["applications"]
    found = {name: ((about or {}).get("deployed_app_config") or {}).get("args") for name, about in there.items()}
    if there and found != wanted:
        raise SettingsError(
            "--deploy", f"the cluster already serves {', '.join(there)}: leave out --deploy to calibrate that"
        )
    if not there:  # else by a run of the same command that was interrupted
        deploy_config(dashboard, config)
    names = set(wanted)
    ends = time.monotonic() + _START_TIMEOUT_S
    while not all_run(serve_details(dashboard)["applications"], names):
        if time.monotonic() > ends:
            raise CalibrationFailed(f"the application did not start within {_START_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def for_the_devices_there(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with one replica per device of the cluster. Depths are per replica, so fewer devices are enough."""
    changed = copy.deepcopy(dict(config))
    for application in changed["applications"]:
        args = application.get("args") or {}
        for settings in (args, *args.get("models", ())):
            for pool in ("accelerator", "cpu"):
                (settings.get(pool) or {}).pop("replicas", None)
    return changed


def all_run(applications: Mapping[str, Any], names: set[str]) -> bool:
    """Whether all named applications are RUNNING, by Serve's details. Raises CalibrationFailed if one has failed."""
    for name in sorted(names & applications.keys()):
        found = applications[name]
        if found["status"] == "DEPLOY_FAILED":
            details = [about.get("message") or "" for about in (found, *(found.get("deployments") or {}).values())]
            raise CalibrationFailed(f"{name} did not start: {first_reason(details)}")
    return all(applications.get(name, {}).get("status") == "RUNNING" for name in names)
