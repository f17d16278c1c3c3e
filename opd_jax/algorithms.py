"""Where a batch's signal comes from: verifiers (GRPO), teachers (OPD), given completions (SFT).

Each algorithm is one function from prompts to groups of rows ready for the update. They share the
prompts, the sampler, the aggregation and the ledger; the loss that turns groups into a gradient is
chosen in `loss_settings` and written in losses.py.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from opd_jax import ledger, rewards, steps
from opd_jax.config import Stage
from opd_jax.core import hosts, rng, sharding
from opd_jax.core.types import Params, PromptBatch, Rollout
from opd_jax.data import prompts as prompt_data
from opd_jax.data.problem import Problem
from opd_jax.data.stopping import cut_rollout
from opd_jax.data.tokenizer import Tokenizer
from opd_jax.losses import Group, LossSettings
from opd_jax.models import transformer
from opd_jax.models.config import ModelConfig

FIXED_NEGATIVE = "fixed_negative"


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen model that scores, or a control in its place."""

    spec: str  # As the config names it.
    config: ModelConfig
    params: Params | None  # None: the student itself ("self"), or no model ("fixed_negative").
    manifest: dict[str, Any]  # Where it comes from and what it cost; saved with each checkpoint.
    layout: prompt_data.Layout | None = None  # Of its own prompts; None: it reads the student's.


@dataclasses.dataclass(frozen=True)
class Context:
    """What the algorithms of one stage need besides the student's weights."""

    stage: Stage
    seed: int
    config: ModelConfig
    mesh: jax.sharding.Mesh
    tokenizer: Tokenizer
    ranges: Mapping[str, tuple[int, int]]  # Domain -> its prompts in every batch, contiguous.
    teachers: Mapping[str, Teacher]  # By domain.
    reference: Params | None  # The stage's initial weights, if a KL to them is in the loss.
    # Called between phases, and before every wait for the device; may raise to give up.
    check: Callable[[str], None] = lambda phase: None
    verifiers: rewards.Pool = dataclasses.field(default_factory=rewards.Pool)
    stop_strings: tuple[str, ...] = ()  # Texts that end a completion, besides the stop tokens.


@dataclasses.dataclass(frozen=True)
class Known:
    """What every host knows of a rollout, as numpy."""

    length_P: np.ndarray  # Of the prompts.
    length_B: np.ndarray  # Of the completions, the stop token included.
    stopped_B: np.ndarray  # bool, False where the limit cut a completion.
    repeated_B: np.ndarray  # Share of its n-grams that a completion had said before.


@dataclasses.dataclass
class Batch:
    """One step's input to the update."""

    groups: list[Group]
    names: list[str]  # Per group: the teacher's name, or "".
    prompt_P: np.ndarray  # Prompt lengths of all rows trained on.
    length_B: np.ndarray  # Completion lengths.
    collect: Callable[[], dict[str, float]]  # Makes `facts`; may wait for verifiers.

    @functools.cached_property
    def facts(self) -> dict[str, float]:
        """Means over rows known on the host: reward, length, truncation."""
        return self.collect()


def loss_settings(stage: Stage) -> LossSettings:
    """The static half of the stage's loss."""
    opd_loss = stage.opd.loss if stage.opd.loss != "sampled" else "sampled_token"
    if any(spec == FIXED_NEGATIVE for spec in stage.teachers.values()):
        opd_loss = "policy_gradient"
    return LossSettings(
        kind={"grpo": "policy_gradient", "sft": "supervised", "opd": opd_loss}[stage.algorithm],
        temperature=1.0 if stage.algorithm == "sft" else stage.sampling.temperature,
        clip_low=stage.clip_low,
        clip_high=stage.clip_high,
        dual_clip=stage.dual_clip,
        kl_coefficient=stage.grpo.kl_coefficient if stage.algorithm == "grpo" else 0.0,
        kl_kind=stage.grpo.kl_kind,
        top_k=stage.opd.top_k if stage.algorithm == "opd" else 0,
        top_k_form=stage.opd.top_k_form,
        jsd_beta=stage.opd.jsd_beta,
        stop_token_classes=stage.opd.stop_token_classes if stage.algorithm == "opd" else (),
    )


