"""Where weights come from: scratch, another stage, a Hugging Face directory, an Orbax checkpoint.

    init      scratch | stage:NAME[@STEP] | hf:DIR | orbax:DIR[@STEP]
    teacher   stage:NAME[@STEP] | hf:DIR | orbax:DIR[@STEP], or a control:
              self             the student's current weights: the signal is 0 everywhere
              random           an untrained model of the student's shape
              fixed_negative   no model: the same advantage on the least likely tokens

Without @STEP a stage stands for the weights it selected. An earlier STEP of a GRPO run of the same
student makes a self-GRPO teacher.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from opd_jax import steps
from opd_jax.algorithms import FIXED_NEGATIVE, Teacher
from opd_jax.config import Experiment, ModelSettings
from opd_jax.core import rng, tree
from opd_jax.core.types import Params
from opd_jax.infra import checkpoint, distributed
from opd_jax.models import hf, lora, transformer
from opd_jax.models.config import ModelConfig, preset

CONTROLS = ("self", "random", FIXED_NEGATIVE)
SOURCES = ("stage", "hf", "orbax")


@dataclasses.dataclass(frozen=True)
class Source:
    """A place that weights come from, taken apart: kind, name or path, step."""

    kind: str  # "scratch", one of CONTROLS, or one of SOURCES.
    name: str = ""
    step: int | None = None


def parse(spec: str, field: str) -> Source:
    """Takes a spec apart.

    Raises:
      ValueError: it has none of the forms above; names the field.
    """
    if spec in (*CONTROLS, "scratch"):
        return Source(spec)
    kind, _, rest = spec.partition(":")
    if kind in SOURCES and rest:
        name, at, step = rest.rpartition("@")
        if at and step.isdecimal() and kind != "hf":
            return Source(kind, name, int(step))
        if not at or kind == "hf":
            return Source(kind, rest)
    raise ValueError(
        f"{field}={spec!r}: write scratch, stage:NAME, stage:NAME@STEP, hf:DIR, orbax:DIR, or for "
        f"a teacher one of {', '.join(CONTROLS)}"
    )


def model_config(settings: ModelSettings, vocab_size: int) -> ModelConfig:
    """The ModelConfig that a config's `models` entry describes.

    Raises:
      ValueError: neither or both of preset and hf are given.
    """
    if bool(settings.preset) == bool(settings.hf):
        raise ValueError(f"models: give one of preset and hf, got {settings}")
    if settings.hf:
        return hf.read_config(settings.hf, dtype=settings.dtype, remat=settings.remat)
    return preset(settings.preset, vocab_size, dtype=settings.dtype, remat=settings.remat)


class Weights:
    """Finds and loads weights for the stages of one experiment.

    Frozen bases of LoRA stages are kept: every model that is a delta of the same weights holds the
    same arrays, in the dtype that it computes in.
    """

    def __init__(
        self, experiment: Experiment, workdir: epath.Path, mesh: jax.sharding.Mesh,
        models: Mapping[str, ModelConfig],
    ):  # fmt: skip
        self._experiment, self._workdir, self._mesh, self._models = (
            experiment, workdir, mesh, models,
        )  # fmt: skip
        self._bases: dict[tuple[str, str], Params] = {}  # By the spec and the model's name.

    def config(self, stage_name: str) -> ModelConfig:
        """The model that a stage trains, deltas included."""
        stage = self._experiment.stages[stage_name]
        return self._models[stage.model].replace(lora=stage.lora.deltas())

    def initial(self, stage_name: str) -> tuple[Params, Params | None]:
        """What a stage trains, fp32, and the base that these are deltas of, if they are."""
        stage, seed = self._experiment.stages[stage_name], self._experiment.seed
        config, key = self.config(stage_name), rng.stream(seed, "init")
        if config.lora is not None:
            return steps.make_delta(config, self._mesh)(key), self._base(stage_name)
        source = parse(stage.init, f"stages.{stage_name}.init")
        if source.kind == "scratch":
            return steps.make_init(config, self._mesh)(key), None
        params = initial = self._load(source, config)
        for name, weight in stage.task_vectors.items():
            other = self._load(parse(f"stage:{name}", f"stages.{stage_name}.task_vectors"), config)
            params = steps.add_vector_step(params, initial, other, weight)
        return params, None

    def teachers(self, stage_name: str) -> dict[str, Teacher]:
        """The teachers of a stage by domain; equal specs share one copy of the weights."""
        stage, loaded = self._experiment.stages[stage_name], {}
        for domain, spec in stage.teachers.items():
            if spec not in loaded:
                field = f"stages.{stage_name}.teachers.{domain}"
                loaded[spec] = self._teacher(spec, parse(spec, field), stage_name)
        return {domain: loaded[stage.teachers[domain]] for domain in stage.teachers}

    def _teacher(self, spec: str, source: Source, stage_name: str) -> Teacher:
        manifest: dict[str, Any] = {"spec": spec, "step": source.step, "flops": None}
        student = self._models[self._experiment.stages[stage_name].model]
        config, params = student, None
        if source.kind == "self":
            config = self.config(stage_name)  # Its deltas too, or it would be another model.
        elif source.kind == "random":
            key = rng.stream(self._experiment.seed, "control")
            params = steps.make_init(student, self._mesh)(key)
        elif source.kind == "hf":
            config = hf.read_config(source.name, dtype=student.dtype)
        elif source.kind == "orbax":
            config = saved_config(source.name, source.step)
        elif source.kind == "stage":
            config = self.config(source.name)
            result = read_result(self._workdir / source.name)
            manifest["step"] = result["selected_step"] if source.step is None else source.step
            manifest["flops"] = result["flops_total"]
        if source.kind in SOURCES:
            params = self._serving(source, config)
        manifest["dtype"] = config.dtype
        return Teacher(spec, config, params, manifest)

    def _serving(self, source: Source, config: ModelConfig) -> Params:
        """Weights to score with, in the model's dtype; of a LoRA stage its base is shared."""
        if config.lora is None:
            return tree.cast(self._load(source, config), config.dtype)
        return lora.join(
            self._base(source.name), tree.cast(self._saved(source, config), config.dtype)
        )

    def _base(self, stage_name: str) -> Params:
        """What a LoRA stage starts from, in its model's dtype; one copy however often asked."""
        stage = self._experiment.stages[stage_name]
        if (stage.init, stage.model) not in self._bases:
            source = parse(stage.init, f"stages.{stage_name}.init")
            config = self._models[stage.model]
            whole = tree.cast(self._load(source, config), config.dtype)
            self._bases[stage.init, stage.model] = whole
        return self._bases[stage.init, stage.model]

    def _load(self, source: Source, config: ModelConfig) -> Params:
        """Whole fp32 weights; deltas of a LoRA stage are merged into them."""
        if source.kind == "hf":
            return hf.load_params(source.name, config, transformer.shardings(config, self._mesh))
        if source.kind == "stage" and (adapted := self.config(source.name)).lora is not None:
            both = lora.join(self._base(source.name), self._saved(source, adapted))
            return steps.make_merge(adapted)(both)
        return self._saved(source, config)

    def _saved(self, source: Source, config: ModelConfig) -> Params:
        """The parameters in a checkpoint of ours: of a LoRA stage its deltas alone."""
        directory, step = checkpoints_of(source, self._workdir)
        wanted = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(lambda: transformer.init(config, jax.random.key(0))),
            transformer.shardings(config, self._mesh),
        )
        if config.lora is not None:
            wanted = lora.split(wanted)[1]
        return checkpoint.load_params(directory, step, wanted).state


