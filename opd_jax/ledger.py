"""The ledger: exact training FLOPs, by phase.

A multiply-add counts 2. Matmuls and attention products are counted, all else (norms, softmax,
rotary, sampling noise) is not: it is under 1% at any real width. Attention is causal and exact: a
query that sees t keys costs 4 * H * E * t in a layer; a local layer's query sees at most its window
(masked products beyond it that the machine may make are no model FLOPs). The unembedding, tied or
not, is counted at the positions where it runs; the embedding lookup costs nothing. Biases, norms of
any kind, softcaps and activations are among what is not counted.

What is executed once is counted once: a prompt's forward pass serves all its samples, in sampling,
in scoring and in the update. Lengths are the real ones: padding and rows that wait for others to
stop are the machine's business, not the method's.

    prefill          each unique prompt, and one unembedding for its first token
    decode           every completion token but the last runs once, each with an unembedding
    teacher_score    one forward of the teacher over prompts and completions
    reference_score  the same for a reference model
    old_logprob      the same for the behaviour policy, where it is recomputed
    update           three forwards of the student (forward, and two for the backward pass); of a
                     matrix that is frozen two, since it has no gradient of its own
    generation       rollouts of another model that are trained on (cold start)
    discarded        sampling whose rows were thrown away, moved here from the phases above
    evaluation       apart: not part of the cost of training
    remat            aside: what the backward pass computes again; hardware, not model FLOPs

Source: the conventions of NeMo-RL and PaLM's appendix B, with the real head size and causal halves.
"""

import dataclasses
import math

import numpy as np

from opd_jax.models.config import ModelConfig

TRAINING = (
    "prefill",
    "decode",
    "teacher_score",
    "reference_score",
    "old_logprob",
    "update",
    "generation",
    "discarded",
)
ASIDE = ("evaluation", "remat")


@dataclasses.dataclass
class Ledger:
    """Cumulative FLOPs by phase of one stage, in floats: exact to 2**53, then to 16 digits."""

    flops: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(TRAINING + ASIDE, 0.0)
    )

    def add(self, phase: str, flops: float) -> None:
        """Books FLOPs under a phase.

        Raises:
          ValueError: there is no such phase.
        """
        if phase not in self.flops:
            raise ValueError(f"unknown ledger phase {phase!r}; one of {', '.join(self.flops)}")
        self.flops[phase] += float(flops)

    def discard(self, phase: str, flops: float) -> None:
        """Moves FLOPs that were booked under `phase` to `discarded`; the total stays."""
        self.add(phase, -flops)
        self.add("discarded", flops)

    @property
    def total(self) -> float:
        """Training FLOPs of all phases; evaluation and recomputation are not training cost."""
        return sum(self.flops[phase] for phase in TRAINING)

    def state(self) -> dict[str, float]:
        """For the checkpoint."""
        return dict(self.flops)

    def restore(self, state: dict[str, float]) -> None:
        """Goes on from a checkpoint."""
        self.flops = dict.fromkeys(TRAINING + ASIDE, 0.0) | state


def weights_per_token(c: ModelConfig) -> int:
    """Projections and gated MLP of all layers, one token, one forward; deltas left out."""
    attention = 2 * c.embed_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return c.num_layers * (attention + 6 * c.embed_dim * c.mlp_dim)


def deltas_per_token(c: ModelConfig) -> int:
    """The low-rank deltas of all layers, one token, one forward: rank times the two widths each."""
    if c.lora is None:
        return 0
    D, F, heads, kv_heads = (
        c.embed_dim, c.mlp_dim, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim,
    )  # fmt: skip
    widths = {"q": D + heads, "k": D + kv_heads, "v": D + kv_heads, "o": heads + D,
              "gate": D + F, "up": D + F, "down": F + D}  # fmt: skip
    return c.num_layers * 2 * c.lora.rank * sum(widths[target] for target in c.lora.targets)


def linear_per_token(c: ModelConfig) -> int:
    """All that a token costs in the layers whatever its context, one forward."""
    return weights_per_token(c) + deltas_per_token(c)