def grpo(
    ctx: Context, params: Params, problems: Sequence[Problem], prompt: PromptBatch,
    step: int, book: ledger.Ledger,
) -> Batch:  # fmt: skip
    """n samples per prompt, verified; each is compared with its siblings."""
    rollout, text_B, known = _sample(ctx, params, prompt, step, book)
    marks = ctx.verifiers.submit(problems, text_B)
    length_P, length_B = known.length_P, known.length_B
    reference_logp_BR = None
    if ctx.reference is not None:
        score = steps.make_score_step(ctx.config, ctx.stage.sampling.temperature, 0)
        reference_logp_BR = score(ctx.reference, rollout).logp_BR
        book.add("reference_score", ledger.score(ctx.config, length_P, length_B))
    verdicts = marks.result()  # Here at last: the device has been busy meanwhile.
    limit = ctx.stage.sampling.max_new_tokens
    reward_B, terms = rewards.combine(ctx.stage.reward, verdicts.right_B, text_B, length_B, limit)
    shape = len(problems), -1
    reward_Pn = rewards.neutral(reward_B.reshape(shape), verdicts.valid_B.reshape(shape))
    signal = steps.make_grpo_step(ctx.stage.grpo, *weighing(ctx.stage))
    group, constant_P = signal(rollout, sharding.put(ctx.mesh, reward_Pn), reference_logp_BR)
    facts = _facts(ctx, known, reward_Pn.reshape(-1), terms) | verdicts.counts
    same_P = reward_Pn.min(axis=1) == reward_Pn.max(axis=1)
    facts["zero_variance"] = float(np.mean(same_P))
    if ctx.stage.grpo.drop_zero_variance:
        dropped = steps.everywhere(constant_P)
        n = ctx.stage.sampling.samples
        _discard(book, ctx.config, length_P[dropped], length_B[np.repeat(dropped, n)])
    return Batch([group], [""], length_P, length_B, lambda: facts)


def opd(
    ctx: Context, params: Params, problems: Sequence[Problem], prompt: PromptBatch,
    step: int, book: ledger.Ledger,
) -> Batch:  # fmt: skip
    """Samples of the student, each scored by the one teacher of its domain."""
    rollout, text_B, known = _sample(ctx, params, prompt, step, book)
    marks = ctx.verifiers.submit(problems, text_B)
    length_P, length_B = known.length_P, known.length_B
    whole = steps.make_weigh_step(*weighing(ctx.stage))(rollout, None)
    if loss_settings(ctx.stage).kind == "policy_gradient":  # The control that has no teacher.
        groups, names = [steps.fixed_negative_step(whole)], [""]
    else:
        groups, names = _taught(ctx, params, problems, whole, length_P, length_B, book)
    # The reward only informs: it is waited for after the update has been dispatched.
    collect = functools.partial(_marked_facts, ctx, known, marks)
    return Batch(groups, names, length_P, length_B, collect)


def sft(
    ctx: Context, params: Params, problems: Sequence[Problem], prompt: PromptBatch,
    step: int, book: ledger.Ledger,
) -> Batch:  # fmt: skip
    """Given completions: the domain's solutions, or rollouts of the teachers made on the spot."""
    if ctx.stage.sft.source == "teacher":
        rollout, text_B, known, read_P = _teacher_rollouts(ctx, problems, prompt, step, book)
        marks = ctx.verifiers.submit(problems, text_B)
        keep_B = np.ones(len(text_B), bool)
        if ctx.stage.sft.reject_wrong:
            keep_B = marks.result().right_B > 0
    else:
        columns = ctx.stage.sampling.max_new_tokens
        tokens_BR, length_B, whole_B = prompt_data.encode_solutions(
            problems, ctx.stage.sft.style, ctx.tokenizer, columns
        )
        mask_BR = np.arange(columns)[None, :] < length_B[:, None]
        rollout = sharding.put(
            ctx.mesh,
            Rollout(prompt, tokens_BR, mask_BR, mask_BR * np.float32(0), length_B, whole_B),
        )
        keep_B = np.ones(len(problems), bool)
        marks = None  # Solutions verify by construction.
        known = Known(np.asarray(prompt.length_P), length_B, whole_B, np.zeros(len(problems)))
    length_P, length_B = known.length_P, known.length_B
    if not keep_B.all():
        n = rollout.samples
        for domain, (start, stop) in ctx.ranges.items():
            gone = ~keep_B[start * n : stop * n]
            flops = ledger.decode(
                ctx.teachers[domain].config,
                np.repeat(read_P[start:stop], n)[gone],
                length_B[start * n : stop * n][gone],
            )
            book.discard("generation", flops)
    group = steps.make_weigh_step(*weighing(ctx.stage))(rollout, sharding.put(ctx.mesh, keep_B))
    kept = {"kept": float(keep_B.mean())}
    collect = functools.partial(_marked_facts, ctx, known, marks, kept)
    return Batch([group], [""], length_P, length_B, collect)


