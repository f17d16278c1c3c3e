"""Cold start: a teacher that thinks in steps, a student that answers at once; OPD with and without.

    python -m opd_jax.main --config=configs/cold_start.py --workdir=runs/cold_start

The teacher is a wider model trained on worked solutions; the student was trained on terse ones, so
their thinking patterns differ and their likeliest tokens hardly overlap. `direct` distils at once;
`cold` first fine-tunes the student on the teacher's right rollouts (their generation is counted),
and `warm` distils from there. The report shows the overlap of both (arXiv 2604.13016, sec. 5). With
these short budgets the overlap rises as the paper says, and accuracy does not yet (see
experiments/LOG.md).
"""

from ml_collections import ConfigDict

from configs import base

NEW_TOKENS = 24  # Worked solutions of two-digit sums take up to 20.


def get_config() -> ConfigDict:
    """teacher, student, direct OPD; cold start and OPD after it."""
    domains, levels = {"arithmetic": 1.0}, (1, 2)
    sampling = {"samples": 1, "max_new_tokens": NEW_TOKENS}
    last = {"select": "last"}
    pretrain = {
        "init": "scratch",
        "domains": domains,
        "prompts": 128,
        "sampling": sampling,
        "optimizer": {"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 50},
        "stop": last,
    }
    teacher = {"teachers": {"arithmetic": "stage:teacher"}, "domains": domains, "prompts": 64,
               "sampling": sampling, "stop": last}  # fmt: skip
    opd = teacher | {"steps": 60, "optimizer": {"learning_rate": 1e-3}}
    stages = {
        "teacher": base.stage(
            "sft", model="wide", steps=500, **(pretrain | {"sft": {"style": "worked"}})
        ),
        "base": base.stage("sft", steps=250, **(pretrain | {"sft": {"style": "terse"}})),
        "direct": base.stage("opd", init="stage:base", **opd),
        "cold": base.stage(
            "sft",
            init="stage:base",
            steps=60,
            **(teacher | {"sft": {"source": "teacher", "reject_wrong": True},
                          "optimizer": {"learning_rate": 1e-3}}),
        ),
        "warm": base.stage("opd", init="stage:cold", **opd),
    }  # fmt: skip
    return base.experiment(
        "cold_start",
        models={"student": {"preset": "nano"}, "wide": {"preset": "nano_wide"}},
        domains={"arithmetic": {"source": "arithmetic", "levels": levels}},
        plan=tuple(stages),
        stages=stages,
        routes={"cold_start": ("cold", "warm"), "direct": ("direct",)},
        baseline="base",
        prompt_buckets=(8,),
        evaluation={"every": 20, "validation_problems": 128, "test_problems": 384, "batch": 128},
        checkpoint={"every": 1000},
    )
