"""The states of chains, and what passes between a kernel's step and its chain."""

from collections import namedtuple
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax import Array
import numpy as np

__all__ = ["Estimate", "Transition", "kernel_state", "shown_fields", "state_class"]

_REPORTED = (
    "potential_energy",
    "grad_norm",
    "step_size",
    "diverging",
    "implied_variance_ratio",
    "kinetic_temperature",
    "thermostat",
    "accept_prob",
)

_BEFORE = {
    "i": "number of transitions made, from 0; it is not reset after warmup.",
    "z": "dict of the latent sites in unconstrained space.",
    "potential_energy": "potential at ``z``; with a minibatch, its estimate where the gradient was"
    " taken last.",
    "grad_norm": "2-norm of the last gradient estimate.",
    "step_size": "step size of the last transition.",
    "diverging": "True if a transition of the last draw met a value that was not finite.",
    "sampling": "False in the exploration stage of a cyclical schedule.",
    "gradient": "state of the gradient estimator.",
    "plates": '``{name: (epoch, offset, rng_key)}`` for ``minibatch="epoch"``, else empty.',
    "step_scale": "factor on the step size: 1, halved at each divergence in warmup.",
    "settings": "``kernel.settings``, None where the step size was given; not an array, so that"
    " ``MCMC`` compiles the chain again for others.",
    "best": "lowest potential estimate of the warmup so far, and the flat vector where it was.",
}


def kernel_state(name: str, module: str, /, **own: str) -> Any:
    """
    The state class of a stochastic-gradient kernel: the fields that all of them have, and its own.

    Assign it to a name of the module, so that states pickle. The docstring of the class lists
    the fields.

    :param str name: name of the class.
    :param str module: ``__name__`` of the module that it belongs to.
    :param own: a description of each of the kernel's own fields, by name.

    .. doctest::

        >>> from numpyro_ext.mcmc import kernel_state
        >>> MyState = kernel_state("MyState", __name__, r="momentum, ``(n,)``.")
        >>> MyState._fields[-3:]
        ('r', 'resumed', 'rng_key')
    """
    return state_class(name, module, _BEFORE | own)


class Estimate(NamedTuple):
    """
    A gradient estimate at a point.

     - **potential** - estimate of U.
     - **grad** - ``(n,)``, estimate of its gradient.
     - **state** - state of the gradient estimator afterwards.
    """

    potential: Array
    grad: Array
    state: Any


class Transition(NamedTuple):
    """
    The result of a kernel's ``step``.

     - **z** - the new ``(n,)`` vector.
     - **estimate** - the :class:`Estimate` to report, and whose ``state`` the chain goes on with.
     - **fields** - new values of the kernel's own fields of the state, by name.
    """

    z: Array
    estimate: Estimate
    fields: dict[str, Array]


def state_class(name: str, module: str, fields: Mapping[str, str]) -> Any:
    """A named tuple with these fields, ``resumed`` and ``rng_key``; the texts make its docstring.

    ``MCMC.run`` goes on from a state by ``state._replace(rng_key=...)``, perhaps with other data.
    This is the only sign of it, so it sets ``resumed`` to True in this class.
    """
    fields = {
        **fields,
        "resumed": "True until the first draw after ``MCMC.run`` has taken the state up again.",
        "rng_key": "random number generator key of the next transition.",
    }
    base = namedtuple(name, tuple(fields), module=module)

    def replace(self: Any, **changes: Any) -> Any:
        if "rng_key" in changes:
            changes.setdefault("resumed", np.ones(np.shape(self.resumed), bool))
        return base._replace(self, **changes)

    text = "\n".join(f" - **{field}** - {what}" for field, what in fields.items())
    body = {"__doc__": f"State of one chain:\n\n{text}\n", "__module__": module, "__slots__": ()}
    return type(name, (base,), {**body, "_replace": replace})


def shown_fields(cls: Any, schedule: Any) -> tuple[str, ...]:
    """The fields that ``MCMC`` collects without being asked."""
    shown = ("z", *(name for name in _REPORTED if name in cls._fields))
    cyclical = hasattr(schedule, "sampling") and "sampling" in cls._fields
    return (*shown, "sampling") if cyclical else shown