ALGORITHMS = {"grpo": grpo, "opd": opd, "sft": sft}


def texts(tokenizer: Tokenizer, rollout: Rollout) -> list[str | None]:
    """The completions as text, stop tokens left out; None where a row is another host's."""
    tokens_BR, own_B = hosts.local(rollout.tokens_BR), hosts.own_rows(rollout.tokens_BR)
    end_B = hosts.local(rollout.length_B) - hosts.local(rollout.stopped_B)
    return [
        tokenizer.decode(row[:end].tolist(), continues=True) if own else None
        for row, end, own in zip(tokens_BR, end_B, own_B, strict=True)
    ]


def _sample(ctx, params, prompt, step, book):
    """A rollout of the student, its texts, and what is known; its FLOPs go into the ledger."""
    rollout_step = steps.make_rollout_step(ctx.config, ctx.stage.sampling)
    placed = sharding.put(ctx.mesh, prompt)
    rollout, _ = rollout_step(params, placed, rng.stream(ctx.seed, "rollout", step))
    ctx.check("sampling")
    known = _known(prompt, rollout)
    prompt_B = np.repeat(known.length_P, rollout.samples)
    book.add("prefill", ledger.prefill(ctx.config, known.length_P))
    book.add("decode", ledger.decode(ctx.config, prompt_B, known.length_B))
    ctx.check("verifiers")
    if ctx.stop_strings:
        cut, text_B = cut_rollout(ctx.tokenizer, rollout, ctx.stop_strings)
        known = Known(known.length_P, cut.length_B, cut.stopped_B, known.repeated_B)
        return sharding.put(ctx.mesh, cut), text_B, known
    return rollout, texts(ctx.tokenizer, rollout), known


def _taught(ctx, params, problems, whole, length_P, length_B, book):
    """The batch in one group per domain, each with what its teacher says; and the groups' names.

    A teacher with prompts of its own reads the same completions behind them. Its scores stand in
    the completions' columns, which no prompt's length moves; the student's rows stay as they are.
    """
    settings, n = loss_settings(ctx.stage), whole.rollout.samples
    groups = []
    for domain, (start, stop) in ctx.ranges.items():
        teacher = ctx.teachers[domain]
        part = whole if len(ctx.ranges) == 1 else steps.make_take_step(start, stop)(whole)
        teacher_params = params if teacher.params is None else teacher.params
        rollout, prompt_P = part.rollout, length_P[start:stop]
        if teacher.layout is not None:
            prompt = teacher.layout.encode(problems[start:stop])
            rollout = rollout.replace(prompt=sharding.put(ctx.mesh, prompt))
            prompt_P = prompt.length_P
        scorer = teacher.config
        if settings.kind == "sampled_token":
            score = steps.make_score_step(
                scorer, settings.temperature, settings.top_k, settings.stop_token_classes
            )
            part = part.replace(teacher=score(teacher_params, rollout))
        else:
            hidden = steps.make_hidden_step(scorer)
            # What the loss unembeds is as wide as the student's logits: see scoring.fit_rows.
            scorer = scorer.replace(vocab_size=ctx.config.vocab_size)
            # The table is copied where it is the student's own: the update donates that buffer.
            table_VD = transformer.unembedding(teacher_params)
            part = part.replace(
                teacher_hidden_BRD=hidden(teacher_params, rollout),
                teacher_table_VD=table_VD.copy() if teacher.params is None else table_VD,
                teacher_softcap=teacher.config.final_softcap,
            )
        rows = slice(start * n, stop * n)
        book.add("teacher_score", ledger.score(scorer, prompt_P, length_B[rows]))
        groups.append(part)
    return groups, list(ctx.ranges)


