"""Who should teach a 1.7B student: a post-trained 8B model, or its own GRPO checkpoints?

    python -m tools.aot --config=configs/qwen3_8b_teachers.py --topology=v5p:4x4x4
    python -m opd_jax.main --config=configs/qwen3_8b_teachers.py --workdir=gs://BUCKET/teachers

For 64 chips of v5p. Needs, in ~/.cache/opd_jax/assets or in the folder after a colon:
`Qwen3-1.7B-Base`, `Qwen3-8B`, `MATH`. The external teacher stops answers with another token than
the base student does, so both count as one (arXiv 2609.20511). `early` and `late` are checkpoints
of the student's own GRPO run.
Its GRPO steps and OPD rollouts were compiled and fit (docs/tpu_pods.md); the OPD updates and the
8B teacher's scoring were not compiled yet, and nothing was run.
"""

from ml_collections import ConfigDict

from configs import qwen3

EARLY = 100


def get_config(assets: str = qwen3.ASSETS) -> ConfigDict:
    """grpo; then OPD from the 8B model, and from two checkpoints of grpo."""
    model = qwen3.folder(assets, "Qwen3-1.7B-Base")
    external = qwen3.folder(assets, "Qwen3-8B")
    same_stop = {"loss": "top_k", "top_k": 16, "stop_token_classes": qwen3.STOPS}
    stages = {
        "grpo": qwen3.grpo(model, {"math": 1.0}),
        "opd_external": qwen3.opd(model, {"math": f"hf:{external}"}, opd=same_stop),
        "opd_early": qwen3.opd(model, {"math": f"stage:grpo@{EARLY}"}),
        "opd_late": qwen3.opd(model, {"math": "stage:grpo"}),
    }
    return qwen3.experiment(
        "qwen3_8b_teachers",
        assets,
        model,
        ("math",),
        stages=stages,
        routes={
            "grpo": ("grpo",),
            "external": ("opd_external",),
            "self_early": ("grpo", "opd_early"),
            "self_late": ("grpo", "opd_late"),
        },
        checkpoint={"every": 20, "keep_steps": (EARLY,)},
        mesh={"data": 1, "fsdp": 16, "tensor": 4},
    )
