"""The part of windve that a C compiler makes when it is installed; without a compiler the rest is installed alone."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "deployments.generation.decode_attention",  # loaded by ctypes: decode_kernel.py
            ["deployments/generation/decode_attention.c"],
            extra_compile_args=["-O3", "-fno-math-errno"],
            libraries=["m"],
            optional=True,
        )
    ]
)
