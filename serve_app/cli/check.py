"""`windve check` reports that a Serve config is valid, or what is wrong with it; with `--devices`, what the device of
this machine computes.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from serve_app.cli.options import add_config, parser_of

_DESCRIPTION = """\
Check a Serve config without starting anything: unknown keys at every level, values out of range, settings that
contradict each other. Names the first bad key and exits with status 1.

With --devices, check this machine's GPU, NPU or CPU instead, in about ten minutes: which forms of each model family are
chosen and why, whether they agree with float32, the speed beside the device's own peak, the latency of a lone query, a
whole service below and above its capacity, steps of generation. Models are small or have random weights, and are made
on the spot; nothing is downloaded. Each part has processes of its own: one that fails is a line of the page."""
_EPILOG = """\
examples:
  windve check my.yaml
  windve check k8s/overlays/gpu/cluster/serve.yaml     for k8s
  windve check --devices                               all parts; writes a page and a JSON into reports/
  windve check --devices --quick                       a taste in about a minute, without the service
  windve check --devices --only peak,encoder           some parts: peak, families, encoder, generation, service

Nobody has run windve on most devices. Please send the JSON, from an NPU above all: docs/limits.md says where."""


def main(words: Sequence[str]) -> int:
    """Returns 1 if a part of `--devices` failed, else 0. Raises SettingsError that names the file, key or option."""
    parser = parser_of("check", _DESCRIPTION, _EPILOG)
    add_config(parser)
    add = parser.add_argument_group("with --devices").add_argument
    add("--devices", action="store_true", help="check this machine's device, not a config")
    add("--device", metavar="NAME", default="auto", help="cuda:1, npu:0, cpu (default: auto, an NPU before a GPU)")
    add("--quick", action="store_true", help="smaller models, shorter, and no service: about a minute")
    add("--only", metavar="PARTS", default="", help="these parts, separated by commas (default: all)")
    add("--out", type=Path, default=Path("reports"), help="folder for device-check.md and .json (default: %(default)s)")
    wanted = parser.parse_args(words)
    if wanted.devices:
        if wanted.config != parser.get_default("config"):
            parser.error("--devices checks no CONFIG: leave one of them out")
        checks = importlib.import_module("calibration.devices.command")
        status: int = checks.check_devices(wanted.device, wanted.only, wanted.out, quick=wanted.quick)
        return status
    if (wanted.device, wanted.quick, wanted.only) != ("auto", False, ""):
        parser.error("--device, --quick and --only need --devices")
    from serve_app.config.service_config import load_config

    load_config(wanted.config)
    print(f"{wanted.config}: good")
    return 0
