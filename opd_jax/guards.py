"""Checks before compute is spent: each an error that names the field, the value and the remedy."""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from opd_jax import config, steps, vocabulary
from opd_jax.algorithms import Context, Teacher
from opd_jax.config import Experiment, Stage, one_of
from opd_jax.core import rng, sharding
from opd_jax.core.types import Params, PromptBatch
from opd_jax.data import prompts as prompt_data
from opd_jax.data import tokenizer as tokenizers
from opd_jax.infra import checkpoint
from opd_jax.models import hf
from opd_jax.models.config import ModelConfig
from opd_jax.objectives import aggregate, estimators, grpo, opd
from opd_jax.teacher_prompts import STUDENT
from opd_jax.teachers import CONTROLS, parse

# Largest |difference| of a token's log-prob between sampler and scorer, by dtype of the matmuls.
# bfloat16 rounds logits of size 16 to steps of 0.06; what is guarded against is off by whole nats.
RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}


def check_experiment(x: Experiment, batch_shards: int) -> None:
    """Everything that can be known from the config alone.

    Args:
      x: the experiment.
      batch_shards: devices that share a batch.

    Raises:
      ValueError: names the field, the value and the remedy.
    """
    if not x.plan:
        raise ValueError("plan is empty: name the stages to run, in order")
    for i, name in enumerate(x.plan):
        one_of(f"plan[{i}]", name, x.stages)
        check_stage(x, name, batch_shards)
    if len(set(x.plan)) != len(x.plan):
        raise ValueError(f"plan={x.plan}: a stage stands in it twice")
    for route, names in x.routes.items():
        for name in names:
            one_of(f"routes.{route}", name, x.plan)
    if x.baseline:
        one_of("baseline", x.baseline, x.plan)
    if x.evaluation.batch % batch_shards:
        raise ValueError(
            f"evaluation.batch={x.evaluation.batch} does not divide over {batch_shards} devices "
            "of the data and fsdp axes; make it a multiple"
        )


def check_stage(x: Experiment, name: str, batch_shards: int) -> None:
    """The fields of one stage, against each other and against the rest of the config."""
    s, field = x.stages[name], f"stages.{name}"
    one_of(f"{field}.model", s.model, x.models)
    one_of(f"{field}.aggregation", s.aggregation, aggregate.AGGREGATIONS)
    one_of(f"{field}.grpo.advantage_scale", s.grpo.advantage_scale, grpo.SCALES)
    one_of(f"{field}.grpo.kl_kind", s.grpo.kl_kind, estimators.KL_ESTIMATORS)
    one_of(f"{field}.opd.top_k_form", s.opd.top_k_form, opd.TOPK_MODES)
    for domain in s.domains:
        one_of(f"{field}.domains", domain, x.domains)
    if s.dual_clip and s.dual_clip <= 1:
        raise ValueError(f"{field}.dual_clip={s.dual_clip}: above 1 (usual: 3), or 0 for none")
    _check_sampling(s, field)
    _check_sources(x, name)
    _check_division(s, field, batch_shards)
    try:
        quotas = prompt_data.quotas(s.domains, s.prompts)
    except ValueError as error:
        raise ValueError(f"{field}.domains: {error}") from None
    check_ranges(s, field, quotas, batch_shards)


def _check_sampling(s: Stage, field: str) -> None:
    samples = s.algorithm != "sft" or s.sft.source == "teacher"
    if samples and not (s.algorithm == "sft" and s.sampling.temperature == 0):
        try:
            s.sampling.check_trainable()
        except ValueError as error:
            raise ValueError(f"{field}.{error}") from None
    if s.algorithm == "grpo" and s.sampling.samples < 2:
        raise ValueError(
            f"{field}.sampling.samples={s.sampling.samples}: GRPO compares samples of one prompt; "
            "take at least 2 (usual: 8)"
        )
    if s.updates_per_rollout > 1 and s.algorithm == "opd" and s.opd.loss != "sampled":
        raise ValueError(
            f"{field}.updates_per_rollout={s.updates_per_rollout}: exact OPD losses carry no "
            "importance ratio, so later updates would be off-policy; use 1, or opd.loss='sampled'"
        )