def checkpoints_of(source: Source, workdir: epath.Path) -> tuple[epath.Path, int | None]:
    """The checkpoint directory and the step that a stage: or orbax: source means."""
    if source.kind == "orbax":
        return epath.Path(source.name), source.step
    stage = workdir / source.name
    step = read_result(stage)["selected_step"] if source.step is None else source.step
    return stage / "checkpoints", step


def saved_config(directory: str, step: int | None) -> ModelConfig:
    """The shape of the model in a checkpoint of ours.

    Raises:
      ValueError: it holds deltas, which mean nothing without their base.
    """
    config = ModelConfig(**checkpoint.load_meta(directory, step)["model"])
    if config.lora is not None:
        raise ValueError(
            f"{directory} holds LoRA deltas without their base; merge them with "
            "`python -m tools.export_hf --checkpoint=WORKDIR/STAGE --out=DIR` and name hf:DIR"
        )
    return config


def read_result(stage_dir: epath.Path) -> dict[str, Any]:
    """The result record of a finished stage.

    Raises:
      ValueError: the stage has not finished.
    """
    path = stage_dir / "result.json"
    found = distributed.from_writer(
        lambda: json.loads(path.read_text()) if path.exists() else None, str(path)
    )
    if found is None:
        raise ValueError(f"{path} is not there: stage {stage_dir.name!r} has not finished")
    return found
