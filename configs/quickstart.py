"""Two domains, both routes, on a laptop CPU: GRPO experts merged by OPD, beside joint GRPO.

    python -m opd_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

A 103k-parameter student learns `arithmetic` (sums of one and two digits) and `countdown` (reach a
target from two or three numbers; many right answers) by SFT until it is partly competent; then
GRPO, OPD and the report. About five minutes on two cores.

The merged student starts from the base with four fifths of what each expert learnt (task vectors,
arXiv 2212.04089), and OPD puts right what adding them broke. `configs/quickstart.py:base` is the
papers' merge, from the base alone: four times as many updates for less accuracy (README).
"""

from ml_collections import ConfigDict

from configs import recipe
from opd_jax.config import one_of

MERGING = {"vectors": 0.8, "steps": 200}


def get_config(start: str = "experts") -> ConfigDict:
    """The default experiment.

    Args:
      start: what the merged student starts with: the "base", or what the "experts" learnt too.
    """
    one_of("start", start, ("experts", "base"))
    merging = MERGING if start == "experts" else {}
    return recipe.comparison("quickstart", ("arithmetic", "countdown"), base_target=0.45, **merging)
