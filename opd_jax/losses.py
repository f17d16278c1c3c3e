"""From a student's logits to per-token loss terms: here, and only here, the algorithms part ways.

    GRPO, sampled-token OPD      policy gradient with an advantage per token
    exact and top-k OPD          a divergence between student and teacher at every position
    SFT                          log-probs of given completions

All of it happens inside one tile of the scorer, so no algorithm ever holds `[B, R, V]`, and all of
it is weighted by the same aggregation.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from opd_jax import scoring
from opd_jax.core import sharding
from opd_jax.core.types import Mean, Metrics, Params, Rollout, Scores
from opd_jax.models import transformer
from opd_jax.models.config import ModelConfig
from opd_jax.objectives import aggregate, estimators, grpo, opd, sft

Columns = dict[str, jax.Array | Scores]
Terms = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """The static half of a loss."""

    kind: str  # A key of TILES.
    temperature: float  # That of the sampler; both models' logits are divided by it.
    clip_low: float
    clip_high: float
    dual_clip: float  # 0: none.
    kl_coefficient: float  # Of the KL to a reference; needs `reference_logp_BR` if not 0.
    kl_kind: str
    top_k: int  # Of the top-k loss and of the overlap diagnostics; 0: none of these.
    top_k_form: str
    jsd_beta: float
    # Of OPD: tokens that are one for both models, such as a base's and an instruct model's stops.
    stop_token_classes: scoring.Classes = ()


@struct.dataclass
class Group:
    """Rows that share one source of signal, ready for an update. None: the loss does not use it."""

    rollout: Rollout
    weight_BR: jax.Array  # fp32, from aggregate.token_weights over the WHOLE batch.
    advantage_BR: jax.Array | None = None
    reference_logp_BR: jax.Array | None = None
    teacher: Scores | None = None  # For the diagnostics of sampled-token OPD.
    teacher_hidden_BRD: jax.Array | None = None  # For exact divergences, with the table below.
    teacher_table_VD: jax.Array | None = None
    teacher_softcap: float | None = struct.field(pytree_node=False, default=None)  # Of its logits.


def weigh(
    rollout: Rollout,
    keep_B: jax.Array | None,
    aggregation: str,
    constant: float | None,
    mask_truncated: bool,
) -> Group:
    """A rollout with its aggregation weights, made over all rows of the batch at once.

    Args:
      rollout: the whole batch.
      keep_B: bool, rows that train; None: all.
      aggregation: a key of aggregate.AGGREGATIONS.
      constant: its normaliser, where it needs one.
      mask_truncated: leave out rows that were cut at the limit.
    """
    mask_BR = rollout.mask_BR
    if keep_B is not None:
        mask_BR &= keep_B[:, None]
    if mask_truncated:
        mask_BR &= rollout.stopped_B[:, None]
    return Group(rollout, aggregate.token_weights(mask_BR, aggregation, constant=constant))


def group_loss(
    params: Params, config: ModelConfig, group: Group, settings: LossSettings
) -> tuple[jax.Array, Metrics]:
    """The weighted sum of a group's terms under the student, and its metrics.

    Losses of groups and of micro-batches add up to the loss of the batch. What the rollout, the
    advantages or a teacher hold where the mask is False is never read: not a NaN, not a token.
    """
    rollout, mask_BR = group.rollout, group.rollout.mask_BR
    columns = {
        "tokens": rollout.tokens_BR,
        "behaviour_logp": rollout.logp_BR,
        "advantage": group.advantage_BR,
        "reference_logp": group.reference_logp_BR,
        "teacher": group.teacher,
        "teacher_hidden": group.teacher_hidden_BRD,
    }
    columns = {k: v for k, v in columns.items() if v is not None}
    columns = jax.tree.map(functools.partial(aggregate.keep, mask_BR), columns)
    hidden_BRD = transformer.completion_hidden(params, config, rollout.prompt, columns["tokens"])
    # Gathered along D once, here, and not again in every tile.
    table_VD, teacher_table_VD = jax.sharding.reshard(
        (transformer.unembedding(params), group.teacher_table_VD), sharding.spec("vocab", "act")
    )
    if teacher_table_VD is not None:
        teacher_table_VD = scoring.fit_rows(teacher_table_VD, table_VD.shape[0])
    tile = TILES[settings.kind]

    def terms(hidden_BCD: jax.Array, columns: Columns) -> Terms:
        z_BCV = scoring.logits(
            hidden_BCD, table_VD, settings.temperature, config.final_softcap, config.num_tokens
        )
        if "teacher_hidden" in columns:
            teacher_z_BCV = scoring.logits(
                columns["teacher_hidden"],
                teacher_table_VD,
                settings.temperature,
                group.teacher_softcap,
                config.num_tokens,  # The student's: what both can say.
            )
            columns = columns | {"teacher_logits": teacher_z_BCV}
        return tile(z_BCV, columns, settings)

    out = scoring.map_tiles(terms, (hidden_BRD, columns), table_VD.shape[0])
    loss = aggregate.weighted_sum(group.weight_BR, out.pop("loss"))
    metrics = {name: Mean.of(x_BR, mask_BR) for name, x_BR in out.items()}
    return loss, metrics


def policy_gradient(z_BCV: jax.Array, columns: Columns, s: LossSettings) -> Terms:
    """The clipped policy gradient of GRPO and of sampled-token OPD, with an optional KL."""
    scores = scoring.score_logits(z_BCV, columns["tokens"], s.top_k)
    terms = grpo.policy_gradient_terms(
        scores.logp_BR,
        columns["behaviour_logp"],
        columns["advantage"],
        clip_low=s.clip_low,
        clip_high=s.clip_high,
        dual_clip=s.dual_clip or None,
    )
    loss_BC = terms.loss_BR
    out = {
        "entropy": scores.entropy_BR,
        "ratio": terms.ratio_BR,
        "clipped": terms.clipped_BR.astype(jnp.float32),
    }
    if s.kl_coefficient:
        kl_BC = estimators.kl_penalty(scores.logp_BR, columns["reference_logp"], s.kl_kind)
        loss_BC = loss_BC + s.kl_coefficient * kl_BC
        out["reference_kl"] = kl_BC
    if "teacher" in columns:
        out |= diagnostics(scores, columns["teacher"])
    return {"loss": loss_BC} | jax.tree.map(jax.lax.stop_gradient, out)


def sampled_token(z_BCV: jax.Array, columns: Columns, s: LossSettings) -> Terms:
    """OPD on the sampled token: GRPO's term, the teacher's advantage in place of a reward's."""
    behaviour_logp_BC, joined = columns["behaviour_logp"], None
    if s.stop_token_classes:
        # The sampler knows its own token only: what the class had is the student's to say.
        joined = joined_scores(jax.lax.stop_gradient(z_BCV), columns, s)
        behaviour_logp_BC = joined.logp_BR
    advantage_BC = opd.sampled_token_advantage(columns["teacher"].logp_BR, behaviour_logp_BC)
    out = policy_gradient(z_BCV, columns | {"advantage": advantage_BC}, s)
    return out if joined is None else out | diagnostics(joined, columns["teacher"])


