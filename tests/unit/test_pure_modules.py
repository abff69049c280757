"""The pure modules decide; they import neither ray nor torch. Shown in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

PURE = [
    "deployments.affinity",
    "deployments.autoscaling",
    "deployments.device_detector",
    "deployments.engines.emulated",
    "deployments.engines.passes",
    "deployments.errors",
    "deployments.membership",
    "deployments.metrics",
    "deployments.model_files",
    "deployments.pairs",
    "deployments.placement.locality",
    "deployments.placement.view",
    "deployments.pool",
    "deployments.queueing.cost_model",
    "deployments.queueing.fairness",
    "deployments.queueing.learning",
    "deployments.queueing.pacing",
    "deployments.queueing.schedule",
    "deployments.router",
    "deployments.runner",
    "deployments.settings",
    "deployments.sparse",
    "deployments.tokenising",
    "deployments.tokenizer",
    "deployments.transport.channel",
    "deployments.transport.frames",
    "deployments.trial",
    "calibration.cost",
    "calibration.curve",
    "calibration.fine_tune",
    "calibration.instance",
    "calibration.latency_model",
    "calibration.lengths",
    "calibration.levels",
    "calibration.plan",
    "calibration.report_model",
    "calibration.serve_config",
    "serve_app.api_keys",
    "serve_app.grpc_services",
    "serve_app.requests",
]


@pytest.mark.parametrize("module", PURE)
def test_imports_neither_ray_nor_torch(module):
    code = f"import sys, {module}; print([name for name in ('ray', 'torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
