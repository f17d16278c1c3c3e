"""The shape of a model, and the presets that a config can name."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family: RMSNorm, RoPE, grouped queries, gated MLP."""

    vocab_size: int
    embed_dim: int  # D
    num_layers: int  # N
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # E; need not be D / H
    mlp_dim: int  # F
    max_length: int  # Longest prompt + completion the model was made for, in tokens.
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    dtype: str = "float32"  # Of matmuls and activations; parameters are fp32 whatever it is.
    remat: str = "matmuls"  # "none" | "matmuls" | "full"; see transformer.REMAT.

    def __post_init__(self):
        sizes = ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "mlp_dim", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)}: must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim}: RoPE rotates pairs, make it even")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"model.dtype={self.dtype!r}: one of float32, bfloat16, float16")
        if self.remat not in ("none", "matmuls", "full"):
            raise ValueError(f"model.remat={self.remat!r}: one of none, matmuls, full")

    def replace(self, **changes) -> "ModelConfig":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


# Widths of the presets; the vocabulary comes from the tokenizer.
PRESETS: dict[str, dict[str, int]] = {
    # ~0.11M parameters: the student of the miniature.
    "nano": {
        "embed_dim": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "mlp_dim": 192,
        "max_length": 128,
    },
    # ~0.6M parameters: an external teacher for it.
    "nano_wide": {
        "embed_dim": 128,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "mlp_dim": 320,
        "max_length": 128,
    },
    # The model on which peers were timed: 853k parameters with a vocabulary of 512.
    "peer_tiny": {
        "embed_dim": 128,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "mlp_dim": 384,
        "max_length": 128,
    },
}


def preset(name: str, vocab_size: int, **changes) -> ModelConfig:
    """The ModelConfig of a named preset at a tokenizer's vocabulary size.

    Raises:
      ValueError: there is no such preset.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown model preset {name!r}; one of {', '.join(PRESETS)}")
    return ModelConfig(vocab_size=vocab_size, **{**PRESETS[name], **changes})
