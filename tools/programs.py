"""The programs that a config runs on its devices, with abstract inputs: nothing is allocated.

Every stage becomes its steps as train.py would call them on a full batch: all prompts in the
longest bucket, all completions at the limit. Weights need not be there, only their shape.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from opd_jax import ledger, steps, teachers
from opd_jax.algorithms import FIXED_NEGATIVE, loss_settings, weighing
from opd_jax.config import Experiment, ModelSettings, Stage
from opd_jax.core import rng, sharding
from opd_jax.core.types import Params, PromptBatch, TrainState
from opd_jax.data import prompts as prompt_data
from opd_jax.data import tokenizer as tokenizers
from opd_jax.losses import Group
from opd_jax.models import hf_config, lora, transformer
from opd_jax.models.config import ModelConfig, preset
from opd_jax.rollout import Sampling
from tools import published

STOP_TOKENS = 2  # Width of the stop-token set; any small number makes the same program.


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted step and what it is called with."""

    kind: str  # "rollout", "score", "update" or "evaluate".
    label: str  # What it does, e.g. "hidden states of hf:Qwen3-8B".
    stages: tuple[str, ...]  # That run it.
    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    flops: float  # By the ledger, on all devices.
    remat_flops: float  # Recomputed besides, by the ledger.
    held_bytes: int  # On one device: what stays there meanwhile, and is no argument.

    @property
    def title(self) -> str:
        """What it is, in one line."""
        return f"{self.kind}: {self.label}"

    @property
    def key(self) -> tuple[int, str]:
        """Equal for programs that compile to the same."""
        return id(self.step), str(jax.tree.map(lambda x: (x.shape, x.dtype), self.arguments))


@dataclasses.dataclass(frozen=True)
class _Models:
    """Shapes of a stage's weights."""

    config: ModelConfig  # Of the student.
    state: TrainState
    base: Params | None
    teachers: Mapping[str, tuple[str, ModelConfig, Params | None]]  # By domain: its spec too.
    reference: Params | None

    @property
    def policy(self) -> Params:
        return lora.join(self.base, self.state.params)

    def held(self, *without: Any) -> int:
        """Bytes that the stage keeps on a device, less those of some trees."""
        mine = {spec: params for spec, _, params in self.teachers.values()}
        everything = (self.state, self.base, mine, self.reference)
        return device_bytes(everything) - sum(map(device_bytes, without))


def of_experiment(x: Experiment, mesh: jax.sharding.Mesh) -> list[Program]:
    """Every program of every stage, those of several stages once.

    Raises:
      ValueError: the shape of a model is not known here; says what would make it so.
    """
    merged: dict[tuple[int, str], Program] = {}
    for name in x.plan:
        for program in _of_stage(x, name, mesh):
            if program.key in merged:
                same = merged[program.key]
                held = max(same.held_bytes, program.held_bytes)
                stages = tuple(dict.fromkeys((*same.stages, name)))
                program = dataclasses.replace(same, stages=stages, held_bytes=held)
            merged[program.key] = program
    return list(merged.values())


def device_bytes(shapes: Any) -> int:
    """Bytes of a tree of laid-out shapes on one device, each leaf counted once."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(shapes)
    )


def model_config(settings: ModelSettings, vocab_size: Callable[[], int]) -> ModelConfig:
    """The shape of a config's model, without its weights; see `published_config`."""
    if settings.preset:
        changes = {"dtype": settings.dtype, "remat": settings.remat}
        return preset(settings.preset, vocab_size(), **changes)
    return published_config(settings.hf).replace(dtype=settings.dtype, remat=settings.remat)


def vocabulary(x: Experiment) -> int:
    """Tokens of the experiment's tokenizer: only a preset needs to know."""
    return tokenizers.load(x.tokenizer).vocab_size


def published_config(folder: str) -> ModelConfig:
    """The shape of the model in a Hugging Face folder: from its config.json, or by its name.

    Raises:
      ValueError: neither is known.
    """
    path = epath.Path(folder).expanduser()
    if (path / hf_config.CONFIG).exists():
        return hf_config.read_config(path)
    if path.name in published.MODELS:
        return published.MODELS[path.name]
    raise ValueError(
        f"hf:{folder}: there is no {hf_config.CONFIG}, and {path.name!r} is none of "
        f"{', '.join(published.MODELS)}; put the model's config.json there (weights are not needed)"
    )


def _of_stage(x: Experiment, name: str, mesh: jax.sharding.Mesh) -> list[Program]:
    stage = x.stages[name]
    models = _models(x, name, mesh)
    prompt = _prompt(mesh, stage.prompts, max(x.prompt_buckets))
    key = _place(mesh, jax.eval_shape(lambda: rng.stream(0, "rollout")))
    make = {"grpo": _grpo, "opd": _opd, "sft": _sft}[stage.algorithm]
    programs = make(stage, models, prompt, key, mesh)
    s = x.evaluation
    sampling = Sampling(s.samples, stage.sampling.max_new_tokens, s.temperature, s.top_k, s.top_p)
    held_out = _prompt(mesh, s.batch, max(x.prompt_buckets))
    programs.append(
        _rollout("evaluate", models.config, models.policy, sampling, held_out, key, models)
    )
    return [dataclasses.replace(p, stages=(name,)) for p in programs]