def _check_sources(x: Experiment, name: str) -> None:
    """Where weights come from: stages that come earlier, teachers for every domain."""
    s, field = x.stages[name], f"stages.{name}"
    earlier = x.plan[: x.plan.index(name)]
    init = parse(s.init, f"{field}.init")
    if init.kind in CONTROLS:
        raise ValueError(f"{field}.init={s.init!r}: a control is no initial model")
    if s.lora.rank and init.kind == "scratch":
        raise ValueError(
            f"{field}.lora.rank={s.lora.rank} with init='scratch': random weights would stay as "
            "they are; start from a trained model, or set lora.rank=0"
        )
    sources = {f"{field}.init": init}
    if s.task_vectors and (init.kind == "scratch" or s.lora.rank):
        raise ValueError(
            f"{field}.task_vectors={s.task_vectors} with init={s.init!r}, lora.rank={s.lora.rank}: "
            "vectors are added to whole trained weights; name the stage that the vectors' stages "
            "began from as init, and set lora.rank=0"
        )
    for name in s.task_vectors:
        sources[f"{field}.task_vectors.{name}"] = parse(f"stage:{name}", f"{field}.task_vectors")
    if s.algorithm == "grpo" and s.teachers:
        raise ValueError(
            f"{field}.teachers={s.teachers}: GRPO learns from verifiers and has no teacher; leave "
            "it {}, or set algorithm='opd'"
        )
    if _needs_teacher(s) and (missing := sorted(set(s.domains) - set(s.teachers))):
        raise ValueError(
            f"{field}.teachers: no teacher for domain(s) {', '.join(missing)}; every row needs "
            "exactly one, e.g. teachers={'" + missing[0] + "': 'stage:NAME'}"
        )
    if unused := sorted(set(s.teachers) - set(s.domains)):
        raise ValueError(f"{field}.teachers: {', '.join(unused)} is not among the stage's domains")
    for domain, spec in s.teachers.items():
        sources[f"{field}.teachers.{domain}"] = parse(spec, f"{field}.teachers.{domain}")
        if s.algorithm == "sft" and spec in ("self", "fixed_negative"):
            raise ValueError(f"{field}.teachers.{domain}={spec!r}: cannot generate completions")
    _check_teacher_chat(s, field)
    specs = set(s.teachers.values())
    if "fixed_negative" in specs and (len(specs) > 1 or s.opd.loss != "sampled"):
        raise ValueError(
            f"{field}: the control 'fixed_negative' is a policy gradient without a teacher; use it "
            "for all domains of the stage, with opd.loss='sampled'"
        )
    for where, source in sources.items():
        if source.kind == "stage":
            one_of(f"{where} (an earlier stage)", source.name, earlier)
            _check_kept(x, where, source)
    for where in (f"{field}.init", *(f"{field}.task_vectors.{name}" for name in s.task_vectors)):
        source = sources[where]
        if source.kind == "stage" and not _same_shape(x, s.model, x.stages[source.name].model):
            raise ValueError(
                f"{field}.model={s.model!r}: {where}={source.name!r} has the weights of model "
                f"{x.stages[source.name].model!r}, which is another; name that one"
            )


def _check_teacher_chat(s: Stage, field: str) -> None:
    """How teachers' prompts are laid out: of teachers that there are, and without contradiction."""
    for domain, chat in s.teacher_chat.items():
        where = f"{field}.teacher_chat.{domain}"
        one_of(f"{field}.teacher_chat", domain, s.teachers)
        if s.teachers[domain] == "fixed_negative":
            raise ValueError(f"{where}: the control 'fixed_negative' reads nothing; leave it out")
        if chat.template in ("", STUDENT) and (chat.system or chat.thinking != "default"):
            raise ValueError(
                f"{where}: system={chat.system!r}, thinking={chat.thinking!r} mean nothing with "
                f"template={chat.template!r}; name a template, e.g. 'own', or leave them out"
            )


