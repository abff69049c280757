"""The part of windve that a C compiler makes when it is installed; without a compiler the rest is installed alone."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"deployments.generation.kernels.{name}",  # loaded by ctypes: deployments/generation/kernels/native.py
            [f"deployments/generation/kernels/{name}.c"],
            depends=[f"deployments/generation/kernels/{header}.h" for header in ("vectors", "forms", "multiply")],
            extra_compile_args=["-O3", "-fno-math-errno"],
            libraries=["m"],
            optional=True,
        )
        for name in ("decode_attention", "decode_products", "decode_rows", "prompt_attention", "token_draws")
    ]
)
