"""What a run left on disk, read into memory: plan.json and, per stage, metrics, evals and result.

Nothing here needs a model or an accelerator: a report can be made anywhere from a copied workdir.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

PLAN_KEYS = ("name", "seed", "config", "versions", "stages", "routes", "baseline")
STAGE_KEYS = ("name", "algorithm", "init", "domains", "teachers")
_EVAL_POINT = ("step", "split", "domain", "flops_total", "greedy")
_EVAL_PROBLEMS = ("id", "level", "correct", "length", "truncated")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One domain's held-out problems at one point of a stage, n samples each."""

    step: int
    split: str
    domain: str
    flops: float  # training FLOPs of the stage so far.
    greedy: bool
    id_P: np.ndarray
    level_P: np.ndarray
    correct_Pn: np.ndarray
    length_Pn: np.ndarray  # completion tokens.
    truncated_Pn: np.ndarray


@dataclasses.dataclass(frozen=True)
class StageRecords:
    """One stage of the plan; `result` is None until the stage is finished."""

    name: str
    algorithm: str
    domains: Mapping[str, float]
    teachers: Mapping[str, str]
    metrics: Sequence[dict[str, Any]]
    evaluations: Sequence[Evaluation]
    result: Mapping[str, Any] | None

    def held_out(self, *, greedy: bool, split: str = "test") -> dict[int, dict[str, Evaluation]]:
        """Evaluations by step, in order, then by domain."""
        found: dict[int, dict[str, Evaluation]] = {}
        for evaluation in sorted(self.evaluations, key=lambda e: e.step):
            if evaluation.split == split and evaluation.greedy == greedy:
                found.setdefault(evaluation.step, {})[evaluation.domain] = evaluation
        return found

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, where it was logged; both empty if it never was."""
        rows = [
            (row["step"], row["metrics"][metric])
            for row in self.metrics
            if metric in row["metrics"]
        ]
        step_T, value_T = np.array(rows, np.float64).reshape(-1, 2).T
        return step_T, value_T

    def teacher_names(self, metric: str) -> list[str]:
        """The NAMEs under which `metric/NAME` was logged, in order of appearance."""
        prefix = f"{metric}/"
        keys = (key for row in self.metrics for key in row["metrics"] if key.startswith(prefix))
        return [key.removeprefix(prefix) for key in dict.fromkeys(keys)]


@dataclasses.dataclass(frozen=True)
class Records:
    """A workdir. `notes` say in words what could not be read."""

    plan: Mapping[str, Any]
    stages: Mapping[str, StageRecords]
    notes: Sequence[str]
    # Domain -> sizes of its splits and what they had in common; empty in older workdirs.
    problems: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether accuracy is that of greedy answers: only if no sampled test answers exist.

        One choice for the whole workdir, so that no sampled number stands beside a greedy one.
        """
        test = [e for s in self.stages.values() for e in s.evaluations if e.split == "test"]
        return bool(test) and all(e.greedy for e in test)

    def at_step(self, name: str, step: int) -> dict[str, Evaluation]:
        """A stage's test evaluations at a step, by domain; empty if there are none."""
        held_out = self.stages[name].held_out(greedy=self.greedy)
        return held_out.get(step, {})

    def at_selected(self, name: str | None) -> dict[str, Evaluation]:
        """A finished stage's test evaluations at its selected step; empty for any other name."""
        if name not in self.stages or self.stages[name].result is None:
            return {}
        return self.at_step(name, self.stages[name].result["selected_step"])

    def flops_total(self, name: str) -> float | None:
        """Training FLOPs of a stage; None until it is finished."""
        result = self.stages[name].result
        return None if result is None else result["flops_total"]

    def teacher_stage(self, spec: str) -> str | None:
        """The stage behind a teacher `stage:NAME[@step]`; None for teachers from elsewhere."""
        name = spec.removeprefix("stage:").partition("@")[0]
        return name if spec.startswith("stage:") and name in self.stages else None

    def teacher_step(self, spec: str) -> int | None:
        """The step of a teacher from a stage: the one named, or the one the stage selected."""
        name = self.teacher_stage(spec)
        if name is None or self.stages[name].result is None:
            return None
        named = spec.partition("@")[2]
        return int(named) if named.isdecimal() else self.stages[name].result["selected_step"]


