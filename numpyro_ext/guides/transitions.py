"""Transitions that carry a guide's draw towards the posterior, with parameters that are learnt."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
import math
from typing import Any

import jax
from jax import Array
from jax.example_libraries import stax
from jax.nn.initializers import zeros
import jax.numpy as jnp
import numpyro

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext.guides.networks import flat_module

Step = Callable[[Any, Array, Array, Array], Array]
"""``(parameters of the step, z, grad log p*(z), xi) -> z``, all vectors ``(d,)``."""


@dataclass(eq=False)
class LearntTransition(ABC):
    """Base of the transitions of ``AutoImplicit``, of T = ``num_steps`` steps, at first of the size
    ``step_size`` in units of length squared."""

    num_steps: int = 5
    step_size: float = 1e-2

    def __post_init__(self) -> None:
        self.num_steps = check_count("num_steps", self.num_steps)
        check_positive("step_size", self.step_size)

    @abstractmethod
    def begin(self, prefix: str, dim: int) -> tuple[Any, Step]:
        """Register the parameters, with a leading axis T, and give them with the step."""


@dataclass(eq=False)
class Langevin(LearntTransition):
    r"""Langevin steps with a learnt step size for each step and coordinate.

    .. math::
        z_{t+1} = z_t + \zeta_t \odot \nabla \log p^*(z_t) + \sqrt{2 \zeta_t} \odot \xi_t,
        \qquad \xi_t \sim N(0, I),

    in unconstrained space, with the parameters :math:`\log \zeta_t`, ``(T, d)``, under the name
    ``{prefix}_log_step``. A gradient of the loss takes second derivatives of the model. There is no
    acceptance step: steps too long for the posterior diverge.

    :param float step_size: the initial :math:`\zeta`, in units of length squared.

    >>> from numpyro_ext.guides import AutoImplicit, Langevin
    >>> guide = AutoImplicit(model, transition=Langevin(5, 0.1), init_from=None)
    >>> params = numpyro.handlers.trace(numpyro.handlers.seed(guide, 0)).get_trace()
    >>> params["auto_log_step"]["value"].shape
    (5, 2)
    """

    def begin(self, prefix: str, dim: int) -> tuple[Any, Step]:
        start = jnp.full((self.num_steps, dim), math.log(self.step_size))
        log_step: Any = numpyro.param(f"{prefix}_log_step", start)

        def step(log_step: Array, z: Array, g: Array, xi: Array) -> Array:
            return z + jnp.exp(log_step) * g + jnp.sqrt(2.0) * jnp.exp(0.5 * log_step) * xi

        return log_step, step


@dataclass(eq=False)
class NNSampler(LearntTransition):
    r"""Steps with drift and noise from one small network, the same for every coordinate.

    .. math::
        z_{t+1} = z_t + \zeta D(z_t, g_t) + s(z_t, g_t) \odot \xi_t, \qquad
        g_t = \nabla \log p^*(z_t), \quad \xi_t \sim N(0, I),

    where a network of ``hidden_dim`` softplus units maps the pair :math:`(z_i, g_i)` of a
    coordinate to :math:`(a_i, b_i)`, and

    .. math::
        \zeta D = \zeta g + \sqrt{2\zeta}\, a, \qquad
        s = \sqrt{2\zeta}\, \mathrm{softplus}(b + \log(e - 1)).

    :param float step_size: :math:`\zeta`, in units of length squared.
    :param int hidden_dim: number of hidden units.

    The network starts at zero, where these are the steps of :class:`Langevin`. It knows neither the
    coordinate nor their number, so its weights, under the name ``{prefix}_sampler$params``, serve
    another model too (pass them in ``init_params``).

    **Reference:** *Gradient estimators for implicit models*, section 5.2, Li and Turner (ICLR 2018)

    >>> from numpyro_ext.guides import AutoImplicit, NNSampler
    >>> guide = AutoImplicit(model, transition=NNSampler(hidden_dim=20), init_from=None)
    >>> params = numpyro.handlers.trace(numpyro.handlers.seed(guide, 0)).get_trace()
    >>> params["auto_sampler$params"]["value"].shape  # 2 x 20 + 20 and 20 x 2 + 2
    (102,)
    """

    num_steps: int = 10
    step_size: float = 1e-5
    hidden_dim: int = 20

    def __post_init__(self) -> None:
        self.hidden_dim = check_count("hidden_dim", self.hidden_dim)
        super().__post_init__()

    def begin(self, prefix: str, dim: int) -> tuple[Any, Step]:
        last = stax.Dense(2, W_init=zeros, b_init=zeros)
        pair = stax.serial(stax.Dense(self.hidden_dim), stax.Softplus, last)
        network = flat_module(f"{prefix}_sampler$params", pair, (2,))
        width = math.sqrt(2 * self.step_size)

        def step(_: None, z: Array, g: Array, xi: Array) -> Array:
            a, b = jnp.moveaxis(network(jnp.stack([z, g], axis=-1)), -1, 0)
            noise = jax.nn.softplus(b + math.log(math.e - 1)) * xi
            return z + self.step_size * g + width * (a + noise)

        return None, step
