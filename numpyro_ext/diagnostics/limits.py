"""The thresholds of :func:`diagnose`."""

import math

TEMPERATURE = 0.1
"""Relative error of a temperature or of an implied variance that is still fine."""
DIVERGING = 0.01
"""Share of the transitions of a stochastic-gradient kernel that may be refused."""
SHORTENED = 0.05
"""Share of the gradients of an ensemble that may be too long for its step."""
RHAT, FALSE_ALARM = 1.01, 0.01
"""The limit where the chains are long, and the probability with which right ones of a smaller
effective size may be beyond theirs."""
RHAT_OF_ENSEMBLE = 1.5
"""The limit of many chains, of which one draw of each has the posterior's spread: there the first
and the last draw of a chain have a correlation of about a hundredth, whatever it began at."""
ESS, ESS_EACH = 400, 100
"""The limit of the effective sample size, and the limit per chain where this is less."""

FALL, LOST = 0.1, 0.01
"""Nats by which the losses may still fall over the last fifth, and the share of the last ones that
may not be finite."""
STEP_NOISE = 0.1
PROXY_NOISE, PENALTY_NOISE = 0.1, 0.1
"""Nats of noise up to which some rows stand in for all, and draws for the expectations in a
penalty: the means move by as many sds at most."""

NO_DENSITY = 0.1
"""Share of draws without a density under the model."""
WEIGHTED_RATIO = (0.85, 1.2)
GAP, GAP_EACH = 0.5, 0.05
"""Nats, and more for each number: about what one at its limits adds to the divergence."""

SHIFT = 0.2
PARTICLES_RATIO, PARTICLES_SHIFT = (0.8, 1.2), 0.3
MOVED_RATIO = (0.85, 1.15)
"""Nearer than by weights: short chains have not left all of their bias behind."""
SHAPE, SHAPE_KNOWN = (0.8, 1.25), 0.22
"""Limits of the widths of intervals, and the largest error of one that is judged."""
RATIO_KNOWN = 0.1
"""The largest error of a ratio that is judged."""
STAY = 0.4
"""Share of the variance that is between chains above which they are too short to judge alone."""
STUCK, FREE = 0.1, 0.995
"""Share of accepted trajectories below which the points are stuck, and above which the steps are so
small that they say nothing."""
FEWEST_EFFECTIVE = 50
"""Draws of chains below which moves would say nothing that the effective size does not."""
NARROW = 0.86
"""The ratio to a Gibbs step of normals with 0.8 of the right standard deviation."""

SHARES = 0.2
"""Standard deviations by which means may be off because modes have other shares of the draws."""
DEPARTURE, ELSEWHERE = 0.3, 0.1
"""The distance of the posterior from a normal at a mode above which Laplace's evidence is doubtful,
and the share of draws that may be at no known mode."""


def particles_shift(m: int) -> float:
    """The limit of the mean of m particles, which is nearer where they are more than 100."""
    return max(SHIFT, min(PARTICLES_SHIFT, 3 / math.sqrt(m)))


def farthest(d: int) -> float:
    """The square of the distance from the center of N(0, I) in d dimensions within which nearly all
    draws lie: four standard deviations above its mean."""
    return d + 4 * math.sqrt(2 * d)
