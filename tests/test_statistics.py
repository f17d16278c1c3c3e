"""avg@k, pass@k and the bootstrap, against enumeration, theory and plain loops."""

import itertools

import numpy as np
import pytest
from scipy import stats

from opd_jax.report import statistics


def test_avg_at_k_is_the_share_of_right_samples():
    correct_Pn = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]])
    np.testing.assert_allclose(statistics.avg_at_k(correct_Pn), [0.25, 1.0, 0.5])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    correct_Pn = np.array([[0] * 5, [1, 0, 0, 0, 0], [1, 0, 1, 1, 0], [1] * 5])
    subsets = list(itertools.combinations(range(5), k))
    expected = [np.mean([row[list(subset)].any() for subset in subsets]) for row in correct_Pn]
    np.testing.assert_allclose(statistics.pass_at_k(correct_Pn, k), expected, atol=1e-12)


def test_pass_at_k_is_not_the_biased_plug_in_estimate():
    correct_Pn = np.array([[1, 0, 0, 0]])
    plug_in = 1 - (1 - 0.25) ** 2
    assert statistics.pass_at_k(correct_Pn, 2)[0] == pytest.approx(0.5)
    assert abs(plug_in - 0.5) > 0.05


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_refuses_k_beyond_the_samples(k):
    with pytest.raises(ValueError, match=f"k = {k} with 4 samples.*1 <= k <= 4"):
        statistics.pass_at_k(np.ones((2, 4)), k)


def test_samples_must_be_a_matrix():
    with pytest.raises(ValueError, match=r"\[problems, samples\].*\(3,\)"):
        statistics.avg_at_k(np.ones(3))


def _bootstrap(problems, seed=0, resamples=1000, domain="a"):
    return statistics.ProblemBootstrap.over(
        {domain: np.arange(problems)}, resamples=resamples, seed=seed
    )


def test_row_0_is_the_measured_mean_and_every_draw_has_as_many_problems():
    values_P = np.random.default_rng(0).random(50)
    bootstrap = _bootstrap(50)
    draws_W = bootstrap.means("a", np.arange(50), values_P)
    assert draws_W.shape == (1001,)
    assert draws_W[0] == pytest.approx(values_P.mean(), abs=1e-15)
    np.testing.assert_array_equal(bootstrap.counts["a"].sum(axis=1), 50)


def test_draws_are_means_of_resampled_problems():
    values_P = np.random.default_rng(0).random(9)
    bootstrap = _bootstrap(9, resamples=20)
    draws_W = bootstrap.means("a", np.arange(9), values_P)
    for counts_P, drawn in zip(bootstrap.counts["a"], draws_W, strict=True):
        resample = np.repeat(values_P, counts_P.astype(int))
        assert drawn == pytest.approx(resample.mean(), abs=1e-12)


def test_interval_matches_the_normal_one_for_many_problems():
    values_P = (np.arange(2000) % 10 < 3).astype(float)
    found = statistics.estimate(_bootstrap(2000).means("a", np.arange(2000), values_P))
    half = 1.96 * np.sqrt(0.3 * 0.7 / 2000)
    assert found.value == pytest.approx(0.3)
    assert found.low == pytest.approx(0.3 - half, rel=0.01)
    assert found.high == pytest.approx(0.3 + half, rel=0.01)


def test_interval_covers_the_truth_about_95_times_in_100():
    generator = np.random.default_rng(1)
    bootstrap = _bootstrap(80)
    covered = 0
    for _ in range(300):
        values_P = generator.random(80) < 0.6
        found = statistics.estimate(bootstrap.means("a", np.arange(80), values_P))
        covered += found.low <= 0.6 <= found.high
    assert 0.90 < covered / 300 < 0.99


def test_same_seed_same_draws_and_domains_are_independent():
    values_P = np.random.default_rng(0).random(40)
    ids = np.arange(40)

    def draws(domain, seed):
        return _bootstrap(40, seed, domain=domain).means(domain, ids, values_P)[1:]

    np.testing.assert_array_equal(draws("a", 0), draws("a", 0))
    assert abs(np.corrcoef(draws("a", 0), draws("b", 0))[0, 1]) < 0.15
    assert abs(np.corrcoef(draws("a", 0), draws("a", 1))[0, 1]) < 0.15


def test_numbers_on_the_same_problems_are_paired_whatever_their_order():
    values_P = np.random.default_rng(0).random(40)
    order = np.random.default_rng(1).permutation(40)
    bootstrap = _bootstrap(40)
    one_W = bootstrap.means("a", np.arange(40), values_P)
    np.testing.assert_allclose(one_W, bootstrap.means("a", order, values_P[order]), atol=1e-12)
    unpaired_W = _bootstrap(40, seed=1).means("a", np.arange(40), values_P)
    assert np.std(one_W - unpaired_W) > 0.02


def test_some_problems_are_weighed_by_their_own_counts():
    bootstrap = statistics.ProblemBootstrap(
        {"a": np.array([3, 5, 8])}, {"a": np.array([[1, 1, 1], [2, 1, 0], [0, 0, 3.0]])}
    )
    draws_W = bootstrap.means("a", np.array([5, 3]), np.array([1.0, 0.0]))
    # Draw 2 holds neither problem 3 nor 5: it repeats the measured mean.
    np.testing.assert_allclose(draws_W, [1 / 2, 1 / 3, 1 / 2])


@pytest.mark.parametrize("unknown", [4, 99])
def test_unknown_problems_are_named(unknown):
    bootstrap = statistics.ProblemBootstrap.over({"a": np.array([3, 5, 8])})
    with pytest.raises(KeyError, match=f"{unknown}.*'a'"):
        bootstrap.means("a", np.array([5, unknown]), np.zeros(2))


def test_estimate_takes_order_statistics_and_leaves_nan_out():
    resamples = np.arange(101.0)
    found = statistics.estimate(np.concatenate([[50.0], resamples, [np.nan] * 10]))
    assert (found.value, found.low, found.high) == (50.0, 2.0, 98.0)


def test_infinite_draws_are_infinite_bounds():
    found = statistics.estimate(np.concatenate([[0.1], [-np.inf] * 10, np.linspace(0, 1, 90)]))
    assert found.low == -np.inf
    assert found.high < 1.0
    nothing = statistics.estimate(np.array([np.nan, np.nan]))
    assert np.isnan([nothing.value, nothing.low, nothing.high]).all()


@pytest.mark.parametrize("count", [2, 3, 5, 31])
def test_over_seeds_is_student_t(count):
    values = np.random.default_rng(count).normal(size=count)
    found = statistics.over_seeds(values)
    low, high = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high), rel=2e-3)


def test_one_seed_has_no_interval():
    found = statistics.over_seeds([0.5])
    assert found.value == 0.5
    assert np.isnan([found.low, found.high]).all()
    assert np.isnan(statistics.over_seeds([]).value)
