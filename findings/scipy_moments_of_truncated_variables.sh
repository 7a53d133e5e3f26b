#!/usr/bin/env bash
# The largest of five temperatures around 373 has, in SciPy, the mean 22.5 and the median 373.6.
#
# Guess: the random variables that SciPy makes of another one, by `truncate`, `order_statistic` or `exp`, have the moments
#   of their density to many digits, or warn where an integral fails, as `quad` and `expect` do. A bound 300 sds
#   away changes nothing: `truncate(Normal(mu=1000, sigma=1), lb=0)` has mean 1000 and sd 1.
# Behaviour: mean, sd, skewness and entropy are integrals by `tanhsinh`, from the ends of the support, which are 0 and
#   infinity, without a hint of where the density lies. Where its sd is a few thousandths of its place or less, the
#   points of the rule step over it. `tanhsinh` says so itself, `success=False` and an error as large as the value; the
#   distribution takes `.integral` and leaves the rest. The means are of any size, beyond what is possible (below
#   the least and above the largest draw), and the sd comes out 40 or 1,400 for 1. Median, cdf and draws of
#   the same object are right, and so are Normal itself, by a formula, and the older `truncnorm`. Lengths in
#   mm, years, pressures in hPa and temperatures in K have such ratios. In units of the sd it is no better: a standard
#   normal above -1000 has the mean -.96. Bounds ten sds away are right. A mixture, with moments by a formula, has
#   an entropy by the same integral, which loses a narrow component.
# Versions: scipy 1.18.1 (stats/_distribution_infrastructure.py: `_tanhsinh(...).integral`), numpy 2.5.5.
# Seen (mean, sd, right mean, right sd): truncated at 0: N(300, 1) 299.96 1.002 300 1; N(373, .5) 398 25.1 373 .5;
#   N(1000, 1) 2012 1437 1000 1; N(5000, 1) .0003 1.28 5000 1. Largest of five: N(300, 1) 259 39.6 301.2 .67;
#   N(373, .5) 22.5 86 373.6 .33; N(5000, 1) 8e-8 .02 5001.2 .67. exp of N(7, .001) 622 for 1097. Entropy of half
#   N(0, 1) and half N(30, .03) 1.056 for .359. No warning from any.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check scipy==1.18.1 numpy==2.5.5
"$folder/venv/bin/python" -W error - <<'PY'
import numpy as np
from scipy import integrate, stats

z, step = np.linspace(-9, 9, 20_001, retstep=True)
density = 5 * stats.norm.cdf(z) ** 4 * stats.norm.pdf(z)  # of the largest of five
top = step * np.sum(z * density)
top_sd = np.sqrt(step * np.sum((z - top) ** 2 * density))
for mu, sd in ((10.0, 1.0), (300.0, 1.0), (373.0, 0.5), (1000.0, 1.0), (5000.0, 1.0)):
    X = stats.Normal(mu=mu, sigma=sd)
    made = {
        "above 0": (stats.truncate(X, lb=0.0), mu, sd),
        "largest": (stats.order_statistic(X, r=5, n=5), mu + sd * top, sd * top_sd),
    }
    for name, (variable, mean, spread) in made.items():
        got, got_sd = float(variable.mean()), float(variable.standard_deviation())
        draws = variable.sample(2000, rng=np.random.default_rng(0))
        print(f"{name} N({mu:g}, {sd:g}): mean {got:10.4g} sd {got_sd:9.4g}, right {mean:.2f} {spread:.3f}, ", end="")
        print(f"median {float(variable.median()):.2f}, mean of draws {draws.mean():.2f}")
        assert abs(draws.mean() - mean) < 5 * spread / 2000**0.5 and abs(variable.median() - mean) < 0.2 * sd
        if mu == 10:
            assert abs(got / mean - 1) < 1e-6 and abs(got_sd / spread - 1) < 1e-6
        elif (name, mu) == ("above 0", 300.0):
            assert abs(got - mean) > 0.02
        else:
            assert not draws.min() < got < draws.max() and abs(got_sd / spread - 1) > 0.2
    near = stats.truncate(X, lb=mu - 10 * sd, ub=mu + 10 * sd)
    assert abs(near.mean() / mu - 1) < 1e-9 and abs(near.standard_deviation() / sd - 1) < 1e-6
    assert abs(stats.truncnorm(-mu / sd, np.inf, mu, sd).mean() / mu - 1) < 1e-9

standard = stats.truncate(stats.Normal(), lb=-1000.0)
print(f"standard normal above -1000: mean {float(standard.mean()):.3f} sd {float(standard.standard_deviation()):.3f}")
assert standard.mean() < -0.5

above = stats.truncate(stats.Normal(mu=1000.0, sigma=1.0), lb=0.0)
integral = integrate.tanhsinh(lambda x: x * above.pdf(x), 0.0, np.inf)
print("the integral beneath:", integral.success, integral.integral, "+-", integral.error)
assert not integral.success and integral.integral == above.mean()

price = float(stats.exp(stats.Normal(mu=7.0, sigma=0.001)).mean())
print(f"exp of N(7, .001): mean {price:.1f}, right {np.exp(7 + 5e-7):.1f}")
assert abs(price / np.exp(7) - 1) > 0.2

two = stats.Mixture([stats.Normal(mu=0.0, sigma=1.0), stats.Normal(mu=30.0, sigma=0.03)], weights=[0.5, 0.5])
right = np.log(2) + 0.5 * np.log(2 * np.pi * np.e) + 0.5 * np.log(0.03)  # they do not overlap
print(f"entropy of a mixture {float(two.entropy()):.3f}, right {right:.3f}")
assert abs(two.entropy() - right) > 0.5 and abs(two.mean() - 15) < 1e-9
PY
