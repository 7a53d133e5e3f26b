"""Topics that are directions
==========================

The spherical admixture model of Reisinger et al. (2010): a document is a direction v of length 1,
such as a normalised vector of word weights, its mean is a mixture of topics that are directions
too, and both lie on the sphere, on which sums of squares are cosines.

.. math::
    \\phi_k \\sim \\mathrm{Uniform}(S^{V-1}), \\quad \\theta_d \\sim \\mathrm{Dirichlet}(2), \\quad
    v_d \\sim \\mathrm{vMF}\\Big(\\frac{\\sum_k \\theta_{dk} \\phi_k}{|\\sum_k \\theta_{dk}
    \\phi_k|}, \\kappa\\Big)

100 documents over 20 words are simulated from 3 topics at a concentration of 100. NumPyro has no
map to the sphere; ``SphereReparam`` makes the topics, and the mixtures by their square roots,
points of spheres. ``GeodesicSGHMC`` moves them along great circles. The reference is NUTS on the
same model, in which ``SphereReparam`` is a vector over its length.

The script prints the cosine of the mean of each topic with the true one, how far means and standard
deviations of all coordinates of the topics are from NUTS, and the time, and saves a picture. The
exit code is 1 if a cosine is below 0.95, a mean is 0.4 standard deviations off or the mean ratio of
standard deviations is not within 10 % of 1. ::

    python examples/spherical_admixture.py

.. image:: /recorded/spherical_admixture.png
   :alt: True topics, and means and two standard deviations of their coordinates by both samplers.

.. literalinclude:: /recorded/spherical_admixture.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/spherical_admixture.png"

import argparse
from pathlib import Path
import sys
import time
from typing import Any

from jax import Array, random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS
from scipy.optimize import linear_sum_assignment
from scipy.stats import vonmises_fisher

from numpyro_ext.mcmc import GeodesicSGHMC, SphereReparam

TOPICS, WORDS, DOCUMENTS, CONCENTRATION = 3, 20, 100, 100.0
SHARE = 0.4
"""Share of the words that a topic uses."""


def admixture(v: Array) -> None:
    D, V = v.shape
    with numpyro.plate("topics", TOPICS):
        uniform = dist.ImproperUniform(dist.constraints.sphere, (), (V,))
        phi = numpyro.sample("phi", uniform)
    with numpyro.plate("documents", D):
        theta: Any = numpyro.sample("theta", dist.Dirichlet(2.0 * jnp.ones(TOPICS)))
        mean = theta @ phi
        mean = mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)
        numpyro.factor("v", CONCENTRATION * jnp.sum(v * mean, -1))


def simulate(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The topics, and the documents."""
    rng = np.random.default_rng(seed)
    phi = rng.gamma(1.0, size=(TOPICS, WORDS)) * (rng.random((TOPICS, WORDS)) < SHARE)
    phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    mean = rng.dirichlet(2.0 * np.ones(TOPICS), DOCUMENTS) @ phi
    mean /= np.linalg.norm(mean, axis=1, keepdims=True)
    kappa: Any = CONCENTRATION
    v = [vonmises_fisher(m, kappa).rvs(1, random_state=rng)[0] for m in mean]
    return phi, np.array(v)


def far_apart(v: np.ndarray) -> np.ndarray:
    """Documents of which each is far from those before, where the topics begin."""
    chosen = [int(np.argmin(v @ v.mean(0)))]
    while len(chosen) < TOPICS:
        chosen.append(int(np.argmin((v @ v[chosen].T).max(1))))
    return v[chosen]


def main() -> int:
    parser = argparse.ArgumentParser(description="Topics that are directions.")
    parser.add_argument("--num-samples", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("out/spherical_admixture.png"))
    args = parser.parse_args()
    truth, documents = simulate(0)
    model = reparam(admixture, config={"phi": SphereReparam(), "theta": SphereReparam()})
    start = {
        "phi": jnp.array(far_apart(documents)),
        "theta_sphere": jnp.ones((DOCUMENTS, TOPICS)),
    }
    kernels = {
        "GeodesicSGHMC": GeodesicSGHMC(model, 0.006, friction=10.0, steps_per_sample=30),
        "NUTS": NUTS(model),
    }
    draws: dict[str, np.ndarray] = {}
    bad = False
    for name, kernel in kernels.items():
        began = time.perf_counter()
        mcmc = MCMC(
            kernel,
            num_warmup=args.num_samples // 4,
            num_samples=args.num_samples,
            progress_bar=False,
        )
        mcmc.run(random.key(0), jnp.array(documents), init_params=start)
        phi = np.asarray(mcmc.get_samples()["phi"], float)
        cosines = truth @ phi.mean(0).T
        order = linear_sum_assignment(-cosines)[1]
        draws[name] = phi[:, order]
        lengths = np.linalg.norm(draws[name].mean(0), axis=1)
        found = cosines[np.arange(TOPICS), order] / lengths
        bad |= bool(found.min() < 0.95)
        print(
            f"{name}: cosines with the truth {found.round(3)}, mean resultant lengths"
            f" {lengths.round(4)}, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    ours, theirs = draws.values()
    off = np.abs(ours.mean(0) - theirs.mean(0)) / theirs.std(0)
    ratio = ours.std(0) / theirs.std(0)
    print(f"means at most {off.max():.2f} standard deviations of NUTS apart")
    print(f"standard deviations over those of NUTS: {ratio.min():.2f} to {ratio.max():.2f}", end="")
    print(f", mean {ratio.mean():.3f}")
    bad |= bool(off.max() > 0.4 or abs(ratio.mean() - 1) > 0.1)

    fig, axes = plt.subplots(1, TOPICS, figsize=(12, 3.2), sharey=True)
    for k, ax in enumerate(axes):
        ax.bar(np.arange(WORDS), truth[k], color="lightgrey", label="truth")
        for j, (name, phi) in enumerate(draws.items()):
            place = np.arange(WORDS) + 0.3 * (j - 0.5)
            ax.errorbar(place, phi[:, k].mean(0), 2 * phi[:, k].std(0), fmt=".", label=name)
        ax.set(title=f"topic {k + 1}", xlabel="word")
    axes[0].legend(fontsize=8)
    fig.tight_layout()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(args.out, dpi=100)
    print(f"picture: {args.out}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
