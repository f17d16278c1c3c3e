"""Published figures: what a TPU chip can do, and the shapes of models whose weights are elsewhere.

Sources, of chips: the system pages of cloud.google.com/tpu/docs (v5e, v5p, v6e, tpu7x) and the
table of TPUs in "How to Scale Your Model" (jax-ml.github.io/scaling-book). Of models: the
config.json that each was published with, at huggingface.co/Qwen.
"""

import dataclasses

from opd_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip. Links: what it can send over all of them at once, one way."""

    name: str
    flops: float  # Per second, dense bf16.
    hbm_bandwidth: float  # Bytes per second.
    link_bandwidth: float  # Bytes per second.
    hbm_gib: float  # What the compiler lets a program use: libtpu 0.0.42 says so when it refuses.
    devices: int = 1  # In which jax divides it.

    def per_device(self) -> "Chip":
        """The share of one device; `hbm_gib` is one already."""
        n = self.devices
        return dataclasses.replace(
            self,
            flops=self.flops / n,
            hbm_bandwidth=self.hbm_bandwidth / n,
            link_bandwidth=self.link_bandwidth / n,
            devices=1,
        )


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 197e12, 0.819e12, 4 * 45e9, 15.75),
        Chip("v5p", 459e12, 2.765e12, 6 * 90e9, 95.74),
        Chip("v6e", 918e12, 1.640e12, 4 * 90e9, 31.25),
        Chip("tpu7x", 2307e12, 7.380e12, 6 * 100e9, 94.75, devices=2),
    )
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as v5e:16x16.

    Raises:
      ValueError: the topology names none of CHIPS.
    """
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise ValueError(f"topology={topology!r}: one of {', '.join(CHIPS)}, e.g. v5e:8x8")
    return CHIPS[name]


def _qwen3(width: int, layers: int, heads: int, mlp: int, *, tied: bool, length: int = 40_960):
    return ModelConfig(
        vocab_size=151_936,
        embed_dim=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=mlp,
        max_length=length,
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=tied,
        qk_norm=True,
    )


# By the name of the folder that weights are loaded from.
MODELS = {
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen3-8B": _qwen3(4096, 36, 32, 12_288, tied=False),
    "Qwen3-1.7B-Base": _qwen3(2048, 28, 16, 6144, tied=True, length=32_768),
    "Qwen3-4B-Base": _qwen3(2560, 36, 32, 9728, tied=True, length=32_768),
    "Qwen3-8B-Base": _qwen3(4096, 36, 32, 12_288, tied=False, length=32_768),
}
