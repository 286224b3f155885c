"""Statistics against the published table, simulation and SciPy's own tests."""

from typing import Any

import numpy as np
import pytest
from scipy import special, stats

from speedrun.record import statistics
from speedrun.record.statistics import WIDENED, batch_needed, equivalent, mean_interval, power

TARGET = 3.28
SIGMA = 0.0013  #: over seeds, of the public speedrun's losses
LOSSES = [3.2781, 3.2764, 3.2799, 3.2772, 3.2790, 3.2777]


def test_the_t_test_is_that_of_scipy():
    found = statistics.mean_below(LOSSES, TARGET)
    want: Any = stats.ttest_1samp(LOSSES, TARGET, alternative="less")
    assert (found.rule, found.num_runs, found.alpha) == ("t", 6, 0.01)
    assert found.p == pytest.approx(want.pvalue)
    assert found.statistic == pytest.approx(want.statistic)
    assert found.passed == (want.pvalue < 0.01)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 40, 999])
def test_distributions_are_those_of_scipy(freedom):
    for x in (-300.0, -30.0, -4.7, -1.0, -1e-3, 0.0, 0.4, 3.0, 30.0):
        assert statistics.normal_cdf(x) == pytest.approx(special.ndtr(x), rel=1e-12)
        assert statistics.student_cdf(freedom, x) == pytest.approx(special.stdtr(freedom, x), rel=1e-10)
    for share in (0.0, 1e-9, 1e-3, 0.1, 0.8, 1.0, 1.3, 3.0, 1e4, 1e300):
        want = special.chdtr(freedom, share * freedom)
        assert statistics.chi2_cdf(freedom, share * freedom) == pytest.approx(want, rel=1e-10, abs=1e-300)


def test_few_runs_are_tested_with_the_larger_sigma():
    close, wide = [3.2780, 3.2781, 3.2782], [3.270, 3.278, 3.286]
    known = statistics.mean_below(close, TARGET, known_sigma=SIGMA)
    assert (known.rule, known.sigma) == ("z", WIDENED[3] * SIGMA)
    assert known.p == pytest.approx(stats.norm.cdf((3.2781 - TARGET) / (WIDENED[3] * SIGMA / 3**0.5)))
    assert statistics.mean_below(wide, TARGET, known_sigma=SIGMA).sigma == pytest.approx(np.std(wide, ddof=1))
    assert statistics.mean_below([3.27], TARGET, known_sigma=SIGMA).passed
    assert not statistics.mean_below([3.279], TARGET, known_sigma=SIGMA).passed
    assert statistics.mean_below(close, TARGET).rule == "t", "where no sigma is known"
    assert not statistics.mean_below([3.0], TARGET).passed, "one run and no known sigma prove nothing"


def test_runs_that_do_not_differ_prove_nothing_and_no_runs_are_refused():
    assert not statistics.mean_below([3.2] * 8, TARGET).passed
    with pytest.raises(ValueError, match="at least one"):
        statistics.mean_below([], TARGET)
    assert batch_needed(0.0, SIGMA, known_sigma=None) is None
    assert batch_needed(1e-6, SIGMA, known_sigma=SIGMA) is None


@pytest.mark.parametrize(
    ("margin", "runs"),
    [(0.0008, {38}), (0.0010, {25, 26}), (0.0012, {19}), (0.0015, {13}), (0.0020, {9}), (0.0030, {6})],
)
def test_runs_needed_are_those_of_the_published_table(margin, runs):
    """A table from modded-nanogpt: 90 % power, sd 0.0013, Student's t."""
    assert batch_needed(margin, 0.0013, known_sigma=None) in runs


def passes(n: int, margin: float, sigma: float, known: float, num_batches: int = 40_000) -> float:
    """Share of simulated batches that pass the z rule, computed independently except for the factor."""
    batches = np.random.default_rng(n).normal(TARGET - margin, sigma, (num_batches, n))
    sd = batches.std(axis=1, ddof=1) if n > 1 else np.zeros(num_batches)
    z = (batches.mean(axis=1) - TARGET) / (np.maximum(sd, WIDENED[n] * known) / n**0.5)
    return float(np.mean(stats.norm.cdf(z) < 0.001))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("sigma", [0.0012, 0.0019, 0.0030])
def test_the_power_of_few_runs_is_that_of_their_own_test(n, sigma):
    """With the known sigma alone, 0.91 would be claimed for 0.80."""
    for margin in (0.0042, 0.0080):
        told = power(n, margin, sigma, known_sigma=0.0019)
        assert told == pytest.approx(passes(n, margin, sigma, 0.0019), abs=0.012)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_z_rule_holds_one_percent_where_the_noise_is_larger_than_known(n):
    worst = max(passes(n, 0.0, sigma, 0.0019, 200_000) for sigma in (0.0019, 0.0030, 0.0036))
    assert worst <= 0.0107, "1 % and three errors of the simulation"
    assert worst >= 0.008, "and no power is given away"


def test_equal_means_are_equivalent_and_others_are_not_and_at_the_margin_it_is_seldom_granted():
    """If the true difference equals the margin, at most alpha of all batches may pass."""
    rng = np.random.default_rng(2)
    first = rng.normal(3.278, 0.0004, 12)
    assert equivalent(list(first), list(rng.normal(3.278, 0.0004, 12))).passed
    assert not equivalent(list(first), list(rng.normal(3.2795, 0.0004, 12))).passed
    assert not equivalent([3.278, 3.290], [3.278, 3.266]).passed, "too few and too wide to say"
    rng, passed = np.random.default_rng(3), 0
    for _ in range(400):
        first, second = rng.normal(3.278, 0.0005, 6), rng.normal(3.279, 0.0005, 6)
        passed += equivalent(list(first), list(second)).passed
    assert passed / 400 <= 0.08


def test_an_interval_holds_the_true_mean_as_often_as_it_says():
    rng = np.random.default_rng(1)
    found = [mean_interval(list(rng.normal(5.0, 2.0, 4))) for _ in range(1500)]
    assert np.mean([one.low <= 5.0 <= one.high for one in found if one]) == pytest.approx(0.95, abs=0.02)
    assert mean_interval([1.0]) is None


@pytest.mark.parametrize("num_looks", [1, 2])
def test_power_is_how_often_simulated_batches_pass(num_looks):
    batches = np.random.default_rng(0).normal(TARGET - 0.003, SIGMA, (4000, 6))
    _, p = stats.ttest_1samp(batches, TARGET, axis=1, alternative="less")
    told = power(6, 0.003, SIGMA, known_sigma=SIGMA, num_looks=num_looks)
    assert told == pytest.approx(np.mean(p < 0.01 / num_looks), abs=0.025)