def head_per_token(c: ModelConfig) -> int:
    """The unembedding at one position."""
    return 2 * c.embed_dim * c.vocab_size


def blocks(c: ModelConfig, before: np.ndarray, count: np.ndarray) -> float:
    """One forward of the layers over `count` tokens that each follow `before` earlier ones.

    Token i of a run (from 1) sees `before + i` keys, itself included.

    Args:
      c: the model.
      before: tokens already in context, per sequence.
      count: tokens run, per sequence.
    """
    before, count = np.asarray(before, np.float64), np.asarray(count, np.float64)
    keys = (c.num_layers - len(c.local_layers)) * _keys_seen(before, count, math.inf)
    if c.local_layers:
        keys += len(c.local_layers) * _keys_seen(before, count, c.window)
    per_key = 4 * c.num_heads * c.head_dim
    return float(np.sum(count) * linear_per_token(c) + np.sum(keys) * per_key)


def _keys_seen(before: np.ndarray, count: np.ndarray, window: float) -> np.ndarray:
    """Keys that `count` tokens see in one layer, none of them more than its window.

    Example: 2 tokens before, 3 run -> 3 + 4 + 5; with a window of 4 -> 3 + 4 + 4.
    """

    def of_first(n):
        growing = np.minimum(n, window)
        beyond = n - growing
        # 0 * inf is not a number: without a window nothing is beyond it.
        return growing * (growing + 1) / 2 + beyond * np.where(beyond > 0, window, 0)

    return of_first(before + count) - of_first(before)


def prefill(c: ModelConfig, prompt_P: np.ndarray) -> float:
    """Each prompt of `prompt_P` tokens once, and one unembedding each."""
    return blocks(c, np.zeros_like(prompt_P), prompt_P) + len(prompt_P) * head_per_token(c)


def decode(c: ModelConfig, prompt_B: np.ndarray, length_B: np.ndarray) -> float:
    """Completions of `length_B` tokens: all but the last run, and each predicts one more."""
    run_B = np.maximum(np.asarray(length_B) - 1, 0)
    return blocks(c, prompt_B, run_B) + float(np.sum(run_B)) * head_per_token(c)


def score(c: ModelConfig, prompt_P: np.ndarray, length_B: np.ndarray) -> float:
    """One forward over prompts (once each) and completions, unembedding every completion token.

    Args:
      c: the model that scores.
      prompt_P: prompt lengths; rows are prompt-major, as everywhere.
      length_B: completion lengths, B a multiple of P.
    """
    length_B = np.asarray(length_B)
    prompt_B = np.repeat(prompt_P, len(length_B) // len(prompt_P))
    run_B = np.maximum(length_B - 1, 0)
    layers = blocks(c, np.zeros_like(prompt_P), prompt_P) + blocks(c, prompt_B, run_B)
    return layers + float(np.sum(length_B)) * head_per_token(c)


def update(c: ModelConfig, prompt_P: np.ndarray, length_B: np.ndarray) -> float:
    """Forward and backward of the student: three times its score, less what frozen weights save.

    With deltas, gradients still go through every layer down to the first one's input, as they do
    in a scan of layers.
    """
    whole = 3 * score(c, prompt_P, length_B)
    if c.lora is None:
        return whole
    run = float(np.sum(prompt_P) + np.sum(np.maximum(np.asarray(length_B) - 1, 0)))
    frozen = run * weights_per_token(c) + float(np.sum(length_B)) * head_per_token(c)
    return whole - frozen


def remat(c: ModelConfig, prompt_P: np.ndarray, length_B: np.ndarray) -> float:
    """What a full rematerialisation of the layers adds: one more forward of them.

    The scorer computes a tile's logits again as well, where there is more than one; not counted.
    """
    if c.remat != "full":
        return 0.0
    heads = float(np.sum(length_B)) * head_per_token(c)
    return score(c, prompt_P, length_B) - heads
