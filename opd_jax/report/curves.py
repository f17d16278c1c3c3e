"""Accuracy against training FLOPs, and what one route saves over another at the same accuracy.

A route's curve is its held-out TEST accuracy (mean over domains) against the route's cumulative
training FLOPs. For a route of several stages it is the curve of the last stage, moved right by the
FLOPs of all earlier ones: the experts have to be paid for before there is anything to merge.

Target: the lower of the two routes' best accuracies on their curves, so that both reach it.
FLOPs at target: by linear interpolation of the curve's running maximum.
Saving: 1 - FLOPs(candidate) / FLOPs(reference), of any sign.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from opd_jax.report import statistics
from opd_jax.report.logs import Evaluation


@dataclasses.dataclass(frozen=True)
class Curve:
    """T evaluation points of a model in training; row 0 of W is measured, the rest resampled."""

    step_T: np.ndarray
    flops_T: np.ndarray
    accuracy_WT: np.ndarray


def accuracy(evaluation: Evaluation, bootstrap: statistics.ProblemBootstrap) -> np.ndarray:
    """avg@k of one evaluation in every draw, [W]."""
    values_P = statistics.avg_at_k(evaluation.correct_Pn)
    return bootstrap.means(evaluation.domain, evaluation.id_P, values_P)


def mean_over_domains(
    evaluations: Mapping[str, Evaluation],
    domains: Sequence[str],
    bootstrap: statistics.ProblemBootstrap,
) -> np.ndarray:
    """Mean of the domains' accuracies, each domain counted once, in every draw, [W]."""
    return np.mean([accuracy(evaluations[d], bootstrap) for d in domains], axis=0)


def common_domains(held_out: Mapping[int, Mapping[str, Evaluation]]) -> list[str]:
    """The domains evaluated at every point, in order of appearance."""
    seen = dict.fromkeys(domain for point in held_out.values() for domain in point)
    return [domain for domain in seen if all(domain in point for point in held_out.values())]


def curve(
    held_out: Mapping[int, Mapping[str, Evaluation]],
    domains: Sequence[str],
    bootstrap: statistics.ProblemBootstrap,
    flops_before: float,
) -> Curve:
    """The curve over `domains` of a stage that starts when `flops_before` are already spent."""
    points = list(held_out.values())
    accuracy_TW = [mean_over_domains(point, domains, bootstrap) for point in points]
    return Curve(
        step_T=np.array(list(held_out)),
        flops_T=flops_before + np.array([point[domains[0]].flops for point in points]),
        accuracy_WT=np.stack(accuracy_TW, axis=1),
    )


def flops_at(flops_T: np.ndarray, accuracy_WT: np.ndarray, target_W: np.ndarray) -> np.ndarray:
    """FLOPs at which the running maximum of accuracy first reaches the target, [W].

    Linear between evaluation points. The first point's FLOPs if the target is met there already;
    infinite if it is never met.
    """
    best_WT = np.maximum.accumulate(accuracy_WT, axis=1)
    reached_WT = best_WT >= target_W[:, None]
    after_W = np.argmax(reached_WT, axis=1)
    before_W = np.maximum(after_W - 1, 0)
    rows_W = np.arange(len(after_W))
    low_W, high_W = best_WT[rows_W, before_W], best_WT[rows_W, after_W]
    rise_W = np.where(high_W > low_W, high_W - low_W, 1.0)
    share_W = np.where(after_W > 0, (target_W - low_W) / rise_W, 0.0)
    flops_W = flops_T[before_W] + share_W * (flops_T[after_W] - flops_T[before_W])
    return np.where(reached_WT.any(axis=1), flops_W, np.inf)


@dataclasses.dataclass(frozen=True)
class Saving:
    """A comparison at matched accuracy, in every draw, [W]."""

    target_W: np.ndarray
    candidate_flops_W: np.ndarray
    reference_flops_W: np.ndarray
    saving_W: np.ndarray


def saving(candidate: Curve, reference: Curve, target: float | None = None) -> Saving:
    """What `candidate` saves over `reference`; negative if it costs more.

    Args:
        candidate: curve of the route in question.
        reference: curve of the route it is measured against, on the same domains and draws.
        target: the accuracy to match; by default the lower of the two best, taken anew in every
            draw. With a fixed target a draw may miss it: the saving is then -inf or 1, or NaN if
            both routes miss it.
    """
    best_W = np.minimum(candidate.accuracy_WT.max(axis=1), reference.accuracy_WT.max(axis=1))
    target_W = best_W if target is None else np.full_like(best_W, target)
    candidate_W = flops_at(candidate.flops_T, candidate.accuracy_WT, target_W)
    reference_W = flops_at(reference.flops_T, reference.accuracy_WT, target_W)
    with np.errstate(divide="ignore", invalid="ignore"):
        saving_W = 1.0 - candidate_W / reference_W
    return Saving(target_W, candidate_W, reference_W, saving_W)
