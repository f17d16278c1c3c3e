"""The points of a sweep: what each runs, and which of their stages are the same.

A point is a config file with some of its fields changed and a seed: exactly what `opd_jax.main`
takes on its command line.
"""

import dataclasses
import hashlib
import importlib.util
import inspect
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from opd_jax import config as config_lib
from opd_jax import guards
from opd_jax.config import Experiment, one_of
from opd_jax.teachers import parse

# Fields of an experiment that no stage's numbers depend on, or that a stage names for itself.
_NOT_SHARED = ("name", "plan", "stages", "routes", "baseline", "models", "domains", "runtime")


@dataclasses.dataclass(frozen=True)
class Point:
    """One run: a config file, what to change in it, a seed. Runs of one name are one table row."""

    name: str
    config: str  # As --config takes it: a path, and after a colon the argument of its get_config.
    overrides: Mapping[str, Any]  # Dotted path of a field that the config has -> value.
    seed: int

    @property
    def folder(self) -> str:
        """Its place in the sweep's workdir."""
        return f"{self.name}-seed{self.seed}"


def grid(config: str, points: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> list[Point]:
    """Every named set of overrides with every seed, over one config file."""
    return [Point(name, config, points[name], seed) for name in points for seed in seeds]


def load(path: str, function: str) -> Any:
    """What a function of a Python file returns; the path may carry its argument after a colon.

    Raises:
      ValueError: there is no such file or function, or the function takes no argument.
    """
    file, colon, argument = path.partition(":")
    if not os.path.isfile(file):
        raise ValueError(f"{path!r}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(pathlib.Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path!r}: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    one_of(f"function of {file}", function, vars(module))
    called = vars(module)[function]
    if colon and not inspect.signature(called).parameters:
        raise ValueError(f"{path!r}: {function} of {file} takes no argument, got {argument!r}")
    return called(*[argument] * bool(colon))


def check(points: Sequence[Point]) -> list[Experiment]:
    """The experiments of all points, before any compute is spent.

    Raises:
      ValueError: a name cannot be a folder's, a point stands there twice, or its config is wrong.
    """
    folders = [point.folder for point in points]
    for point in points:
        if not re.fullmatch(r"[\w.-]+", point.name):
            raise ValueError(f"point {point.name!r}: use letters, digits, '_', '-' and '.' only")
        if folders.count(point.folder) > 1:
            raise ValueError(f"point {point.name}, seed {point.seed}, stands in the sweep twice")
    return [experiment(point) for point in points]


def experiment(point: Point) -> Experiment:
    """The point's parsed config, with all that can be checked before it runs.

    Raises:
      ValueError: names the point and what is wrong with it.
    """
    try:
        config: ConfigDict = load(point.config, "get_config")
        for path, value in [("seed", point.seed), *point.overrides.items()]:
            *parents, field = path.split(".")
            section = config
            for key in parents:
                one_of(f"override {path}", key, section)
                section = section[key]
            one_of(f"override {path}", field, section)
            section[field] = value
        parsed = config_lib.parse(config)
        guards.check_experiment(parsed, 1)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"point {point.name}: {error}") from error
    return parsed


def arguments(point: Point, workdir: str) -> list[str]:
    """The flags with which opd_jax.main runs a point in its folder of a sweep's workdir."""
    changed = {"seed": point.seed, **point.overrides}
    return [
        f"--config={point.config}",
        *(f"--config.{path}={_as_flag(value)}" for path, value in changed.items()),
        f"--workdir={os.path.join(workdir, point.folder)}",
    ]


def _as_flag(value: Any) -> str:
    """A value as config_flags reads it; tuples in double quotes, which shells leave readable."""
    if isinstance(value, tuple):
        return f"({', '.join(json.dumps(item) for item in value)},)"
    return str(value)


def stage_folders(x: Experiment) -> dict[str, str]:
    """A folder name per stage of the plan, the same for stages that come out the same."""
    plain = json.loads(json.dumps(dataclasses.asdict(x)))
    common = {key: value for key, value in plain.items() if key not in _NOT_SHARED}
    names: dict[str, str] = {}
    for name in x.plan:
        stage = x.stages[name]
        vectors = (f"stage:{other}" for other in stage.task_vectors)
        sources = [parse(spec, name) for spec in (stage.init, *vectors, *stage.teachers.values())]
        identity = [
            common,
            plain["stages"][name],
            plain["models"][stage.model],
            {domain: plain["domains"][domain] for domain in stage.domains},
            [names[source.name] for source in sources if source.kind == "stage"],
        ]
        # Keys are not sorted: the order of domains is the order of rows in a batch.
        names[name] = f"{name}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]}"
    return names
