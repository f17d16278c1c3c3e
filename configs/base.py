"""Building blocks of configs: complete sections, so that any field can be set as a flag.

The fields and their meaning are in opd_jax/config.py; a config file only says what differs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from opd_jax import config


def stage(algorithm: str, *, init: str, domains: Mapping[str, float], **changes: Any) -> ConfigDict:
    """A stage with all its fields; `changes` may be nested: `optimizer={"b2": 0.95}`."""
    default = config.Stage(algorithm=algorithm, init=init, domains=dict(domains), teachers={})
    return section(default, changes)


def experiment(
    name: str,
    *,
    stages: Mapping[str, ConfigDict],
    domains: Mapping[str, Mapping[str, Any]],
    models: Mapping[str, Mapping[str, Any]] | None = None,
    **changes: Any,
) -> ConfigDict:
    """An experiment with all its fields.

    Args:
      name: what the report calls it.
      stages: name -> `stage(...)`; the plan is their order unless `plan` is among the changes.
      domains: name -> fields of DomainSettings.
      models: name -> fields of ModelSettings; by default the miniature's student.
      **changes: other fields of Experiment, sections as nested dicts.
    """
    default = config.Experiment(
        name=name,
        seed=0,
        tokenizer="nano",
        models={},
        domains={},
        plan=tuple(stages),
        stages={},
        routes={},
        baseline="",
    )
    c = section(default, changes)
    models = {"student": {"preset": "nano"}} if models is None else models
    with c.unlocked():
        c.stages = ConfigDict(dict(stages))
        c.domains = ConfigDict({k: section(config.DomainSettings(**v)) for k, v in domains.items()})
        c.models = ConfigDict({k: section(config.ModelSettings(**v)) for k, v in models.items()})
    return c


def section(default: Any, changes: Mapping[str, Any] | None = None) -> ConfigDict:
    """A dataclass as a ConfigDict, with some fields changed; an unknown field is an error."""
    c = ConfigDict(dataclasses.asdict(default))
    c.lock()
    _update(c, changes or {})
    return c


def _update(c: ConfigDict, changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        nested = isinstance(c[key], ConfigDict) and len(c[key])
        if nested and isinstance(value, (Mapping, ConfigDict)):
            _update(c[key], value)
        elif isinstance(value, Mapping):
            c[key] = ConfigDict(value)
        else:
            c[key] = value