def joined_scores(z_BCV: jax.Array, columns: Columns, s: LossSettings) -> Scores:
    """Scores of the chosen tokens, each class of stop tokens taken as one."""
    z_BCV = scoring.join_logits(z_BCV, s.stop_token_classes)
    tokens_BC = scoring.join_tokens(columns["tokens"], s.stop_token_classes)
    return scoring.score_logits(z_BCV, tokens_BC, s.top_k)


def divergence(measure: Callable[[jax.Array, jax.Array, LossSettings], jax.Array]):
    """A tile of exact OPD: `measure` of both models' logits at every position."""

    def tile(z_BCV: jax.Array, columns: Columns, s: LossSettings) -> Terms:
        teacher_z_BCV = jax.lax.stop_gradient(columns["teacher_logits"])
        z_BCV, teacher_z_BCV = (
            scoring.join_logits(z, s.stop_token_classes) for z in (z_BCV, teacher_z_BCV)
        )
        tokens_BC = scoring.join_tokens(columns["tokens"], s.stop_token_classes)
        loss_BC = measure(z_BCV, teacher_z_BCV, s)
        student_z_BCV = jax.lax.stop_gradient(z_BCV)
        student = scoring.score_logits(student_z_BCV, tokens_BC, s.top_k)
        teacher = scoring.score_logits(teacher_z_BCV, tokens_BC, s.top_k)
        out = {"loss": loss_BC, "entropy": student.entropy_BR} | diagnostics(student, teacher)
        # Both distributions are here, so the KL that is watched need not be an estimate.
        return out | {"kl": opd.reverse_kl(student_z_BCV, teacher_z_BCV)}

    return tile


def top_k_reverse_kl(z_BCV: jax.Array, teacher_z_BCV: jax.Array, s: LossSettings) -> jax.Array:
    """Reverse KL on the student's own k likeliest tokens (paper 2, "Student Top-k")."""
    _, ids_BCk = scoring.top(jax.lax.stop_gradient(z_BCV), s.top_k)

    def at(z_BCV):
        return scoring.pick(z_BCV, ids_BCk) - jax.nn.logsumexp(z_BCV, axis=-1)[..., None]

    return opd.topk_reverse_kl(at(z_BCV), at(teacher_z_BCV), mode=s.top_k_form)


def supervised(z_BCV: jax.Array, columns: Columns, s: LossSettings) -> Terms:
    """Negative log-likelihood of given completions."""
    scores = scoring.score_logits(z_BCV, columns["tokens"])
    return {
        "loss": sft.nll_terms(scores.logp_BR),
        "entropy": jax.lax.stop_gradient(scores.entropy_BR),
    }


def diagnostics(student: Scores, teacher: Scores) -> Terms:
    """What paper 2 looks at, per position (eq. 6-10), and the reverse KL by the sampled token.

    Without top-k lists (k = 0) the overlap is left out.
    """
    out = {
        "kl": student.logp_BR - teacher.logp_BR,
        "entropy_student": student.entropy_BR,
        "entropy_teacher": teacher.entropy_BR,
        "entropy_gap": opd.entropy_gap(student.entropy_BR, teacher.entropy_BR),
    }
    if student.top_ids_BRk.shape[-1] == 0:
        return out
    shared = opd.overlap(
        student.top_ids_BRk, student.top_logp_BRk, teacher.top_ids_BRk, teacher.top_logp_BRk
    )
    return out | {
        "overlap_ratio": shared.ratio,
        "overlap_advantage": shared.advantage,
        "overlap_mass_student": shared.mass_student,
        "overlap_mass_teacher": shared.mass_teacher,
    }


TILES: dict[str, Callable[[jax.Array, Columns, LossSettings], Terms]] = {
    "policy_gradient": policy_gradient,
    "sampled_token": sampled_token,
    "reverse_kl": divergence(lambda p, q, s: opd.reverse_kl(p, q)),
    "forward_kl": divergence(lambda p, q, s: opd.forward_kl(p, q)),
    "jsd": divergence(lambda p, q, s: opd.jsd(p, q, s.jsd_beta)),
    "top_k": divergence(top_k_reverse_kl),
    "supervised": supervised,
}
