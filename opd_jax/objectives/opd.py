"""On-policy distillation: what the teacher says about the student's own tokens.

The objective (Thinking Machines 2025; "Rethinking OPD", 2604.13016 sec. 2), with p the student,
q the teacher and y sampled from the student:

    L = E_y Σ_t KL(p_t || q_t),        p_t = p(. | x, y_<t),   q_t = q(. | x, y_<t)

Three ways to compute its per-position gradient, from cheap and noisy to exact:

    sampled token   `sampled_token_advantage` with `grpo.policy_gradient_terms`
    top-k           `topk_reverse_kl` on the student's k likeliest tokens
    all tokens      `reverse_kl` and its relatives on the logits of both models

All three hold the prefix y_<t fixed: that a token also changes the later prefixes is ignored
(discount 0). Gradients flow through the student only.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct

from opd_jax.objectives.estimators import check_same_shape, choose

# Stands for log 0. exp(-1000) is exactly 0 in fp32, so a token without probability contributes
# 0 · finite = 0; a token the teacher excludes costs 1000 nats instead of infinity.
LOG_FLOOR = -1000.0

# 1 - Σ_k p is not known better than this in fp32; a rest below it is treated as equal to it.
REST_FLOOR = 1e-6


# The sampled token.


def sampled_token_advantage(
    teacher_logp_BR: jax.Array, behaviour_logp_BR: jax.Array, *, limit: float | None = None
) -> jax.Array:
    """A_t = sg[log q(y_t) - log p(y_t)], the negative one-sample estimate of KL(p_t || q_t).

    With `grpo.policy_gradient_terms` the expected gradient is ∇ KL(p_t || q_t). The log-ratio
    itself, differentiated as a loss, has expected gradient 0: hence the stop-gradient.

    Args:
      teacher_logp_BR: log q of the sampled tokens, same columns and same temperature as the
        student's. Teacher equal to student gives 0 everywhere: a check worth making at start-up.
      behaviour_logp_BR: log p of the same tokens as the sampler stored them.
      limit: clamps the advantage to ±limit nats; None for no clamp. A clamp biases the gradient.

    Raises:
      ValueError: the shapes differ, or the limit is not positive.
    """
    check_same_shape(teacher_logp_BR=teacher_logp_BR, behaviour_logp_BR=behaviour_logp_BR)
    if limit is not None and not limit > 0:
        raise ValueError(f"limit={limit}: must be positive (nats), or None for no clamp")
    advantage_BR = jax.lax.stop_gradient(teacher_logp_BR - behaviour_logp_BR)
    return advantage_BR if limit is None else jnp.clip(advantage_BR, -limit, limit)


def extrapolated_advantage(
    teacher_logp_BR: jax.Array,
    behaviour_logp_BR: jax.Array,
    reference_logp_BR: jax.Array,
    *,
    strength: float,
) -> jax.Array:
    """G-OPD (2602.12125): A_t = sg[λ (log q - log r) - (log p - log r)], λ = `strength`.

    λ = 1 is `sampled_token_advantage`, whatever the reference r. λ > 1 goes past the teacher: the
    best policy is log p = λ log q + (1 - λ) log r + const. r is the student's start, or the model
    the teacher was trained from.

    Raises:
      ValueError: the shapes differ.
    """
    check_same_shape(
        teacher_logp_BR=teacher_logp_BR,
        behaviour_logp_BR=behaviour_logp_BR,
        reference_logp_BR=reference_logp_BR,
    )
    target_logp_BR = reference_logp_BR + strength * (teacher_logp_BR - reference_logp_BR)
    return jax.lax.stop_gradient(target_logp_BR - behaviour_logp_BR)


# The whole vocabulary: sums over the last axis only, so it may be sharded.
#
# Gradients are written out instead of left to autodiff, so that they are 0, not rounding noise,
# where both models agree: Adam divides by the size of what it has seen, and walks at full speed
# through gradients of 1e-8 as through any others.


def log_probs(logits: jax.Array) -> jax.Array:
    """log softmax over the last axis in fp32, never below LOG_FLOOR."""
    return jnp.maximum(jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1), LOG_FLOOR)


def entropy(logits: jax.Array) -> jax.Array:
    """H(p) = -Σ_v p log p over the last axis, in nats; logits may be -inf."""
    logp = log_probs(logits)
    return -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def entropy_gap(student_entropy: jax.Array, teacher_entropy: jax.Array) -> jax.Array:
    """|H(q_t) - H(p_t)| per position, full-vocabulary entropies (2604.13016 eq. 8)."""
    check_same_shape(student_entropy=student_entropy, teacher_entropy=teacher_entropy)
    return jnp.abs(teacher_entropy - student_entropy)


def reverse_kl(student_logits: jax.Array, teacher_logits: jax.Array) -> jax.Array:
    """KL(p || q) = Σ_v p (log p - log q): the expectation of the sampled-token loss.

    Args:
      student_logits: [..., V], divided by the temperature if there is one; -inf for tokens that
        are excluded.
      teacher_logits: [..., V] over the same vocabulary; no gradient flows to them.

    Returns:
      fp32 [...], nats, one value per position; finite, with finite gradients, also where p or q
      is 0 (see LOG_FLOOR).

    Raises:
      ValueError: the shapes differ.
    """
    return _reverse_kl(*_both(student_logits, teacher_logits))


def forward_kl(student_logits: jax.Array, teacher_logits: jax.Array) -> jax.Array:
    """KL(q || p) = Σ_v q (log q - log p): cross-entropy to the teacher less its entropy.

    Args, result and errors as in `reverse_kl`.
    """
    student_logp, teacher_logp = _both(student_logits, teacher_logits)
    slope = jnp.exp(student_logp) - jnp.exp(teacher_logp)
    return _with_slope(_kl(teacher_logp, student_logp), slope, student_logp)


def jsd(student_logits: jax.Array, teacher_logits: jax.Array, beta: float) -> jax.Array:
    """Generalised Jensen-Shannon divergence of GKD (2306.13649), in TRL's convention.

        D_β = β KL(q || m) + (1 - β) KL(p || m),      m = β q + (1 - β) p

    With these weights D_β itself vanishes at both ends: D_β / β → KL(q || p) as β → 0, and
    D_β / (1 - β) → KL(p || q) as β → 1. As in TRL, β = 0 IS the forward KL and β = 1 the reverse
    KL, so the value jumps there, and close to an end the gradient is small for no good reason.

    Args:
      student_logits: as in `reverse_kl`, as are teacher_logits, result and errors.
      teacher_logits: see there.
      beta: in [0, 1], a Python number; 0.5 is the usual, symmetric one.

    Raises:
      ValueError: beta outside [0, 1].
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta}: must be in [0, 1] (0 forward KL, 1 reverse KL)")
    if beta == 0:
        return forward_kl(student_logits, teacher_logits)
    if beta == 1:
        return reverse_kl(student_logits, teacher_logits)
    student_logp, teacher_logp = _both(student_logits, teacher_logits)
    p, q = jnp.exp(student_logp), jnp.exp(teacher_logp)
    gap = teacher_logp - student_logp
    above = jnp.logaddexp(gap + math.log(beta), jnp.float32(math.log1p(-beta)))  # log m - log p.
    student_kl = -jnp.sum(p * above, axis=-1)
    value = beta * jnp.sum(q * (gap - above), axis=-1) + (1 - beta) * student_kl
    slope = (beta - 1) * p * (above + student_kl[..., None])
    return _with_slope(value, slope, student_logp)