def _teacher_rollouts(ctx, problems, prompt, step, book):
    """Rollouts of each domain's teacher behind the student's prompts, joined in row order.

    Also their texts, what is known of them, and the lengths `[P]` of the prompts that the teachers
    read to make them.
    """
    parts, read, n = [], [], ctx.stage.sampling.samples
    prompt = jax.tree.map(np.asarray, prompt)
    for domain, (start, stop) in ctx.ranges.items():
        teacher = ctx.teachers[domain]
        some = jax.tree.map(lambda x, rows=slice(start, stop): x[rows], prompt)
        own = some
        if teacher.layout is not None:
            own = teacher.layout.encode(problems[start:stop]).replace(stop_PS=some.stop_PS)
        generate = steps.make_rollout_step(teacher.config, ctx.stage.sampling)
        key = rng.stream(ctx.seed, "generate", step)
        part, _ = generate(teacher.params, sharding.put(ctx.mesh, own), key)
        parts.append(part.replace(prompt=sharding.put(ctx.mesh, some)))
        read.append(own.length_P)
    rollout, read_P = steps.join_step(parts), np.concatenate(read)
    ctx.check("generation")
    known = _known(prompt, rollout)
    for domain, (start, stop) in ctx.ranges.items():
        config, length_P = ctx.teachers[domain].config, read_P[start:stop]
        rows = slice(start * n, stop * n)
        flops = ledger.prefill(config, length_P)
        flops += ledger.decode(config, np.repeat(length_P, n), known.length_B[rows])
        book.add("generation", flops)
    return rollout, texts(ctx.tokenizer, rollout), known, read_P


def _known(prompt: PromptBatch, rollout: Rollout) -> Known:
    """Waits for a rollout; on several hosts call `check` before."""
    return Known(np.asarray(prompt.length_P), *steps.everywhere(steps.facts_step(rollout)))


def weighing(stage: Stage) -> tuple[str, float | None, bool]:
    constant = float(stage.sampling.max_new_tokens)
    uses_constant = stage.aggregation == "constant-norm"
    return stage.aggregation, constant if uses_constant else None, stage.mask_truncated


def _discard(book: ledger.Ledger, config: ModelConfig, length_P, length_B) -> None:
    """Moves the sampling of whole groups that were thrown away to where it can be seen."""
    if len(length_P):
        n = len(length_B) // len(length_P)
        book.discard("prefill", ledger.prefill(config, length_P))
        book.discard("decode", ledger.decode(config, np.repeat(length_P, n), length_B))


def _marked_facts(ctx, known, marks, more=types.MappingProxyType({})):
    """Facts of an algorithm that does not train on the reward; waits for the marks."""
    if marks is None:
        return _facts(ctx, known, np.ones(len(known.length_B)), {}) | more
    verdicts = marks.result()
    return _facts(ctx, known, verdicts.right_B, {}) | verdicts.counts | more


def _facts(ctx: Context, known: Known, reward_B, terms) -> dict[str, float]:
    """Means over rows, of the batch and by domain."""
    rows = {
        "reward": reward_B,
        "length": known.length_B,
        "truncated": ~known.stopped_B,
        "repeated": known.repeated_B,
        **terms,
    }
    facts, n = {}, len(known.length_B) // len(known.length_P)
    for name, x_B in rows.items():
        facts[name] = float(np.mean(x_B))
        for domain, (start, stop) in ctx.ranges.items():
            facts[f"{name}/{domain}"] = float(np.mean(x_B[start * n : stop * n]))
    return facts
