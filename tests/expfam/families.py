"""The families of the contract: parameters off the origin and of unequal scales, in two batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_ext.expfam import (
    MNIW,
    NIW,
    Bernoulli,
    Beta,
    Categorical,
    Dirichlet,
    Gamma,
    Gaussian,
    GaussianChain,
    InverseGamma,
    MarkovChain,
    Poisson,
    Wishart,
)

# name -> family, standard parameters of q with batch shape (2,), and of p without a batch.
FAMILIES = {
    "Gaussian": (
        Gaussian,
        {
            "loc": [[1.0, -2.0], [0.3, 4.0]],
            "covariance_matrix": [[[2.0, 0.5], [0.5, 1.0]], [[0.2, -0.1], [-0.1, 3.0]]],
        },
        {"loc": [0.0, 1.0], "covariance_matrix": [[1.5, 0.3], [0.3, 2.0]]},
    ),
    "NIW": (
        NIW,
        {
            "loc": [[1.0, -1.0], [-0.4, 2.0]],
            "kappa": [2.0, 0.7],
            "df": [5.0, 9.0],
            "scale_matrix": [[[2.0, 0.3], [0.3, 1.0]], [[0.8, -0.2], [-0.2, 3.0]]],
        },
        {"loc": [0.0, 0.5], "kappa": 1.5, "df": 6.0, "scale_matrix": [[1.0, 0.2], [0.2, 1.5]]},
    ),
    "MNIW": (
        MNIW,
        {
            "weight": [[[0.9, 0.2, -1.0], [-0.1, 0.7, 0.4]], [[0.5, -0.3, 0.1], [1.2, 0.6, 0.0]]],
            "precision": [np.diag([3.0, 0.8, 2.0]) + 0.3, np.diag([1.0, 0.5, 4.0]) - 0.1],
            "df": [6.0, 8.0],
            "scale_matrix": [[[1.5, 0.2], [0.2, 0.8]], [[0.6, -0.1], [-0.1, 2.0]]],
        },
        {
            "weight": [[0.8, 0.0, -0.5], [0.0, 0.8, 0.2]],
            "precision": np.diag([2.0, 1.0, 1.5]),
            "df": 7.0,
            "scale_matrix": [[1.0, 0.1], [0.1, 1.2]],
        },
    ),
    "Dirichlet": (
        Dirichlet,
        {"concentration": [[2.0, 3.0, 5.0], [0.4, 6.0, 1.3]]},
        {"concentration": [1.0, 2.0, 1.5]},
    ),
    "Beta": (
        Beta,
        {"concentration1": [2.0, 0.6], "concentration0": [5.0, 1.4]},
        {"concentration1": 3.0, "concentration0": 2.0},
    ),
    "Categorical": (
        Categorical,
        {"probs": [[0.2, 0.5, 0.3], [0.05, 0.15, 0.8]]},
        {"probs": [0.3, 0.3, 0.4]},
    ),
    "Bernoulli": (Bernoulli, {"prob": [0.8, 0.1]}, {"prob": 0.4}),
    "Gamma": (
        Gamma,
        {"concentration": [2.5, 0.7], "rate": [0.3, 4.0]},
        {"concentration": 3.0, "rate": 1.5},
    ),
    "InverseGamma": (
        InverseGamma,
        {"concentration": [4.5, 1.7], "rate": [0.3, 6.0]},
        {"concentration": 3.0, "rate": 1.5},
    ),
    "Wishart": (
        Wishart,
        {"df": [5.0, 2.6], "rate_matrix": [[[2.0, 0.3], [0.3, 1.0]], [[0.8, -0.2], [-0.2, 3.0]]]},
        {"df": 6.0, "rate_matrix": [[1.0, 0.2], [0.2, 1.5]]},
    ),
    "Poisson": (Poisson, {"rate": [3.5, 0.2]}, {"rate": 2.0}),
    "GaussianChain": (
        GaussianChain,
        {
            "initial_loc": [[1.0, -2.0], [0.3, 4.0]],
            "initial_covariance": [[[2.0, 0.5], [0.5, 1.0]], [[0.2, -0.1], [-0.1, 3.0]]],
            "weight": [[[0.9, 0.2], [-0.1, 0.7]], [[0.5, -0.4], [0.3, 1.1]]],
            "covariance": [[[0.5, 0.1], [0.1, 0.3]], [[1.0, -0.3], [-0.3, 0.4]]],
            "num_steps": 3,
        },
        {
            "initial_loc": [0.5, 0.0],
            "initial_covariance": [[1.0, 0.2], [0.2, 2.0]],
            "weight": [[0.8, 0.0], [0.1, 0.8]],
            "covariance": [[0.6, 0.0], [0.0, 0.5]],
            "num_steps": 3,
        },
    ),
    "MarkovChain": (
        MarkovChain,
        {
            "initial_probs": [[0.6, 0.4], [0.1, 0.9]],
            "transition_probs": [[[0.9, 0.1], [0.2, 0.8]], [[0.3, 0.7], [0.4, 0.6]]],
            "num_steps": 3,
        },
        {
            "initial_probs": [0.5, 0.5],
            "transition_probs": [[0.7, 0.3], [0.3, 0.7]],
            "num_steps": 3,
        },
    ),
}
every_family = list(FAMILIES)


def arrays(standard):
    """Lists as arrays; a number of steps is no array."""
    return {
        name: value if isinstance(value, int) else jnp.asarray(value, float)
        for name, value in standard.items()
    }


# Compilation takes most of the time.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def pair_of(name):
    """(q, p) of a family."""
    family, q, p = FAMILIES[name]

    @quick_jit
    def make():
        return tuple(family.from_standard(**arrays(one)) for one in (q, p))

    return make()


def naturals():
    """name -> (q, p)."""
    return {name: pair_of(name) for name in FAMILIES}