def _kl(a_logp: jax.Array, b_logp: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(a_logp) * (a_logp - b_logp), axis=-1)


def _reverse_kl(student_logp: jax.Array, teacher_logp: jax.Array) -> jax.Array:
    """KL(p || q) of normalised log-probs: its gradient is p (log p - log q - KL) per logit."""
    value = _kl(student_logp, teacher_logp)
    slope = jnp.exp(student_logp) * (student_logp - teacher_logp - value[..., None])
    return _with_slope(value, slope, student_logp)


def _with_slope(value: jax.Array, slope: jax.Array, logp: jax.Array) -> jax.Array:
    """`value`, whose gradient for the logits behind `logp = log softmax` is `slope`.

    A slope sums to 0 over the vocabulary, as every gradient for logits does, so that log softmax
    passes it on as it is. Only first derivatives are right.
    """
    flow = jnp.sum(jax.lax.stop_gradient(slope) * logp, axis=-1)
    return jax.lax.stop_gradient(value) + (flow - jax.lax.stop_gradient(flow))


def _both(student_logits: jax.Array, teacher_logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    check_same_shape(student_logits=student_logits, teacher_logits=teacher_logits)
    return log_probs(student_logits), jax.lax.stop_gradient(log_probs(teacher_logits))


# A few tokens: both models' full-vocabulary log-probs at one list of ids per position.


def _renormalised(student_logp_k: jax.Array, teacher_logp_k: jax.Array) -> jax.Array:
    return _reverse_kl(_normalise(student_logp_k), _normalise(teacher_logp_k))


def _tail_bucket(student_logp_k: jax.Array, teacher_logp_k: jax.Array) -> jax.Array:
    student_rest, teacher_rest = _log_rest(student_logp_k), _log_rest(teacher_logp_k)
    tail = jnp.exp(student_rest) * (student_rest - teacher_rest)
    return _kl(student_logp_k, teacher_logp_k) + tail


def _without_baseline(student_logp_k: jax.Array, teacher_logp_k: jax.Array) -> jax.Array:
    stop = jax.lax.stop_gradient
    cost_k = stop(jnp.exp(_normalise(student_logp_k)) * (student_logp_k - teacher_logp_k))
    return jnp.sum(cost_k * jnp.exp(student_logp_k - stop(student_logp_k)), axis=-1)


TOPK_MODES = {
    "renormalised": _renormalised,
    "tail_bucket": _tail_bucket,
    "without_baseline": _without_baseline,
}


def topk_reverse_kl(
    student_logp_k: jax.Array,
    teacher_logp_k: jax.Array,
    *,
    mode: str,
    support_k: jax.Array | None = None,
) -> jax.Array:
    """Reverse KL on k tokens per position, S = the student's top-k (2604.13016: k = 16).

    With d(v) = log p(v) - log q(v), P and Q the masses of S, and pbar = p / P, qbar = q / Q on S:

        renormalised       KL(pbar || qbar), the paper's form. Blind to the rest: mass may leave
                           S unseen as long as the proportions on S stay right.
        tail_bucket        Σ_S p d + (1 - P) log((1 - P) / (1 - Q)): all other tokens are one. At
                           most the full KL, at least 0, and 0 only if all k + 1 masses agree.
        without_baseline   the gradient of the code published with the paper, Σ_S pbar d ∇log p;
                           its value is Σ_S pbar d. The exact gradient of "renormalised" is
                           Σ_S pbar (d - b) ∇log p with b = Σ_S pbar d, so this one adds
                           b ∇log P: where b > 0, each step also pushes mass out of S.

    Args:
      student_logp_k: [..., k] log-probs over the whole vocabulary. Choose the ids from
        stop-gradient values; the gradient flows through their log-probs only.
      teacher_logp_k: the teacher's log-probs at the same ids; no gradient flows to them.
      mode: a key of TOPK_MODES.
      support_k: bool, entries that belong to S; None for all k. For the support ablation: `is_in`
        gives "overlap only" on the student's list, and "non-overlap" on both lists side by side.
        A position without any entry gives 0 ("tail_bucket": about 0).

    Returns:
      fp32 [...], nats per position.

    Raises:
      ValueError: unknown mode, or the shapes differ: a teacher that returned fewer entries than
        the student has.
    """
    value = choose(TOPK_MODES, mode, "top-k mode")
    check_same_shape(student_logp_k=student_logp_k, teacher_logp_k=teacher_logp_k)
    student_logp_k = _on(support_k, student_logp_k)
    return value(student_logp_k, jax.lax.stop_gradient(_on(support_k, teacher_logp_k)))


def check_top_k(logp_k: jax.Array, k: int, who: str) -> None:
    """Start-up check, outside jit, that a source of top-k log-probs delivers k real entries.

    Args:
      logp_k: [..., k] concrete log-probs.
      k: entries asked for.
      who: the source's name, for the message.

    Raises:
      ValueError: fewer entries, or entries that are -inf fill.
    """
    got = int(jnp.min(jnp.sum(jnp.isfinite(logp_k), axis=-1))) if logp_k.size else 0
    if got < k or logp_k.shape[-1] != k:
        raise ValueError(
            f"{who}: asked for the top {k} log-probs, got {got} in {logp_k.shape[-1]} columns; "
            f"lower k to {got} or use a source without that cap"
        )


def _on(support_k: jax.Array | None, logp_k: jax.Array) -> jax.Array:
    """Entries outside the support have no probability; if none is inside, all are alike."""
    logp_k = jnp.maximum(logp_k, LOG_FLOOR)
    if support_k is None:
        return logp_k
    check_same_shape(support_k=support_k, logp_k=logp_k)
    return jnp.where(support_k, logp_k, LOG_FLOOR)


def _normalise(logp_k: jax.Array) -> jax.Array:
    return logp_k - jax.nn.logsumexp(logp_k, axis=-1, keepdims=True)


def _log_rest(logp_k: jax.Array) -> jax.Array:
    """log(1 - Σ p), floored: rounding must not make a mass of 0 negative."""
    return jnp.log(jnp.maximum(1 - jnp.sum(jnp.exp(logp_k), axis=-1), REST_FLOOR))


# Diagnostics: how much the two models' top-k lists have in common.


@struct.dataclass
class Overlap:
    """Per-position results of `overlap`; fp32, all of the positions' shape."""

    ratio: jax.Array  # |I| / k (eq. 6).
    advantage: jax.Array  # 1/|I| Σ_I pbar (log qbar - log pbar), never above 0 (eq. 7).
    mass_student: jax.Array  # Σ_I p (eq. 9).
    mass_teacher: jax.Array  # Σ_I q (eq. 10).
    size: jax.Array  # |I|.


def is_in(ids_k: jax.Array, other_ids_k: jax.Array) -> jax.Array:
    """Whether each id of one list occurs in the other: bool, the shape of `ids_k`.

    E.g. [3, 1, 4] in [1, 5, 3] gives [True, True, False].
    """
    return jnp.any(_matches(ids_k, other_ids_k), axis=-1)


def overlap(
    student_ids_k: jax.Array,
    student_logp_k: jax.Array,
    teacher_ids_k: jax.Array,
    teacher_logp_k: jax.Array,
) -> Overlap:
    """The dynamics metrics of 2604.13016, eq. 6, 7, 9, 10 (k = 16), before the mean over positions.

    I = TopK(p) ∩ TopK(q) at one position, pbar and qbar renormalised on I. Read the advantage
    together with the masses: it may look good on a shrinking I. (Published code logs two other
    quantities under the name of eq. 7; this is the paper's.)

    Args:
      student_ids_k: int [..., k], the student's likeliest tokens, in any order, no id twice.
      student_logp_k: their log-probs under the student, over the whole vocabulary.
      teacher_ids_k: the teacher's likeliest tokens.
      teacher_logp_k: their log-probs under the teacher: where the lists meet, q is found here.

    Returns:
      Overlap. Where I is empty all five are 0; leave such positions out of the mean of eq. 7 by
      `size` if they are common.

    Raises:
      ValueError: the four shapes differ.
    """
    check_same_shape(
        student_ids_k=student_ids_k,
        student_logp_k=student_logp_k,
        teacher_ids_k=teacher_ids_k,
        teacher_logp_k=teacher_logp_k,
    )
    match_kk = _matches(student_ids_k, teacher_ids_k)
    shared_k = jnp.any(match_kk, axis=-1)
    # At most one entry per row matches, so the sum picks it.
    q_logp_k = jnp.sum(jnp.where(match_kk, teacher_logp_k[..., None, :], 0), axis=-1)
    p_logp_k, q_logp_k = _on(shared_k, student_logp_k), _on(shared_k, q_logp_k)
    size = jnp.sum(shared_k, axis=-1, dtype=jnp.float32)
    return Overlap(
        ratio=size / student_ids_k.shape[-1],
        advantage=-_renormalised(p_logp_k, q_logp_k) / jnp.maximum(size, 1),
        mass_student=jnp.sum(jnp.exp(p_logp_k), axis=-1),
        mass_teacher=jnp.sum(jnp.exp(q_logp_k), axis=-1),
        size=size,
    )


def _matches(ids_k: jax.Array, other_ids_k: jax.Array) -> jax.Array:
    return ids_k[..., :, None] == other_ids_k[..., None, :]


# Controls: what a result must beat before a teacher gets the credit.


def fixed_negative_advantage(
    logp_BR: jax.Array, mask_BR: jax.Array, *, share: float = 0.2, value: float = -0.5
) -> jax.Array:
    """A teacher-free control (2608.31046): the same advantage on the least likely tokens, else 0.

    On Qwen3 a fixed -0.5 on the tokens with the lowest 20% of log-probs came close to OPD, so a
    run that does no better owes nothing to its teacher.

    Args:
      logp_BR: behaviour log-probs.
      mask_BR: bool, tokens of the policy; others get 0.
      share: of the batch's tokens.
      value: the advantage they get.
    """
    check_same_shape(logp_BR=logp_BR, mask_BR=mask_BR)
    threshold = jnp.nanquantile(jnp.where(mask_BR, logp_BR, jnp.nan), share)
    return jnp.where(mask_BR & (logp_BR <= threshold), value, 0.0).astype(jnp.float32)
