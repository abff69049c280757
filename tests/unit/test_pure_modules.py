"""The pure modules decide; they import neither ray nor torch. Shown in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

PURE = [
    "deployments.hardware.affinity",
    "deployments.serve_adapter.autoscaling",
    "deployments.hardware.device_detector",
    "deployments.engines.emulated",
    "deployments.engines.passes",
    "deployments.errors",
    "deployments.generation.asked",
    "deployments.generation.blocks",
    "deployments.generation.chunk",
    "deployments.generation.generation_card",
    "deployments.generation.generation_metrics",
    "deployments.generation.sampling",
    "deployments.generation.step_forecast",
    "deployments.generation.step_schedule",
    "deployments.generation.step_time",
    "deployments.generation.text_stream",
    "deployments.serve_adapter.membership",
    "deployments.metrics",
    "deployments.models.judges",
    "deployments.models.kept_file",
    "deployments.models.late",
    "deployments.models.model_files",
    "deployments.models.model_folder",
    "deployments.models.model_kind",
    "deployments.models.modules",
    "deployments.models.outputs",
    "deployments.models.own_tokenizer",
    "deployments.models.pairs",
    "deployments.models.pickles",
    "deployments.models.published",
    "deployments.models.projections",
    "deployments.placement.locality",
    "deployments.placement.view",
    "deployments.placement.bulk",
    "deployments.placement.link",
    "deployments.placement.placer",
    "deployments.placement.pool",
    "deployments.placement.request",
    "deployments.queueing.cost_model",
    "deployments.queueing.fairness",
    "deployments.queueing.learning",
    "deployments.queueing.pacing",
    "deployments.queueing.schedule",
    "deployments.router",
    "deployments.runner",
    "deployments.settings",
    "deployments.models.encoder",
    "deployments.models.sparse",
    "deployments.models.tokenising",
    "deployments.models.tokenizer",
    "deployments.models.tokenizer_files",
    "deployments.models.true_tokens",
    "deployments.models.unpickle",
    "deployments.models.weights",
    "deployments.transport.channel",
    "deployments.transport.frames",
    "deployments.trial",
    "calibration.planning.cost",
    "calibration.fit.curve",
    "calibration.prove.fine_tune",
    "calibration.planning.instance",
    "calibration.fit.latency_model",
    "calibration.fit.lengths",
    "calibration.fit.levels",
    "calibration.planning.plan",
    "calibration.report.report_model",
    "calibration.service.serve_config",
    "calibration.service.yaml_text",
    "serve_app.access_log",
    "serve_app.api_keys",
    "serve_app.grpc_services",
    "serve_app.models_api",
    "serve_app.observer",
    "serve_app.requests",
    "serve_app.several_models",
    "serve_app.tracer",
]


@pytest.mark.parametrize("module", PURE)
def test_imports_neither_ray_nor_torch(module):
    code = f"import sys, {module}; print([name for name in ('ray', 'torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
