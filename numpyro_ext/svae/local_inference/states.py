"""Rules in which a state z, or a chain of states, selects the distribution of x."""

from abc import ABC, abstractmethod
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_ext.expfam import Gaussian, GaussianMean
from numpyro_ext.svae.local_inference.base import (
    CoordinateAscent,
    LocalPosterior,
    Means,
    Rule,
    expected_log_normal,
    negative_entropy,
    no_iterations,
    own_moments,
    plug_in,
    times_expected,
)
from numpyro_ext.svae.potentials import GaussianPotential, MixturePotential, merge_normals


class States(Rule, ABC):
    """The base of these rules: q(z) given log weights of the states, and q(x) given q(z).

    The states select a normal component of x, unless a subclass replaces the last three methods.
    """

    @abstractmethod
    def states_given(self, global_mean: Means, log_weights: Array) -> Any:
        """q(z): the expected prior of the states times these weights, ``(..., K)``."""

    @abstractmethod
    def states_kl(self, global_mean: Means, local: LocalPosterior) -> Array:
        """``(B,)``, the divergence of q(z) from the expected prior of the states."""

    def vectors_given(self, global_mean: Means, psi: GaussianPotential, r: Array) -> Any:
        """q(x) given the probabilities r of the states, ``(..., K)``."""
        return times_expected(psi, r, plug_in(global_mean[self.x_factor]))

    def log_weights(self, global_mean: Means, moments: Any) -> Array:
        """``(..., K)``, the expected log density of x in each state, without ``-d/2 log 2 pi``."""
        moments = GaussianMean(moments.x[..., None, :], moments.xx[..., None, :, :])
        return expected_log_normal(global_mean[self.x_factor], moments)

    def vectors_negative_entropy(self, natural: Any) -> Array:
        """``E log q(x)``, without ``-d/2 log 2 pi``."""
        return negative_entropy(natural)

    def local_kl(self, global_mean: Means, local: LocalPosterior) -> Array:
        expected = local.mean["z"].probs * self.log_weights(global_mean, local.mean["x"])
        log_q = self.vectors_negative_entropy(local.natural["x"])
        steps = tuple(range(1, log_q.ndim))
        vectors = jnp.sum(log_q, steps) - jnp.sum(expected, tuple(range(1, expected.ndim)))
        return self.states_kl(global_mean, local) + vectors


class OnePassEP(States):
    """Exact marginals of prior times potential, with the plug-in normals of the components."""

    def infer(
        self, global_mean: Means, potential: GaussianPotential | MixturePotential
    ) -> LocalPosterior:
        self.check(global_mean, potential)
        eta = plug_in(global_mean[self.x_factor])
        z = self.states_given(global_mean, potential.log_partition_ratio(eta))
        states = self.local_families["z"].mean(z)
        x = Gaussian.from_standard(*merge_normals(states.probs, potential.tilted_normal(eta)))
        mean = {"z": states, "x": Gaussian.mean(x)}
        return LocalPosterior({"z": z, "x": x}, mean, no_iterations(len(potential.h)))


class StatesMeanField(CoordinateAscent, States):
    """Updates of q(x) and of q(z) in turn, for each datum, to their fixed point."""

    def infer(self, global_mean: Means, potential: GaussianPotential) -> LocalPosterior:
        self.check(global_mean, potential)
        z_family, x_family = self.local_families["z"], self.local_families["x"]

        def infer_datum(psi: GaussianPotential, start: Array) -> LocalPosterior:
            args = dict(global_mean), psi
            r, info = self.solve(self._sweep, args, start)
            z = self._states_after(args, r)  # the last step is differentiable
            states = z_family.mean(z)
            x = self.vectors_given(*args, states.probs)
            return LocalPosterior({"z": z, "x": x}, {"z": states, "x": x_family.mean(x)}, info)

        return jax.vmap(infer_datum)(potential, self._start(global_mean, potential))

    def _states_after(self, args: tuple[dict[str, Any], GaussianPotential], r: Array) -> Any:
        """q(z) after an update of q(x) and one of q(z)."""
        moments = self.local_families["x"].mean(self.vectors_given(*args, r))
        return self.states_given(args[0], self.log_weights(args[0], moments))

    def _sweep(self, args: tuple[dict[str, Any], GaussianPotential], r: Array) -> Array:
        return self.local_families["z"].mean(self._states_after(args, r)).probs

    def _start(self, global_mean: Means, potential: GaussianPotential) -> Array:
        """The probabilities of the states at first, ``(B, ..., K)``."""
        K = global_mean[self.by_state[0]].log_prob.shape[-1]
        shape = (*potential.h.shape[:-1], K)
        if not isinstance(self.init, str):
            return self.init_in_shape(potential, shape)
        log_weights = jnp.zeros(shape, potential.h.dtype)
        if self.init == "potential":
            moments, proper = own_moments(potential)
            of_states = self.log_weights(global_mean, moments)
            log_weights = jnp.where(proper[..., None], of_states, log_weights)
        return self.local_families["z"].mean(self.states_given(global_mean, log_weights)).probs
