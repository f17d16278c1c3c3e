"""Building blocks of configs: complete sections, so that every field can be set on the command line.

The fields and their meaning are in opd_jax/config.py; a config file only says what differs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from opd_jax import config


def stage(algorithm: str, *, init: str, domains: Mapping[str, float], **changes: Any) -> ConfigDict:
    """A stage with all its fields; `changes` may be nested, e.g. `optimizer={"learning_rate": 1e-4}`."""
    default = config.Stage(algorithm=algorithm, init=init, domains=dict(domains), teachers={})
    return section(default, changes)


def experiment(name: str, **changes: Any) -> ConfigDict:
    """An experiment with all its fields: the miniature's student, tokenizer and domains by default."""
    default = config.Experiment(
        name=name,
        seed=0,
        tokenizer="nano",
        models={"student": config.ModelSettings(preset="nano")},
        domains={},
        plan=(),
        stages={},
        routes={},
        baseline="",
    )
    c = section(default, {k: v for k, v in changes.items() if k not in ("stages", "models", "domains")})
    c.stages = ConfigDict(changes.get("stages", {}))
    c.domains = ConfigDict(
        {k: section(config.DomainSettings(**v)) for k, v in changes.get("domains", {}).items()}
    )
    c.models = ConfigDict(
        {
            k: section(config.ModelSettings(**v))
            for k, v in changes.get("models", {"student": {"preset": "nano"}}).items()
        }
    )
    return c


def section(default: Any, changes: Mapping[str, Any] | None = None) -> ConfigDict:
    """A dataclass as a ConfigDict, with some fields changed; an unknown field is an error."""
    c = ConfigDict(dataclasses.asdict(default))
    c.lock()
    _update(c, changes or {})
    return c


def _update(c: ConfigDict, changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, (Mapping, ConfigDict)) and isinstance(c[key], ConfigDict) and len(c[key]):
            _update(c[key], value)
        elif isinstance(value, Mapping):
            c[key] = ConfigDict(value)
        else:
            c[key] = value