def _grpo(stage, models, prompt, key, mesh) -> list[Program]:
    sample = _rollout("rollout", models.config, models.policy, stage.sampling, prompt, key, models)
    rollout, _ = _result(mesh, sample.step, *sample.arguments)
    programs, reference_logp = [sample], None
    if models.reference is not None:
        score = steps.make_score_step(models.config, stage.sampling.temperature, 0)
        arguments = (models.reference, rollout)
        reference_logp = _result(mesh, score, *arguments).logp_BR
        flops = ledger.score(models.config, *full_lengths(prompt, stage.sampling))
        held = models.held(models.reference)
        programs.append(Program("score", "reference", (), score, arguments, flops, 0.0, held))
    reward = _array(mesh, (stage.prompts, stage.sampling.samples), jnp.float32, "batch", None)
    signal = steps.make_grpo_step(stage.grpo, *weighing(stage))
    group, _ = _result(mesh, signal, rollout, reward, reference_logp)
    return [*programs, _update(stage, models, [group], prompt, 0.0)]


def _opd(stage, models, prompt, key, mesh) -> list[Program]:
    sample = _rollout("rollout", models.config, models.policy, stage.sampling, prompt, key, models)
    rollout, _ = _result(mesh, sample.step, *sample.arguments)
    whole = _result(mesh, steps.make_weigh_step(*weighing(stage)), rollout, None)
    if loss_settings(stage).kind == "policy_gradient":
        group = _result(mesh, steps.fixed_negative_step, whole)
        return [sample, _update(stage, models, [group], prompt, 0.0)]
    programs, groups, heads = [sample], [], 0.0
    start = 0
    for domain, count in prompt_data.quotas(stage.domains, stage.prompts).items():
        take = steps.make_take_step(start, start + count)
        part = whole if count == stage.prompts else _result(mesh, take, whole)
        start += count
        score, group, head = _taught(stage, models, domain, part, mesh)
        programs, groups, heads = [*programs, score], [*groups, group], heads + head
    return [*programs, _update(stage, models, groups, prompt, heads)]


def _taught(stage, models, domain, part: Group, mesh) -> tuple[Program, Group, float]:
    """How a teacher scores its rows, the rows with what it says, and the FLOPs it leaves to do."""
    settings = loss_settings(stage)
    spec, config, own = models.teachers[domain]
    params = models.policy if own is None else own
    rows = full_lengths(part.rollout.prompt, stage.sampling)
    held, flops = models.held(params), ledger.score(config, *rows)
    if settings.kind == "sampled_token":
        step = steps.make_score_step(
            config, settings.temperature, settings.top_k, settings.stop_token_classes
        )
        group = part.replace(teacher=_result(mesh, step, params, part.rollout))
        label = f"log-probs by {spec}"
        program = Program("score", label, (), step, (params, part.rollout), flops, 0.0, held)
        return program, group, 0.0
    step = steps.make_hidden_step(config)
    head = float(rows[1].sum()) * ledger.head_per_token(config)
    group = part.replace(
        teacher_hidden_BRD=_result(mesh, step, params, part.rollout),
        teacher_table_VD=transformer.unembedding(params),
        teacher_softcap=config.final_softcap,
    )
    label = f"hidden states of {spec}"
    program = Program("score", label, (), step, (params, part.rollout), flops - head, 0.0, held)
    return program, group, head


def _sft(stage, models, prompt, key, mesh) -> list[Program]:
    programs = []
    if stage.sft.source == "teacher":
        quotas = prompt_data.quotas(stage.domains, stage.prompts)
        for domain, count in quotas.items():
            _, config, params = models.teachers[domain]
            some = _prompt(mesh, count, prompt.tokens_PL.shape[1])
            programs.append(_rollout("rollout", config, params, stage.sampling, some, key, models))
    # Completions that are given have the layout of sampled ones.
    step = steps.make_rollout_step(models.config, stage.sampling)
    rollout, _ = _result(mesh, step, models.policy, prompt, key)
    keep = _array(mesh, (rollout.tokens_BR.shape[0],), jnp.bool_, "batch")
    group = _result(mesh, steps.make_weigh_step(*weighing(stage)), rollout, keep)
    return [*programs, _update(stage, models, [group], prompt, 0.0)]


