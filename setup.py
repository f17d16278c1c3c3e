"""Packaging of opd_jax. Floors only: Python 3.11 ends at jax 0.10, Python 3.12 goes on to 0.12."""

from setuptools import find_packages, setup

CONVERT = ["gguf>=0.10", "peft>=0.17", "transformers>=4.56", "torch>=2.4"]
MATH = ["math-verify>=0.9"]
REASONING = ["reasoning-gym>=0.1.25"]
TEST = ["gguf>=0.10", "pytest>=8", "pytest-xdist>=3.5", "ruff>=0.9", *MATH, *REASONING]

setup(
    name="opd_jax",
    version="0.1.0",
    description="GRPO and on-policy distillation of language models in JAX/Flax, FLOPs counted.",
    license="Apache-2.0",
    packages=find_packages(include=["opd_jax", "opd_jax.*"]),
    package_data={"opd_jax.data": ["*.model"]},
    python_requires=">=3.11",
    install_requires=[
        "absl-py>=2.1",
        "array_record>=0.5",
        "etils[epath]>=1.9",
        "flax>=0.12.4",
        "grain>=0.2.12",
        "jax>=0.10",
        "jinja2>=3.1",
        "matplotlib>=3.9",
        "ml_collections>=1.0",
        "numpy>=2.0",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.12",
        "protobuf>=4.25",
        "safetensors>=0.4.5",
        "sentencepiece>=0.2",
        "tensorboardX>=2.6",
        "tensorflow-datasets>=4.9.8",
        "tokenizers>=0.20",
    ],
    extras_require={
        "tpu": ["jax[tpu]>=0.10"],
        "aot": ["jax[tpu]>=0.10"],  # The TPU compiler, on a machine without TPUs: tools/aot.py.
        "gpu": ["jax[cuda13]>=0.10"],
        "test": TEST,
        "math": MATH,
        "convert": CONVERT,
        "reasoning": REASONING,
    },
)
