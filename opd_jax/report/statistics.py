"""Held-out accuracy with its uncertainty: avg@k, unbiased pass@k, and the bootstrap over problems.

Arrays here follow one convention more than the legend of `core.types`: W is the number of draws,
and row 0 of every `..._W` array is the measured sample itself, rows 1.. its bootstrap resamples.
Whatever is computed on all rows at once gives the number in row 0 and its spread in the others.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 1000
SEED = 0
LEVEL = 0.95

# Two-sided 95% quantiles of Student's t for 1..30 degrees of freedom; the normal one after that.
# fmt: off
_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
_NORMAL_95 = 1.960


def avg_at_k(correct_Pn: np.ndarray) -> np.ndarray:
    """The share of right samples of each problem, [P]; its mean over problems is avg@k with k = n.

    Args:
        correct_Pn: 0 or 1 for each of n samples of P problems.
    """
    return np.mean(_samples(correct_Pn), axis=1)


def pass_at_k(correct_Pn: np.ndarray, k: int) -> np.ndarray:
    """The chance that at least one of k samples is right, unbiased, for each problem, [P].

    1 - C(n-c, k) / C(n, k) with c right among n samples: Chen et al. 2021, arXiv 2107.03374, eq. 1.

    Args:
        correct_Pn: 0 or 1 for each of n samples of P problems.
        k: samples one is allowed, 1 to n.

    Raises:
        ValueError: if k is not within 1..n, where no unbiased estimate exists.
    """
    correct_Pn = _samples(correct_Pn)
    n = correct_Pn.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@k: k = {k} with {n} samples a problem; choose 1 <= k <= {n}")
    drawn_k = np.arange(k)
    wrong_P = n - correct_Pn.sum(axis=1)
    factors_Pk = np.clip(wrong_P[:, None] - drawn_k[None], 0, None) / (n - drawn_k)[None]
    return 1.0 - np.prod(factors_Pk, axis=1)


def _samples(correct_Pn: np.ndarray) -> np.ndarray:
    correct_Pn = np.asarray(correct_Pn, np.float64)
    if correct_Pn.ndim != 2 or 0 in correct_Pn.shape:
        raise ValueError(f"correct must be [problems, samples], none empty; got {correct_Pn.shape}")
    return correct_Pn


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A measured value and its 95% interval; all NaN if there was nothing to measure."""

    value: float
    low: float
    high: float


def estimate(draws_W: np.ndarray) -> Estimate:
    """The value in row 0 with the percentile interval of the other rows.

    Bounds are order statistics, rounded outwards, so that infinite draws stay infinite bounds
    instead of turning into NaN. NaN draws (a ratio 0 / 0, say) are left out.
    """
    resamples = np.sort(draws_W[1:][~np.isnan(draws_W[1:])])
    if not resamples.size:
        return Estimate(float(draws_W[0]), np.nan, np.nan)
    tail = int((1 - LEVEL) / 2 * (resamples.size - 1))
    return Estimate(float(draws_W[0]), float(resamples[tail]), float(resamples[-1 - tail]))


def as_json(draws_W: np.ndarray, n: int | None = None) -> dict[str, Any]:
    """{mean, ci95} of a value in every draw; with {n}, the number of problems, if given."""
    found = estimate(draws_W)
    entry: dict[str, Any] = {"mean": found.value, "ci95": [found.low, found.high]}
    return entry if n is None else entry | {"n": n}


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean over seeds and its 95% interval by Student's t; the interval of one seed is NaN."""
    values = np.asarray(values, np.float64)
    if values.size == 0:
        return Estimate(np.nan, np.nan, np.nan)
    mean = float(values.mean())
    if values.size == 1:
        return Estimate(mean, np.nan, np.nan)
    freedom = values.size - 1
    quantile = _T_95[freedom - 1] if freedom <= len(_T_95) else _NORMAL_95
    half = float(quantile * values.std(ddof=1) / np.sqrt(values.size))
    return Estimate(mean, mean - half, mean + half)


@dataclasses.dataclass(frozen=True)
class ProblemBootstrap:
    """One resampling of every domain's problems, shared by all numbers of a report.

    Because step 10 and step 90, base and expert, one route and the other are all read off the same
    resampled problems, differences and ratios between them are paired.

    Attributes:
        ids: sorted problem ids of each domain, [P].
        counts: how often each problem is in each draw, [W, P]; row 0 is all ones.
    """

    ids: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]

    @classmethod
    def over(
        cls, ids: Mapping[str, np.ndarray], *, resamples: int = RESAMPLES, seed: int = SEED
    ) -> "ProblemBootstrap":
        """Draws the resamples: each domain on its own, the same for the same ids and seed."""
        ids = {domain: np.unique(id_P) for domain, id_P in ids.items()}
        counts = {
            domain: _counts(id_P.size, resamples, [seed, zlib.crc32(domain.encode())])
            for domain, id_P in ids.items()
        }
        return cls(ids, counts)

    def means(self, domain: str, id_P: np.ndarray, values_P: np.ndarray) -> np.ndarray:
        """The mean of a value over the given problems of a domain, in every draw: [W].

        The problems may be some of the domain's (one level, say): they are weighed by their own
        counts. A draw that holds none of them repeats the measured mean.

        Raises:
            KeyError: if a problem was not among the ids resampled.
        """
        column_P = np.searchsorted(self.ids[domain], id_P)
        known = self.ids[domain][np.minimum(column_P, self.ids[domain].size - 1)] == id_P
        if not np.all(known):
            missing = np.asarray(id_P)[~known][:3].tolist()
            raise KeyError(f"problems {missing} of domain {domain!r} are not in this bootstrap")
        counts_WP = self.counts[domain][:, column_P]
        total_W = counts_WP.sum(axis=1)
        mean_W = counts_WP @ np.asarray(values_P, np.float64) / np.maximum(total_W, 1)
        return np.where(total_W > 0, mean_W, mean_W[0])


def _counts(problems: int, resamples: int, seed: Sequence[int]) -> np.ndarray:
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(problems, np.full(problems, 1 / problems), size=resamples)
    return np.concatenate([np.ones((1, problems)), drawn.astype(np.float64)])
