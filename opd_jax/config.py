"""What a config may say: one frozen dataclass per section, every field documented and read.

A config file builds a ConfigDict with these very fields (see configs/base.py), so each can be
overridden on the command line; `parse` turns it into these classes and refuses what it does not know.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from opd_jax.optim import OptimizerSettings
from opd_jax.rollout import Sampling


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """A model by name of preset, or by the directory of a Hugging Face checkpoint."""

    preset: str = ""  # A key of models.config.PRESETS; empty if `hf` is given.
    hf: str = ""  # Directory with config.json; its weights are loaded by init="hf:DIR".
    dtype: str = "float32"  # Of matmuls and activations: "bfloat16" on TPU and GPU.
    remat: str = "none"  # "none" | "full".


@dataclasses.dataclass(frozen=True)
class DomainSettings:
    """A family of problems."""

    source: str  # A name in the table of domains, or "jsonl:PATH".
    levels: tuple[int, ...] = (1, 2, 3)  # Difficulties to train and evaluate on.


@dataclasses.dataclass(frozen=True)
class GrpoSettings:
    """Where GRPO's signal comes from. See objectives/grpo.py; VARIANTS there has papers' values."""

    advantage_scale: str = "std"  # "std" | "batch_std" | "none" (Dr.GRPO).
    advantage_ddof: int = 1  # 1: sample's, 0: population's standard deviation.
    advantage_eps: float = 1e-6
    truncated_in_baseline: bool = True  # Whether truncated samples count in mean and std.
    drop_zero_variance: bool = False  # Leave groups of equal rewards out of the loss.
    kl_coefficient: float = 0.0  # Of the KL to the stage's initial weights; 0: no reference.
    kl_kind: str = "k3"  # Estimator of its value; the gradient is the reverse KL's for each.


@dataclasses.dataclass(frozen=True)
class OpdSettings:
    """Where OPD's signal comes from. See objectives/opd.py."""

    loss: str = "reverse_kl"  # "sampled" | "reverse_kl" | "forward_kl" | "jsd" | "top_k".
    jsd_beta: float = 0.5  # For "jsd": 0 is the forward end, 1 the reverse end.
    top_k: int = 16  # Candidates of the "top_k" loss and of the overlap diagnostics.
    top_k_form: str = "renormalised"  # A key of objectives.opd.TOPK_MODES; paper 2: "renormalised".


@dataclasses.dataclass(frozen=True)
class SftSettings:
    """Where SFT's completions come from."""

    source: str = "solutions"  # "solutions" of the domain, or "teacher": the teachers' rollouts.
    style: str = "terse"  # Of the solutions.
    reject_wrong: bool = False  # With "teacher": leave out completions that do not verify.


