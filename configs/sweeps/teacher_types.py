"""Who teaches best? One student on arithmetic, distilled from seven kinds of teacher.

    python -m opd_jax.sweep --sweep=configs/sweeps/teacher_types.py --workdir=runs/teacher_types

    expert           a GRPO run of the same student, at its best step on validation
    self_grpo_early  the same run at an early step
    self_grpo_late   the same run at its last step
    external_wide    a wider model that was only ever trained on solutions
    self, random, fixed_negative   controls: see opd_jax/teachers.py

A route's FLOPs are the teacher's and the distillation's; the early step is charged with the whole
GRPO run that it was taken from. A point is also a config of its own:
`python -m opd_jax.main --config=configs/sweeps/teacher_types.py` runs the first.
"""

from ml_collections import ConfigDict

from configs import recipe
from opd_jax.points import Point, grid

DOMAIN = "arithmetic"
BASE_TARGET, WIDE_TARGET = 0.45, 0.85
FILE = "configs/sweeps/teacher_types.py"


def get_config(size: str = "full") -> ConfigDict:
    """base -> expert -> distilled, and a wide model that no one uses unless a point says so.

    Args:
      size: a key of recipe.SIZES.
    """
    s, domains = recipe.size(size), (DOMAIN,)
    stages = {
        "base": recipe.pretrain(s, domains, target=BASE_TARGET),
        # The whole budget: the late teacher is its last step.
        "expert": recipe.grpo(s, domains, stop={"select": "best"}),
        "wide": recipe.pretrain(s, domains, target=WIDE_TARGET, model="wide"),
        "distilled": recipe.merge(s, {DOMAIN: "stage:expert"}),
    }
    return recipe.experiment(
        "teacher_types",
        s,
        domains,
        stages,
        models={"student": {"preset": "nano"}, "wide": {"preset": "nano_wide"}},
        plan=("base", "expert", "distilled"),
        routes={"distilled": ("expert", "distilled")},
        checkpoint={"every": 1000, "keep_steps": (s.early, s.grpo_steps)},  # Teachers.
    )


def get_sweep(size: str = "full") -> list[Point]:
    """Every kind of teacher, over the seeds of the size."""
    s = recipe.size(size)
    points = {
        "expert": taught_by("stage:expert", "expert"),
        "self_grpo_early": taught_by(f"stage:expert@{s.early}", "expert"),
        "self_grpo_late": taught_by(f"stage:expert@{s.grpo_steps}", "expert"),
        "external_wide": taught_by("stage:wide", "wide"),
        "self": taught_by("self"),
        "random": taught_by("random"),
        # It has no log-probs of its own, so there is nothing for an exact divergence to look at.
        "fixed_negative": taught_by("fixed_negative") | {"stages.distilled.opd.loss": "sampled"},
    }
    return grid(f"{FILE}:{size}", points, s.seeds)


def taught_by(teacher: str, *stages: str) -> dict[str, object]:
    """The overrides for a teacher, and for the stages that make it."""
    return {
        f"stages.distilled.teachers.{DOMAIN}": teacher,
        "plan": ("base", *stages, "distilled"),
        "routes.distilled": (*stages, "distilled"),
    }
