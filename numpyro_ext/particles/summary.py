"""A table of particles, without the rows that have a meaning for Markov chains alone."""

from typing import Any

import numpy as np


def print_particles(samples: Any, *, prob: float = 0.9) -> None:
    r"""Print mean, standard deviation, median and an interval of each element of each site.

    It is NumPyro's ``print_summary`` without R-hat and the effective sample size, which mean
    nothing for particles. No quantile of m points reaches beyond 1/m.

    :param samples: arrays by site, with a leading axis of particles: ``mcmc.get_samples()`` of
        :class:`ParVI`, or ``guide.particles(params)`` of :class:`AutoParticles`.
    :param float prob: probability of the central interval.

    >>> print_particles({"w": jnp.array([[1.0, 0.0], [2.0, 4.0], [3.0, 8.0]])}, prob=0.5)
    3 particles       mean      std   median    25.0%    75.0%
    w[0]              2.00     0.82     2.00     1.50     2.50
    w[1]              4.00     3.27     4.00     2.00     6.00
    """
    sites = {name: np.asarray(value, float) for name, value in samples.items()}
    ends = [50 * (1 - prob), 50 * (1 + prob)]
    rows = []
    for name, values in sites.items():
        for index in np.ndindex(values.shape[1:]):
            x = values[(slice(None), *index)]
            label = name + (f"[{','.join(map(str, index))}]" if index else "")
            rows.append((label, [x.mean(), x.std(), np.median(x), *np.percentile(x, ends)]))
    title = f"{len(next(iter(sites.values())))} particles"
    width = max(len(label) for label in [title, *(label for label, _ in rows)])
    heads = ["mean", "std", "median", *(f"{end:.1f}%" for end in ends)]
    print(title.ljust(width) + "".join(head.rjust(9) for head in heads))
    for label, numbers in rows:
        print(label.ljust(width) + "".join(f"{number:9.2f}" for number in numbers))
