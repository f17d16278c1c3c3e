"""The miniature's recipe, from which the sweeps of this folder are built: sizes and stages."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from configs import base
from opd_jax.config import one_of

COMPLETION_TOKENS = 12
DOMAINS = ("arithmetic", "program", "countdown", "logic")


@dataclasses.dataclass(frozen=True)
class Size:
    """How much of everything: what differs between a real run and one that only has to end."""

    sft_steps: int
    grpo_steps: int
    opd_steps: int
    early: int  # A GRPO step that still teaches, long before the last.
    sft_prompts: int
    grpo_prompts: int
    opd_prompts: int
    every: int  # Updates between evaluations, and between checkpoints.
    problems: int  # Held-out problems per split and domain.
    seeds: tuple[int, ...]


SIZES = {
    "full": Size(
        sft_steps=1000, grpo_steps=100, opd_steps=40, early=20, sft_prompts=128, grpo_prompts=32,
        opd_prompts=64, every=20, problems=512, seeds=(0, 1, 2),
    ),
    # Its accuracies mean nothing.
    "smoke": Size(
        sft_steps=2, grpo_steps=2, opd_steps=1, early=1, sft_prompts=8, grpo_prompts=4,
        opd_prompts=4, every=1, problems=4, seeds=(0,),
    ),
}  # fmt: skip


def size(name: str) -> Size:
    """The size of a name; raises ValueError if there is none."""
    one_of("size", name, SIZES)
    return SIZES[name]


def sft(size: Size, domains: tuple[str, ...], **changes: Any) -> ConfigDict:
    """A model from nothing, by the domains' own solutions."""
    return base.stage(
        "sft",
        init="scratch",
        domains=equal(domains),
        steps=size.sft_steps,
        prompts=size.sft_prompts,
        sampling={"samples": 1, "max_new_tokens": COMPLETION_TOKENS},
        optimizer={"learning_rate": 2e-3},
        # The base is left partly competent; it is not chosen for being the best one.
        stop={"select": "last"},
        **changes,
    )


def grpo(size: Size, domains: tuple[str, ...]) -> ConfigDict:
    """GRPO from the base: an expert of one domain, or the joint model of several."""
    return base.stage(
        "grpo",
        init="stage:base",
        domains=equal(domains),
        steps=size.grpo_steps,
        prompts=size.grpo_prompts,
        sampling={"samples": 8, "max_new_tokens": COMPLETION_TOKENS},
        optimizer={"learning_rate": 3e-4},
    )


def opd(size: Size, teachers: Mapping[str, str]) -> ConfigDict:
    """Distillation into the base, from the teacher of each domain."""
    return base.stage(
        "opd",
        init="stage:base",
        domains=equal(tuple(teachers)),
        teachers=dict(teachers),
        steps=size.opd_steps,
        prompts=size.opd_prompts,
        sampling={"samples": 1, "max_new_tokens": COMPLETION_TOKENS},
        optimizer={"learning_rate": 1e-3},
    )


def experiment(
    name: str,
    size: Size,
    domains: tuple[str, ...],
    stages: Mapping[str, ConfigDict],
    **changes: Any,
) -> ConfigDict:
    """An experiment on some domains; `changes` as for `configs.base.experiment`."""
    return base.experiment(
        name,
        domains={domain: {"source": domain} for domain in domains},
        stages=stages,
        baseline="base",
        prompt_buckets=(24,),
        evaluation={
            "every": size.every,
            "validation_problems": size.problems,
            "test_problems": size.problems,
            "batch": min(size.problems, 256),
        },
        checkpoint={"every": size.every, "keep_steps": (size.early, size.grpo_steps)},
        **changes,
    )


def equal(domains: tuple[str, ...]) -> dict[str, float]:
    """The same share of each batch for every domain."""
    return {domain: 1 / len(domains) for domain in domains}
