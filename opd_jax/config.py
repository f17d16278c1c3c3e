"""What a config may say: one frozen dataclass per section, every field documented and read.

A config file builds a ConfigDict with these very fields (see configs/base.py), so each can be
overridden on the command line; `parse` turns it into these classes and refuses what it does not
know.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from opd_jax.data.templates import ChatOptions
from opd_jax.domains import Source
from opd_jax.domains.answers import VerifierSettings
from opd_jax.domains.math_answers import EXTRACTORS
from opd_jax.models.config import PROJECTIONS, Lora
from opd_jax.optim import OptimizerSettings
from opd_jax.rewards import RewardSettings
from opd_jax.rollout import Sampling


def one_of(field: str, value: str, allowed: typing.Iterable[str]) -> None:
    """Raises ValueError naming field, value and the nearest allowed one unless value is allowed."""
    allowed = list(allowed)
    if value not in allowed:
        close = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{field}={value!r}: one of {', '.join(allowed)}{hint}")


def at_least(section: str, settings: Any, **lowest: float) -> None:
    """Raises ValueError naming field and value if one of the fields is below its lowest value.

    Example: at_least("stage", stage, steps=1, prompts=1).
    """
    for name, bound in lowest.items():
        value = getattr(settings, name)
        if not value >= bound:
            raise ValueError(f"{section}.{name}={value}: must be at least {bound}")


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """A model by name of preset, or by the directory of a Hugging Face checkpoint."""

    preset: str = ""  # A key of models.config.PRESETS; empty if `hf` is given.
    hf: str = ""  # Directory with config.json; its weights are loaded by init="hf:DIR".
    dtype: str = "float32"  # Of matmuls and activations: "bfloat16" on TPU and GPU.
    remat: str = "matmuls"  # What is kept of a layer: "none" | "matmuls" | "full" (see models).


@dataclasses.dataclass(frozen=True)
class DomainSettings(Source):
    """A family of problems: where they come from, and how a prompt is made of one."""

    template: str = "{prompt}"  # What the model reads: instructions around the problem's text.

    def __post_init__(self):
        super().__post_init__()
        if self.template.count("{prompt}") != 1:
            raise ValueError(f"template={self.template!r}: must hold {{prompt}} once")


@dataclasses.dataclass(frozen=True)
class ChatSettings(ChatOptions):
    """Whether and how prompts are laid out as a conversation; see data/templates.py."""

    # "own": the tokenizer's, of an hf: teacher its folder's; a folder or .jinja file; "": prompts
    # are bare. Of a teacher also "student": it reads the student's prompts, token for token.
    template: str = ""


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

    def __post_init__(self):
        at_least("grpo", self, advantage_eps=0, kl_coefficient=0)
        if self.advantage_ddof not in (0, 1):
            raise ValueError(f"grpo.advantage_ddof={self.advantage_ddof}: one of 0, 1")


@dataclasses.dataclass(frozen=True)
class OpdSettings:
    """Where OPD's signal comes from. See objectives/opd.py."""

    loss: str = "reverse_kl"  # "sampled" | "reverse_kl" | "forward_kl" | "jsd" | "top_k".
    jsd_beta: float = 0.5  # For "jsd": 0 is the forward end, 1 the reverse end.
    top_k: int = 16  # Candidates of the "top_k" loss and of the overlap diagnostics.
    top_k_form: str = "renormalised"  # A key of objectives.opd.TOPK_MODES; paper 2: "renormalised".
    # Ids of tokens that end a turn and mean the same: a base student stops with another one than
    # its instruct teacher. A class counts as one token on both sides; the sampler stops at all.
    stop_token_classes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self):
        named = [token for ids in self.stop_token_classes for token in ids]
        if any(len(ids) < 2 for ids in self.stop_token_classes) or len({*named}) < len(named):
            raise ValueError(
                f"opd.stop_token_classes={self.stop_token_classes}: each must name two tokens or "
                "more, and no token may stand twice; write e.g. ((0, 2),)"
            )
        one_of("opd.loss", self.loss, ("sampled", "reverse_kl", "forward_kl", "jsd", "top_k"))
        at_least("opd", self, top_k=1)
        if not 0 <= self.jsd_beta <= 1:
            raise ValueError(f"opd.jsd_beta={self.jsd_beta}: must be in [0, 1]")


