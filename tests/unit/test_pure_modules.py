"""Most modules import neither ray nor torch, so that what decides can be read, tested and started without them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITH_RAY = {
    "serve_app.app",
    *(f"serve_app.config.{name}" for name in ("cluster_plan", "serve_deployments", "service_config")),
    *(f"serve_app.{name}" for name in ("embedding.grpc_calls", "ingress")),
    "serve_app.rpc",
    *(f"serve_app.generation.{name}" for name in ("generation_app", "grpc_calls")),
    "deployments.serve_adapter.replica_router",
}
WITH_TORCH = {  # or transformers
    *(f"deployments.engines.{name}" for name in ("cuda_graphs", "graphed_model", "jina_bert", "model_forms")),
    *(f"deployments.engines.{name}" for name in ("packed", "pooled_model", "projection_heads")),
    *(f"deployments.generation.engine.{name}" for name in ("cache", "causal_model")),
    *(f"deployments.generation.engine.{name}" for name in ("causal_stages", "device_sampling")),
    *(
        f"deployments.generation.engine.{name}"
        for name in ("graphed_decoder", "packed_step", "paged_attention", "scoring")
    ),
    *(f"deployments.generation.kernels.{name}" for name in ("decode_kernel", "native", "packed_products")),
    *(f"deployments.generation.kernels.{name}" for name in ("draw_kernel", "prompt_kernel", "row_kernels")),
}
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if found := {"ray", "torch", "transformers"} & sys.modules.keys():
        sys.exit(f"{name} imports {found}")
"""


def test_no_other_module_imports_ray_or_torch():
    paths = [path for folder in ("serve_app", "deployments", "calibration") for path in (ROOT / folder).rglob("*.py")]
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in paths
        if path.name != "__main__.py"
    }
    assert modules >= WITH_RAY | WITH_TORCH
    pure = {name for name in modules - WITH_RAY if not any(f"{name}.".startswith(f"{one}.") for one in WITH_TORCH)}
    command = [sys.executable, "-c", IMPORT_ALL, *sorted(pure)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