def _same_shape(x: Experiment, one: str, other: str) -> bool:
    """Whether two entries of `models` describe the same weights; they may compute differently."""
    a, b = x.models[one], x.models[other]
    return (a.preset, a.hf) == (b.preset, b.hf)


def _check_kept(x: Experiment, where: str, source) -> None:
    """A step asked for must be one that the stage reaches and keeps a checkpoint of."""
    if source.step is None:
        return
    budget = x.stages[source.name].steps
    if source.step > budget:
        raise ValueError(
            f"{where} wants step {source.step} of stage {source.name!r}, which ends at "
            f"{budget}; name an earlier one or raise stages.{source.name}.steps"
        )
    if source.step in x.checkpoint.keep_steps:
        return
    raise ValueError(
        f"{where} wants step {source.step} of stage {source.name!r}, whose checkpoint may be gone "
        f"by then; add {source.step} to checkpoint.keep_steps={x.checkpoint.keep_steps}"
    )


def _check_division(s: Stage, field: str, batch_shards: int) -> None:
    pieces = s.micro_batches * batch_shards
    if s.prompts % pieces:
        raise ValueError(
            f"{field}.prompts={s.prompts} does not divide into {s.micro_batches} micro-batch(es) "
            f"over {batch_shards} device(s) of the data and fsdp axes; make it a multiple of "
            f"{pieces}"
        )


def check_ranges(s: Stage, field: str, quotas: Mapping[str, int], batch_shards: int) -> None:
    """Rows of one teacher are a sub-batch of their own, and must divide as the batch does.

    Args:
      s: the stage.
      field: its path in the config.
      quotas: domain -> its prompts in every batch.
      batch_shards: devices that share a batch.

    Raises:
      ValueError: names the domain, its prompts and the number they must divide by.
    """
    for domain, quota in quotas.items():
        if quota == 0:
            raise ValueError(
                f"{field}.domains.{domain}: no prompt of the batch; leave the domain out"
            )
    if not _needs_teacher(s) or len(quotas) == 1:
        return
    pieces = batch_shards * (s.micro_batches if s.algorithm == "opd" else 1)
    for domain, quota in quotas.items():
        if quota % pieces:
            raise ValueError(
                f"{field}.domains.{domain}: {quota} of {s.prompts} prompts do not divide into "
                f"{pieces} equal pieces (micro-batches times devices); change prompts or weights"
            )


def _needs_teacher(s: Stage) -> bool:
    return s.algorithm == "opd" or (s.algorithm == "sft" and s.sft.source == "teacher")


def check_model(config: ModelConfig, name: str, tokenizer: tokenizers.Tokenizer) -> None:
    """The model must have a row for every token that the tokenizer can produce."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"models.{name} has {config.vocab_size} rows in its vocabulary, the tokenizer has "
            f"{tokenizer.vocab_size} tokens; use the tokenizer that the model was made with"
        )


def check_stop_tokens(s: Stage, field: str, tokenizer: tokenizers.Tokenizer) -> None:
    """A class of stop tokens must be of the tokenizer's tokens, and hold one of its stops."""
    for ids in s.opd.stop_token_classes:
        where = f"{field}.opd.stop_token_classes: {ids}"
        if beyond := [i for i in ids if not 0 <= i < tokenizer.vocab_size]:
            raise ValueError(f"{where}: the tokenizer has no token {beyond}")
        if set(tokenizer.stop_ids).isdisjoint(ids):
            raise ValueError(
                f"{where}: none of them ends a completion; the tokenizer stops at "
                f"{sorted(tokenizer.stop_ids)}, name one of these"
            )