@dataclasses.dataclass(frozen=True)
class SftSettings:
    """Where SFT's completions come from."""

    source: str = "solutions"  # "solutions" of the domain, or "teacher": the teachers' rollouts.
    style: str = "terse"  # Of the solutions.
    reject_wrong: bool = False  # With "teacher": leave out completions that do not verify.

    def __post_init__(self):
        one_of("sft.source", self.source, ("solutions", "teacher"))


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """Train low-rank deltas beside frozen initial weights (models/lora.py)."""

    rank: int = 0  # 0: train all weights.
    alpha: float = 32.0  # Deltas are multiplied by alpha / rank.
    targets: tuple[str, ...] = PROJECTIONS  # Which matrices of every layer.

    def __post_init__(self):
        at_least("lora", self, rank=0)
        self.deltas()

    def deltas(self) -> Lora | None:
        """What a ModelConfig calls `lora`; None if the rank is 0."""
        return Lora(self.rank, self.alpha, self.targets) if self.rank else None


@dataclasses.dataclass(frozen=True)
class StopRule:
    """Stop when validation accuracy has not risen for a while, or is where it was wanted."""

    patience: int = 0  # Evaluations without a new best before stopping; 0: run the whole budget.
    min_delta: float = 0.005  # A new best must be this much better, in accuracy.
    target: float = 0.0  # Validation accuracy at which to stop at once; 0: none.
    select: str = "best"  # Which weights the stage hands on: "best" on validation, or "last".

    def __post_init__(self):
        at_least("stop", self, patience=0, min_delta=0, target=0)
        one_of("stop.select", self.select, ("best", "last"))


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training run."""

    algorithm: str  # "sft" | "grpo" | "opd".
    init: str  # "scratch" | "stage:NAME[@STEP]" | "hf:DIR" | "orbax:DIR".
    domains: dict[str, float]  # Name -> weight; weights are shares of each batch, sum 1.
    teachers: dict[str, str]  # Domain -> teacher (see teachers.py); {} where none is needed.
    # Domain -> how its teacher's prompts are laid out (see teacher_prompts.py). Domains left out:
    # by an hf: teacher's own template, or by the student's where it has none.
    teacher_chat: dict[str, ChatSettings] = dataclasses.field(default_factory=dict)
    # Task vectors (arXiv 2212.04089): an earlier stage, NAME or NAME@STEP -> the share w of what it
    # learnt that the stage starts with: w * (its weights - init's) is added to the initial weights.
    task_vectors: dict[str, float] = dataclasses.field(default_factory=dict)
    model: str = "student"  # A key of `models`.
    # Budget: updates at most (rollouts, with several updates each). 0: nothing is trained, only
    # measured; such a stage makes weights from outside the report's baseline.
    steps: int = 100
    prompts: int = 32  # P, per step.
    sampling: Sampling = dataclasses.field(  # In SFT only R is used.
        default_factory=lambda: Sampling(samples=8, max_new_tokens=12)
    )
    aggregation: str = "token-mean"  # Shared by all algorithms; see objectives/aggregate.py.
    clip_low: float = 0.2  # PPO clip of policy-gradient losses, GRPO's and sampled OPD's alike.
    clip_high: float = 0.28
    dual_clip: float = 0.0  # Above 1: bound on the loss of negative advantages; 0: none.
    mask_truncated: bool = False  # Leave completions that hit the limit out of the loss.
    # A batch of which a larger share hit the limit is warned of, once a stage; 1: never.
    warn_truncated: float = 0.9
    updates_per_rollout: int = 1  # Above 1: off-policy updates, held by the clip.
    micro_batches: int = 1  # Pieces an update is computed in; exact for any number.
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    stop: StopRule = StopRule()
    # Of GRPO; the held-out metric is the bare verifier.
    reward: RewardSettings = dataclasses.field(default_factory=RewardSettings)
    grpo: GrpoSettings = GrpoSettings()
    opd: OpdSettings = OpdSettings()
    sft: SftSettings = SftSettings()
    lora: LoraSettings = LoraSettings()

    def __post_init__(self):
        one_of("stage.algorithm", self.algorithm, ("sft", "grpo", "opd"))
        at_least("stage", self, steps=0, prompts=1, updates_per_rollout=1, micro_batches=1)
        at_least("stage", self, clip_low=0, clip_high=0, warn_truncated=0)
        if not self.domains:
            raise ValueError("stage.domains is empty: name at least one domain and its weight")
        if self.algorithm != "grpo" and self.reward != RewardSettings():
            raise ValueError(
                f"stage.reward={self.reward}: {self.algorithm} does not train on a reward; "
                "leave its defaults"
            )
        if self.reward.overlong_buffer > self.sampling.max_new_tokens:
            raise ValueError(
                f"stage.reward.overlong_buffer={self.reward.overlong_buffer}: must be at most "
                f"sampling.max_new_tokens={self.sampling.max_new_tokens}"
            )


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

    def __post_init__(self):
        at_least("evaluation", self, every=1, validation_problems=1, test_problems=1, batch=1)
        # The sampler knows what it can do; the length is each stage's own.
        Sampling(self.samples, 1, self.temperature, self.top_k, self.top_p)


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """What is kept on disk of each stage."""

    every: int = 20  # Updates between checkpoints; one more is written at the end.
    keep_newest: int = 2  # The best on validation is kept besides.
    keep_steps: tuple[int, ...] = ()  # Updates whose checkpoint stays, e.g. for self-GRPO teachers.

    def __post_init__(self):
        at_least("checkpoint", self, every=1, keep_newest=1)


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Sizes of the mesh axes; one may be -1 and takes the rest of the devices."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class RuntimeSettings:
    """The machine, not the experiment: it changes no result, and a resume may change it."""

    platform: str = ""  # "cpu" | "gpu" | "tpu": refuse to run on another; "": whatever is there.
    multihost: bool = False  # Start jax.distributed: one process per host (docs/launch.md).
    coordinator: str = ""  # host:port of process 0; "": found by JAX (TPU, Slurm, MPI, Kubernetes).
    processes: int = 0  # How many; 0: found by JAX.
    process: int = -1  # Which one this is, from 0; -1: found by JAX.
    host_timeout: float = 1800.0  # Seconds that processes wait for one another before all end.
    compilation_cache: str = ""  # Directory for compiled programs; "": none.
    data_dir: str = "~/.cache/opd_jax/tfds"  # Where problem sets are built on first use.
    progress_seconds: float = 10.0  # Between progress lines where the output is not a terminal.
    verifier_workers: int = 0  # Processes that mark math and code; 0: one for every CPU.
    allow_unsandboxed: bool = False  # Run models' programs also where nothing can shut them in.

    def __post_init__(self):
        at_least("runtime", self, verifier_workers=0, processes=0, process=-1, host_timeout=1)
        if not self.multihost and (self.coordinator or self.processes or self.process >= 0):
            raise ValueError(
                f"runtime.multihost=False, but coordinator={self.coordinator!r}, processes="
                f"{self.processes}, process={self.process}; set runtime.multihost=True"
            )


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
    chat: ChatSettings = ChatSettings()
    stop_strings: tuple[str, ...] = ()  # Texts that end a completion, for base models.
    prompt_overflow: str = "error"  # A prompt over the largest bucket: "error" or "drop" (counted).
    verifiers: VerifierSettings = dataclasses.field(default_factory=VerifierSettings)
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    mesh: MeshSettings = MeshSettings()
    runtime: RuntimeSettings = RuntimeSettings()

    def __post_init__(self):
        if "" in self.stop_strings:
            raise ValueError(f"stop_strings={self.stop_strings}: an empty text stops everything")
        one_of("prompt_overflow", self.prompt_overflow, ("error", "drop"))
        if not self.prompt_buckets or min(self.prompt_buckets) < 1:
            raise ValueError(
                f"prompt_buckets={self.prompt_buckets}: name at least one, of 1 or more"
            )
        for name in self.verifiers.math_extract:
            one_of("verifiers.math_extract", name, EXTRACTORS)


def parse(config: ConfigDict | Mapping[str, Any]) -> Experiment:
    """A ConfigDict (or plain mapping) as an Experiment.

    Raises:
      ValueError: a key is unknown (with the nearest known one), missing, or of the wrong type.
      OSError: the config file could not be read, which config_flags only tells on the first look.
    """
    try:
        plain = config if isinstance(config, Mapping) else config.to_dict()
    except OSError as error:
        raise OSError(" ".join(str(error).split())) from None
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
    if kind is Any:
        return value
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