def read(workdir: str) -> Records:
    """Reads every record under `workdir`, of finished and of unfinished stages.

    A step logged twice (a run killed after its last checkpoint does it again) counts once, as last
    written. A line that is not JSON, as a kill leaves behind, is left out and noted.

    Raises:
        FileNotFoundError: if there is no plan.json.
        ValueError: if plan.json lacks a key, or an evaluation is not rectangular.
    """
    root = epath.Path(workdir)
    path = root / "plan.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing; give the --workdir of a run that has started")
    plan = json.loads(path.read_text())
    _require(plan, PLAN_KEYS, str(path))
    notes: list[str] = []
    stages = {}
    for spec in plan["stages"]:
        _require(spec, STAGE_KEYS, f"{path}: stages")
        stages[spec["name"]] = _read_stage(root / spec["name"], spec, notes)
    for route, members in plan["routes"].items():
        for name in members:
            if name not in stages:
                raise ValueError(
                    f"{path}: route {route!r} names stage {name!r}; known stages: {list(stages)}"
                )
    found = root / "problems.json"
    problems = json.loads(found.read_text()) if found.exists() else {}
    return Records(plan, stages, notes, problems)


def _read_stage(folder: epath.Path, spec: Mapping[str, Any], notes: list[str]) -> StageRecords:
    metrics = {row["step"]: row for row in _read_lines(folder / "metrics.jsonl", notes)}
    evaluations = {}
    for row in _read_lines(folder / "evals.jsonl", notes):
        evaluation = _evaluation(row, str(folder / "evals.jsonl"))
        key = (evaluation.step, evaluation.split, evaluation.domain, evaluation.greedy)
        evaluations[key] = evaluation
    result = folder / "result.json"
    return StageRecords(
        name=spec["name"],
        algorithm=spec["algorithm"],
        domains=spec["domains"],
        teachers=spec["teachers"] or {},
        metrics=[metrics[step] for step in sorted(metrics)],
        evaluations=list(evaluations.values()),
        result=json.loads(result.read_text()) if result.exists() else None,
    )


def _read_lines(path: epath.Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            notes.append(f"{path.parent.name}/{path.name}, line {number}: not JSON, left out.")
    return rows


def _evaluation(row: Mapping[str, Any], where: str) -> Evaluation:
    _require(row, _EVAL_POINT + _EVAL_PROBLEMS, where)
    at = f"{where}: step {row['step']}, {row['split']}, {row['domain']}"
    id_P = np.asarray(row["id"], np.int64)
    arrays = {}
    for field in ("correct", "length", "truncated"):
        if len({len(samples) for samples in row[field]}) != 1 or len(row[field]) != id_P.size:
            raise ValueError(
                f"{at}: {field!r} must hold the same number of samples for each of the "
                f"{id_P.size} problems in 'id'"
            )
        arrays[f"{field}_Pn"] = np.asarray(row[field], np.float64)
    if np.unique(id_P).size != id_P.size:
        raise ValueError(f"{at}: 'id' names a problem twice; ids are unique within a domain")
    return Evaluation(
        step=row["step"],
        split=row["split"],
        domain=row["domain"],
        flops=row["flops_total"],
        greedy=row["greedy"],
        id_P=id_P,
        level_P=np.asarray(row["level"]),
        **arrays,
    )


def _require(mapping: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    missing = [key for key in keys if key not in mapping]
    if missing:
        raise ValueError(f"{where}: missing {missing}; found {sorted(mapping)}")