def check_length(config: ModelConfig, field: str, columns: int) -> None:
    """Prompt and completion must fit into the model's context."""
    if columns > config.max_length:
        raise ValueError(
            f"{field}: prompt and completion take up to {columns} tokens, the model was made for "
            f"{config.max_length}; lower prompt_buckets or sampling.max_new_tokens"
        )


def check_teacher(
    teacher: Teacher,
    field: str,
    student: ModelConfig,
    columns: int,
) -> None:
    """A teacher must speak of the student's tokens and be able to see every row to its end."""
    if teacher.params is None:
        return
    check_length(teacher.config, f"{field} (the teacher)", columns)
    theirs, ours = teacher.config.tokens, student.tokens
    if theirs != ours:
        raise ValueError(
            f"{field}: the teacher's vocabulary has {theirs} tokens, the student's {ours}; they "
            "must be the same for log-probs to be compared"
        )


def check_window(spec: str, field: str, columns: int) -> None:
    """`check_length` of a teacher from outside, before any stage is trained."""
    source = parse(spec, field)
    if source.kind == "hf":
        check_length(hf.read_config(source.name), f"{field} (the teacher)", columns)


def check_source(
    spec: str,
    field: str,
    tokenizer: tokenizers.Tokenizer,
    *,
    teaches: bool,
    stop_token_classes: Sequence[Sequence[int]] = (),
) -> None:
    """Weights from outside: they must be there, and speak of the student's tokens.

    A teacher's vocabulary may end sooner or later than the student's: see vocabulary.py.

    Args:
      spec: an `init` or a teacher, as teachers.py describes them.
      field: its path in the config.
      tokenizer: the experiment's.
      teaches: whether they score the student; then they must also stop where it does.
      stop_token_classes: tokens that count as one in the stage.

    Raises:
      ValueError: names the field, and the first token or the stop tokens that differ.
    """
    source = parse(spec, field)
    try:
        if source.kind == "hf":
            hf.read_config(source.name)
            vocabulary.check_folder(source.name, tokenizer, teaches, stop_token_classes)
        elif source.kind == "orbax":
            meta = checkpoint.load_meta(source.name, source.step)
            if meta["tokenizer"] != tokenizer.fingerprint():
                raise ValueError("it was trained with another tokenizer than this experiment's")
    except (ValueError, OSError, checkpoint.CheckpointError) as error:
        raise ValueError(f"{field}={spec!r}: {error}") from error


def check_ratio(ctx: Context, params: Params, prompt: PromptBatch) -> float:
    """Samples once with the real weights and scores the same tokens: their ratio must be 1.

    Returns:
      The largest |difference| in nats.

    Raises:
      ValueError: it is more than rounding.
    """
    rollout_step = steps.make_rollout_step(ctx.config, ctx.stage.sampling)
    rollout, _ = rollout_step(params, prompt, rng.stream(ctx.seed, "control"))
    score = steps.make_score_step(
        ctx.config, ctx.stage.sampling.temperature, config_top_k(ctx.stage)
    )
    apart_BR = score(params, rollout).logp_BR - rollout.logp_BR
    worst = float(jnp.abs(jnp.where(rollout.mask_BR, apart_BR, 0)).max())
    limit = RATIO_TOLERANCE[ctx.config.dtype]
    if not worst <= limit:
        raise ValueError(
            f"sampler and scorer disagree on the same weights by up to {worst:.3g} nats a token "
            f"(ratio {math.exp(min(worst, 50)):.3g}, limit {limit} for {ctx.config.dtype}). Look "
            "at the model's config (rope_theta, head_dim, norm_eps) and its dtype before training"
        )
    return worst


def config_top_k(stage: config.Stage) -> int:
    """The top-k size that the stage's own score step uses, so that the check compiles no other."""
    return stage.opd.top_k if stage.algorithm == "opd" and stage.opd.loss == "sampled" else 0


def batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Devices that share a batch."""
    return math.prod(mesh.shape[axis] for axis in sharding.BATCH)
