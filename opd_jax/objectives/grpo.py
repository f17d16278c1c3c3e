"""GRPO: group-relative advantages and the clipped policy-gradient term (DeepSeekMath, 2402.03300).

OPD uses the same term with a per-token advantage from the teacher, so a comparison of the two
compares signals and nothing else.
"""

import jax
import jax.numpy as jnp
from flax import struct

from opd_jax.objectives.estimators import (
    centre,
    check_same_shape,
    choose,
    ratio,
    standard_deviation,
)

# Settings by the name of the paper. What is not a formula (overlong penalties, dynamic sampling)
# belongs to the training loop.
VARIANTS = {
    # 2402.03300: the group's std, per-sequence mean, k3 in the loss.
    "grpo": {
        "scale": "std",
        "aggregation": "seq-mean-token-mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coefficient": 0.04,
        "kl_kind": "k3",
    },
    # 2503.20783: no std (it favours prompts that are too easy or too hard), a constant normaliser.
    "dr_grpo": {
        "scale": "none",
        "aggregation": "constant-norm",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coefficient": 0.0,
        "kl_kind": "k3",
    },
    # 2503.14476: a higher upper clip, token mean over the batch, no KL.
    "dapo": {
        "scale": "std",
        "aggregation": "token-mean",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coefficient": 0.0,
        "kl_kind": "k3",
    },
}

# What a group's deviations are divided by. "batch_std" is LitePPO's: the group's mean, but the
# standard deviation of all rewards of the batch.
SCALES = {
    "std": lambda reward, valid, ddof, eps: standard_deviation(reward, valid, 1, ddof=ddof) + eps,
    "batch_std": lambda reward, valid, ddof, eps: (
        standard_deviation(reward, valid, ddof=ddof) + eps
    ),
    "none": lambda reward, valid, ddof, eps: 1.0,
}


@struct.dataclass
class PolicyTerms:
    """Per-token results of `policy_gradient_terms`; all [B, R]."""

    loss_BR: jax.Array  # fp32, to be weighted and summed.
    ratio_BR: jax.Array  # fp32, p / behaviour.
    clipped_BR: jax.Array  # bool, tokens whose gradient a clip has removed.


def group_advantages(
    reward_Pn: jax.Array,
    *,
    scale: str,
    ddof: int = 1,
    eps: float = 1e-6,
    valid_Pn: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A_i = (R_i - mean_group R) / (std R + eps), 2402.03300 sec. 4.1.2.

    Args:
      reward_Pn: one row per prompt, its n samples side by side. Rows in the project's prompt-major
        order become this by `reward_B.reshape(P, n)`; for any other order see
        `group_advantages_by_id`.
      scale: "std" (of the group), "batch_std" (of all rewards) or "none" (Dr.GRPO).
      ddof: 1 for the sample's std (TRL, verl, tunix), 0 for the population's.
      eps: added to the std.
      valid_Pn: bool, samples that count in mean and std; the others get advantage 0. None: all.
        By default truncated samples do count: their reward is part of what the policy can expect
        on this prompt, also where the loss mask leaves their tokens out.

    Returns:
      (advantage_Pn, zero_variance_P): fp32, exactly 0 in groups of equal rewards; bool, those
      groups. They carry no policy gradient, but a KL penalty still pulls on their tokens unless
      the caller masks them.

    Raises:
      ValueError: unknown scale, bad ddof, reward_Pn not [P, n], or a mask of another shape.
    """
    divisor = choose(SCALES, scale, "advantage scale")
    if reward_Pn.ndim != 2:
        raise ValueError(f"reward_Pn must be [prompts, samples], got {list(reward_Pn.shape)}")
    reward_Pn = reward_Pn.astype(jnp.float32)
    valid_Pn = jnp.ones_like(reward_Pn, jnp.bool_) if valid_Pn is None else valid_Pn
    centred_Pn, constant_P1 = centre(reward_Pn, valid_Pn, axis=1)
    return centred_Pn / divisor(reward_Pn, valid_Pn, ddof, eps), constant_P1[:, 0]


def group_advantages_by_id(
    reward_B: jax.Array,
    group_B: jax.Array,
    groups: int,
    *,
    scale: str,
    ddof: int = 1,
    eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array]:
    """`group_advantages` for rows in any order and groups of any size.

    Costs a [groups, B] array, and in return has no gather: it works on a sharded batch.

    Args:
      reward_B: one reward per row.
      group_B: int, the row's group, 0 to groups - 1. A row with another number gets advantage 0.
      groups: number of groups.
      scale: as in `group_advantages`; so are ddof, eps and errors.
      ddof: see there.
      eps: see there.

    Returns:
      (advantage_B, zero_variance_G); a group without rows counts as one without variance.
    """
    check_same_shape(reward_B=reward_B, group_B=group_B)
    member_GB = jnp.arange(groups)[:, None] == group_B[None, :]
    reward_GB = jnp.where(member_GB, reward_B[None, :], 0)
    advantage_GB, zero_variance_G = group_advantages(
        reward_GB, scale=scale, ddof=ddof, eps=eps, valid_Pn=member_GB
    )
    return jnp.sum(advantage_GB, axis=0), zero_variance_G


def policy_gradient_terms(
    logp_BR: jax.Array,
    behaviour_logp_BR: jax.Array,
    advantage_BR: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, r = p / behaviour.

    PPO's clipped objective (1707.06347 eq. 7) with a range that need not be symmetric (DAPO,
    2503.14476). `dual_clip` c bounds it where A < 0: max(min(...), c A) (1912.09729),
    since r A has no lower bound there. At r = 1 the gradient is -A ∇ log p.

    Args:
      logp_BR: the student's log-probs of the sampled tokens; the only input with a gradient.
      behaviour_logp_BR: as the sampler stored them.
      advantage_BR: per token; a per-row advantage is broadcast by the caller.
      clip_low: largest decrease of the ratio that is still rewarded; inf for no limit.
      clip_high: largest increase; may be smaller or larger than clip_low.
      dual_clip: c > 1 (usual: 3), or None.

    Returns:
      PolicyTerms. A reference KL is the caller's: loss_BR + β · `estimators.kl_penalty`.

    Raises:
      ValueError: a negative clip, dual_clip <= 1, or the shapes differ.
    """
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high}: distances from 1, not negative; the "
            "ratio is kept in [1 - clip_low, 1 + clip_high]"
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip}: must be above 1 (usual: 3), or None")
    check_same_shape(
        logp_BR=logp_BR, behaviour_logp_BR=behaviour_logp_BR, advantage_BR=advantage_BR
    )
    advantage_BR = jax.lax.stop_gradient(advantage_BR)
    ratio_BR = ratio(logp_BR, behaviour_logp_BR)
    plain_BR = ratio_BR * advantage_BR
    objective_BR = jnp.minimum(
        plain_BR, jnp.clip(ratio_BR, 1 - clip_low, 1 + clip_high) * advantage_BR
    )
    if dual_clip is not None:
        bounded_BR = jnp.maximum(objective_BR, dual_clip * advantage_BR)
        objective_BR = jnp.where(advantage_BR < 0, bounded_BR, objective_BR)
    return PolicyTerms(-objective_BR, ratio_BR, objective_BR != plain_BR)