@dataclasses.dataclass(frozen=True)
class StopRule:
    """Stop when validation accuracy has not risen for a while. The same rule for every stage."""

    patience: int = 0  # Evaluations without a new best before stopping; 0: run the whole budget.
    min_delta: float = 0.005  # A new best must be this much better, in accuracy.
    select: str = "best"  # Which weights the stage hands on: "best" on validation, or "last".


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training run."""

    algorithm: str  # "sft" | "grpo" | "opd".
    init: str  # "scratch" | "stage:NAME[@STEP]" | "hf:DIR" | "orbax:DIR".
    domains: dict[str, float]  # Name -> weight; weights are shares of each batch, sum 1.
    teachers: dict[str, str]  # Domain -> teacher (see teachers.py); {} where none is needed.
    model: str = "student"  # A key of `models`.
    steps: int = 100  # Budget: updates at most (rollouts, with several updates each).
    prompts: int = 32  # P, per step.
    sampling: Sampling = Sampling(samples=8, max_new_tokens=12)  # In SFT only R is used.
    aggregation: str = "token-mean"  # Shared by all algorithms; see objectives/aggregate.py.
    clip_low: float = 0.2  # PPO clip of policy-gradient losses, GRPO's and sampled OPD's alike.
    clip_high: float = 0.28
    dual_clip: float = 0.0  # Above 1: bound on the loss of negative advantages; 0: none.
    mask_truncated: bool = False  # Leave completions that hit the limit out of the loss.
    updates_per_rollout: int = 1  # Above 1: off-policy updates, held by the clip.
    micro_batches: int = 1  # Pieces an update is computed in; exact for any number.
    optimizer: OptimizerSettings = OptimizerSettings()
    stop: StopRule = StopRule()
    grpo: GrpoSettings = GrpoSettings()
    opd: OpdSettings = OpdSettings()
    sft: SftSettings = SftSettings()

    def __post_init__(self):
        one_of("stage.algorithm", self.algorithm, ("sft", "grpo", "opd"))
        one_of("stage.stop.select", self.stop.select, ("best", "last"))
        one_of("stage.sft.source", self.sft.source, ("solutions", "teacher"))
        one_of("stage.opd.loss", self.opd.loss,
               ("sampled", "reverse_kl", "forward_kl", "jsd", "top_k"))  # fmt: skip
        for name in ("steps", "prompts", "updates_per_rollout", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"stage.{name}={getattr(self, name)}: must be at least 1")
        if not self.domains:
            raise ValueError("stage.domains is empty: name at least one domain and its weight")


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Held-out evaluation, on the sampler that trains."""

    every: int = 20  # Updates between evaluations; one is made before the first and at the end.
    validation_problems: int = 256  # Per domain; drive the stop rule and the choice of weights.
    test_problems: int = 512  # Per domain; drive nothing, make the report.
    samples: int = 1  # k of avg@k and pass@k.
    temperature: float = 1.0  # 0: greedy.
    top_k: int = 0
    top_p: float = 1.0
    batch: int = 256  # Prompts sampled at once.


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """What is kept on disk of each stage."""

    every: int = 20  # Updates between checkpoints; one more is written at the end.
    keep_newest: int = 2  # The best on validation is kept besides.
    keep_steps: tuple[int, ...] = ()  # Updates whose checkpoint stays, e.g. for self-GRPO teachers.


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Sizes of the mesh axes; one may be -1 and takes the rest of the devices."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class RuntimeSettings:
    """The machine, not the experiment: none of this changes a result, and a resume may change it."""

    platform: str = ""  # "cpu" | "gpu" | "tpu": refuse to run on another; "": whatever is there.
    multihost: bool = False  # Start jax.distributed: one process per host.
    compilation_cache: str = ""  # Directory for compiled programs; "": none.
    data_dir: str = "~/.cache/opd_jax/tfds"  # Where problem sets are built on first use.
    progress_seconds: float = 10.0  # Between progress lines where the output is not a terminal.


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A whole config."""

    name: str
    seed: int
    tokenizer: str  # "nano", a SentencePiece .model, or a directory with tokenizer.json.
    models: dict[str, ModelSettings]
    domains: dict[str, DomainSettings]
    plan: tuple[str, ...]  # Names of the stages in order.
    stages: dict[str, Stage]
    routes: dict[str, tuple[str, ...]]  # Name -> stages whose FLOPs add up to it.
    baseline: str  # The stage that all routes start from: "before" in the report.
    prompt_buckets: tuple[int, ...] = (32,)  # L: prompts are padded to the smallest that fits.
    prompt_overflow: str = "error"  # A prompt over the largest bucket: "error" or "drop" (counted).
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    mesh: MeshSettings = MeshSettings()
    runtime: RuntimeSettings = RuntimeSettings()

    def __post_init__(self):
        one_of("prompt_overflow", self.prompt_overflow, ("error", "drop"))


def one_of(field: str, value: str, allowed: typing.Iterable[str]) -> None:
    """Raises ValueError naming field, value and the nearest allowed one unless value is allowed."""
    allowed = list(allowed)
    if value not in allowed:
        close = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{field}={value!r}: one of {', '.join(allowed)}{hint}")


def parse(config: ConfigDict | Mapping[str, Any]) -> Experiment:
    """A ConfigDict (or plain mapping) as an Experiment.

    Raises:
      ValueError: a key is unknown (with the nearest known one), missing, or of the wrong type.
    """
    plain = config.to_dict() if isinstance(config, ConfigDict) else config
    return _build(Experiment, plain, "config")


def _build(kind: Any, value: Any, path: str) -> Any:
    """`value` as a `kind`: dataclasses, dicts, tuples, numbers, strings, booleans."""
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, path)
    origin = typing.get_origin(kind)
    if origin is dict:
        _, inner = typing.get_args(kind)
        _require(isinstance(value, Mapping), path, value, "a mapping")
        return {k: _build(inner, value[k], f"{path}.{k}") for k in value}
    if origin is tuple:
        inner = typing.get_args(kind)[0]
        _require(isinstance(value, (tuple, list)), path, value, "a tuple")
        return tuple(_build(inner, v, f"{path}[{i}]") for i, v in enumerate(value))
    if kind is float:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool)
        _require(ok, path, value, "a number")
        return float(value)
    assert not isinstance(kind, types.UnionType), f"{path}: no unions in configs"
    _require(type(value) is kind, path, value, f"of type {kind.__name__}")
    return value


def _build_dataclass(kind: Any, value: Any, path: str) -> Any:
    _require(isinstance(value, Mapping), path, value, "a mapping")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(fields)}"
            raise ValueError(f"{path}.{key}: unknown config key{hint}")
    missing = [
        name for name, f in fields.items()
        if name not in value
        and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise ValueError(f"{path}: missing config key(s) {', '.join(missing)}")
    try:
        return kind(**{k: _build(hints[k], value[k], f"{path}.{k}") for k in value})
    except ValueError as error:
        prefix = "" if str(error).startswith("config") else f"{path}: "
        raise ValueError(f"{prefix}{error}") from None


def _require(ok: bool, path: str, value: Any, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{path}={value!r}: must be {wanted}")
