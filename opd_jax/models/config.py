"""The shape of a model, and the presets that a config can name."""

import dataclasses
import math

ROPE_SCALINGS = ("linear", "dynamic", "llama3", "yarn")
ACTIVATIONS = ("silu", "gelu_tanh")
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")  # The matrices of a layer.


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How a model's rotary frequencies were stretched to a longer context; see models/rope.py."""

    kind: str  # One of ROPE_SCALINGS.
    factor: float  # Longer by this.
    original_length: int = 0  # Context before it, in tokens; not used by "linear".
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn: queries and keys are both multiplied by it.

    def __post_init__(self):
        if self.kind not in ROPE_SCALINGS:
            raise ValueError(
                f"model.rope_scaling.kind={self.kind!r}: one of {', '.join(ROPE_SCALINGS)}"
            )
        if not self.factor >= 1:
            raise ValueError(f"model.rope_scaling.factor={self.factor}: must be at least 1")
        if self.kind != "linear" and self.original_length < 1:
            raise ValueError(
                f"model.rope_scaling.original_length={self.original_length}: {self.kind} needs the "
                "context before scaling, in tokens"
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"model.rope_scaling.low_freq_factor={self.low_freq_factor} must be positive and "
                f"below high_freq_factor={self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank deltas beside frozen weights: y = W x + (alpha / rank) B A x (arXiv 2106.09685)."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = PROJECTIONS  # Which of a layer's matrices have one.

    def __post_init__(self):
        object.__setattr__(self, "targets", tuple(self.targets))
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank}: must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"lora.alpha={self.alpha}: must be positive")
        unknown = sorted(set(self.targets) - set(PROJECTIONS))
        if unknown or not self.targets:
            raise ValueError(
                f"lora.targets={self.targets}: at least one of {', '.join(PROJECTIONS)}"
            )

    @property
    def scale(self) -> float:
        """Of the delta."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, RoPE, grouped queries, gated MLP.

    The defaults are Llama's. What other families do differently is a field each:

        Mistral          window, local_layers (all)
        Qwen 2, 2.5      qkv_bias
        Qwen 3           qk_norm
        Gemma 2          unit_offset_norm, post_norms, scale_embeddings, activation,
                         query_pre_attn_scalar, attention_softcap, final_softcap, local_layers
        Gemma 3          the same without softcaps, with qk_norm and local_rope_theta
    """

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
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False  # Projections to queries, keys and values add a bias.
    qk_norm: bool = False  # Each head's query and key is normed before it is rotated.
    query_pre_attn_scalar: float | None = None  # Scores are divided by its root; None: head_dim.
    attention_softcap: float | None = None  # Scores s become cap * tanh(s / cap).
    final_softcap: float | None = None  # Logits likewise.
    window: int | None = None  # A query of a local layer sees this many keys, its own the last.
    local_layers: tuple[int, ...] = ()  # The layers, counted from 0, that have the window.
    local_rope_theta: float | None = None  # Their base, not scaled; None: rotated like the others.
    unit_offset_norm: bool = False  # Norms multiply by 1 + weight.
    post_norms: bool = False  # Attention and MLP are normed once more before the residual sum.
    scale_embeddings: bool = False  # Embeddings are multiplied by the root of D.
    activation: str = "silu"  # Of the gate, one of ACTIVATIONS.
    lora: Lora | None = None  # Deltas that are trained in place of the weights; see models/lora.py.
    num_tokens: int | None = (
        None  # Rows from here on are no tokens, see `of_tokens`; None: all are.
    )

    def __post_init__(self):
        # As JSON gives them back out of a checkpoint.
        object.__setattr__(self, "local_layers", tuple(self.local_layers))
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if isinstance(self.lora, dict):
            object.__setattr__(self, "lora", Lora(**self.lora))
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
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"model.activation={self.activation!r}: one of {ACTIVATIONS}")
        for name in ("query_pre_attn_scalar", "attention_softcap", "final_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"model.{name}={value}: must be positive, or None")
        self._check_local_layers()

    def _check_local_layers(self) -> None:
        if not set(self.local_layers) <= set(range(self.num_layers)):
            raise ValueError(
                f"model.local_layers={self.local_layers}: layers are 0..{self.num_layers - 1}"
            )
        if self.local_layers and (self.window is None or self.window < 1):
            raise ValueError(
                f"model.window={self.window}: model.local_layers={self.local_layers} need one of "
                "at least 1 token"
            )
        if self.window is not None and not self.local_layers:
            raise ValueError(f"model.window={self.window}, but model.local_layers is empty")
        scaling = self.rope_scaling
        if self.local_rope_theta is not None:
            if not self.local_layers:
                raise ValueError(
                    f"model.local_rope_theta={self.local_rope_theta}, but model.local_layers is "
                    "empty"
                )
            if scaling is not None and scaling.attention_factor != 1:
                raise ValueError(
                    f"model.local_rope_theta={self.local_rope_theta} with "
                    f"rope_scaling.attention_factor={scaling.attention_factor}: layers with "
                    "attention factors of their own are not implemented"
                )
        if scaling is not None and scaling.kind == "dynamic" and self.head_dim < 4:
            raise ValueError(f"model.head_dim={self.head_dim}: dynamic RoPE needs at least 4")

    @property
    def attention_scale(self) -> float:
        """What scores of queries and keys are multiplied by."""
        scalar = self.query_pre_attn_scalar
        scale = (self.head_dim if scalar is None else scalar) ** -0.5
        factor = 1.0 if self.rope_scaling is None else self.rope_scaling.attention_factor
        return scale * factor**2

    def replace(self, **changes) -> "ModelConfig":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def tokens(self) -> int:
        """Ids that get probability."""
        return self.vocab_size if self.num_tokens is None else self.num_tokens

    def of_tokens(self, count: int) -> "ModelConfig":
        """A copy that gives probability to the first `count` ids of its vocabulary alone.

        The rows beyond pad the table to a round size (Qwen: 151,665 tokens in 151,936 rows): they
        are never sampled and no softmax, top-k or loss sees them, so their values mean nothing.

        Raises:
          ValueError: the model has fewer rows.
        """
        if not 0 < count <= self.vocab_size:
            raise ValueError(f"{count} tokens for a model of {self.vocab_size} rows")
        return self.replace(num_tokens=count if count < self.vocab_size else None)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The attention factor that YaRN recommends (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


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