def _rollout(kind, config, params, sampling, prompt, key, models: _Models) -> Program:
    step = steps.make_rollout_step(config, sampling)
    length_P, length_B = full_lengths(prompt, sampling)
    flops = ledger.prefill(config, length_P)
    flops += ledger.decode(config, np.repeat(length_P, sampling.samples), length_B)
    label = f"{len(length_B)} rows, {length_P[0]} + {sampling.max_new_tokens} tokens"
    arguments = (params, prompt, key)
    return Program(kind, label, (), step, arguments, flops, 0.0, models.held(params))


def _update(stage: Stage, models: _Models, groups: list[Group], prompt, heads: float) -> Program:
    step = steps.make_update_step(
        models.config, stage.optimizer, stage.steps * stage.updates_per_rollout,
        loss_settings(stage), stage.micro_batches,
    )  # fmt: skip
    rows = full_lengths(prompt, stage.sampling)
    # Of a teacher that has weights of its own, the table is among the arguments.
    own = {spec: params for spec, _, params in models.teachers.values() if params is not None}
    given = any(g.teacher_table_VD is not None for g in groups)
    tables = [transformer.unembedding(params) for params in own.values() if given]
    return Program(
        kind="update",
        label=f"{len(rows[1])} rows in {len(groups)} group(s), {stage.micro_batches} piece(s) each",
        stages=(),
        step=step,
        arguments=(models.state, groups, models.base),
        flops=ledger.update(models.config, *rows) + heads,
        remat_flops=ledger.remat(models.config, *rows),
        held_bytes=models.held(models.state, models.base, tables),
    )


def _models(x: Experiment, name: str, mesh: jax.sharding.Mesh) -> _Models:
    stage, config = x.stages[name], _stage_config(x, name)
    whole = parameters(config, mesh)
    base, trained = lora.split(whole) if config.lora else (None, whole)
    base = None if base is None else tree_as(base, config.dtype)
    updates = stage.steps * stage.updates_per_rollout
    state = _result(mesh, steps.make_state(stage.optimizer, updates), trained)
    return _Models(
        config=config,
        state=state,
        base=base,
        teachers={
            domain: (spec, *_teacher(x, name, domain, spec, mesh))
            for domain, spec in stage.teachers.items()
        },
        reference=lora.join(base, trained) if stage.grpo.kl_coefficient else None,
    )


def _stage_config(x: Experiment, name: str) -> ModelConfig:
    stage = x.stages[name]
    config = model_config(x.models[stage.model], lambda: vocabulary(x))
    return config.replace(lora=stage.lora.deltas())


def _teacher(x, name, domain, spec, mesh) -> tuple[ModelConfig, Params | None]:
    """A teacher's shape and its weights' layout; None where they are the student's or none."""
    student = _stage_config(x, name)
    source = teachers.parse(spec, f"stages.{name}.teachers.{domain}")
    if source.kind in ("self", FIXED_NEGATIVE):
        return student, None
    if source.kind == "random":
        config = student.replace(lora=None)
        return config, parameters(config, mesh)
    if source.kind == "stage":
        config = _stage_config(x, source.name)
    elif source.kind == "hf":
        config = published_config(source.name).replace(dtype=student.dtype)
    else:
        config = teachers.saved_config(source.name, source.step)
    return config, tree_as(parameters(config, mesh), config.dtype)


def tree_as(shapes: Params, dtype: str) -> Params:
    """The shapes with another dtype."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype), sharding=s.sharding), shapes
    )


def parameters(config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    """Shapes and layouts of a model's fp32 parameters."""
    shapes = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        transformer.shardings(config, mesh),
    )


def _prompt(mesh: jax.sharding.Mesh, P: int, L: int) -> PromptBatch:
    return PromptBatch(
        tokens_PL=_array(mesh, (P, L), jnp.int32, "batch", None),
        length_P=_array(mesh, (P,), jnp.int32, "batch"),
        domain_P=_array(mesh, (P,), jnp.int32, "batch"),
        id_P=_array(mesh, (P,), jnp.uint32, "batch"),
        stop_PS=_array(mesh, (P, STOP_TOKENS), jnp.int32, "batch", None),
    )


def _array(mesh, shape, dtype, *names) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.sharding(mesh, *names))


def full_lengths(prompt: PromptBatch, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of a full batch: of its prompts, and of its completions."""
    P, L = prompt.tokens_PL.shape
    return np.full(P, L), np.full(P * sampling.samples, sampling.max_new_tokens)


def _result(mesh: jax.sharding.Mesh, step: Callable[..., Any], *arguments: Any) -> Any:
    """What a step returns, abstractly and with the layout that it would have."""
    return _place(mesh, jax.eval_shape(step, *arguments))


def _place(mesh: jax.sharding.Mesh, shapes: Any) -> Any:
    def place(x):
        layout = jax.sharding.NamedSharding(
            mesh, x.sharding.spec if x.sharding else sharding.spec()
        )
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    return jax.tree.map(place, shapes)
