"""Local reparameterisation: noise on the outputs of a linear map, fresh for each row."""

from contextvars import ContextVar
from typing import Any

from jax import Array, random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_uniform
from numpyro.infer.autoguide import AutoNormal
from numpyro.primitives import Messenger

from numpyro_ext._model.read import base_distribution, shape_trace
from numpyro_ext._numpyro import replayed_trace
from numpyro_ext._typing import Model, Sites, Trace


def linear(x: Array, w: Array, *, site: str) -> Array:
    r"""``x @ w``, which :func:`local_reparam` replaces in training.

    :param x: inputs ``(..., in)``.
    :param w: the value of the latent site, ``(in, out)`` or ``(in,)``.
    :param str site: its name.
    :return: ``(..., out)`` or ``(...)``.

    >>> print(linear(jnp.array([[1.0, 2.0]]), jnp.array([3.0, 4.0]), site="w"))
    [11.]
    """
    maps = _MAPS.get()
    return x @ w if maps is None else maps.apply(jnp.asarray(x), w, site)


class local_reparam:
    r"""The model with noise on the outputs of its linear maps in place of noise on their weights.

    For weights :math:`W \sim N(M, V)`, independent, the outputs of a row are

    .. math::
        x W \sim N(x M,\; x^2 V), \qquad x W = x M + \sqrt{x^2 V} \odot \epsilon ,

    with squares elementwise. The model writes ``linear(x, w, site="w")`` for ``x @ w``, and this
    wrapper draws :math:`\epsilon` for each row, not one for all. The loss and its gradient have the
    same expectation, and a variance that falls as 1/rows. Train by a loss that has the KL
    divergence of the weights in closed form, as below; outside of a training step the result is the
    plain model.

    **When it fails.** A weight must enter the likelihood through one call of ``linear`` alone; a
    second use in another way is not noticed. The row of an output must be used for that row of the
    data alone, so no map under a convolution or an attention, and no layer of Flax or Equinox.

    :param model: a model that calls :func:`linear` inside its plate, on sites with normal priors.
    :param guide: the guide that ``SVI`` is given too: ``AutoNormal`` of the plain model, or a guide
        of your own that draws these sites from ``Normal``.

    **Reference:** *Variational dropout and the local reparameterization trick*, equation 6, Kingma,
    Salimans and Welling (NIPS 2015)

    >>> from numpyro.infer import TraceMeanField_ELBO
    >>> def model(X, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    ...     with numpyro.plate("data", len(X)):
    ...         f = linear(X, w, site="w")  # was: X @ w
    ...         numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
    >>> X = jax.random.normal(jax.random.key(0), (100, 3))
    >>> y = X @ jnp.array([1.0, -2.0, 0.5])
    >>> guide = AutoNormal(model)
    >>> svi = SVI(local_reparam(model, guide), guide, optax.adam(0.02), TraceMeanField_ELBO())
    >>> params = svi.run(jax.random.key(1), 1000, X, y, progress_bar=False).params
    >>> bool(abs(params["w_auto_loc"] - jnp.array([1.0, -2.0, 0.5])).max() < 0.1)
    True
    """

    fn: Model
    """The plain model, under the name that NumPyro's handlers have for it."""

    def __init__(self, model: Model, guide: Model) -> None:
        if isinstance(guide, AutoNormal) and isinstance(guide.model, local_reparam):
            raise ValueError("the guide is made of the wrapped model; give it the plain one.")
        self.fn = model
        self.__name__ = getattr(model, "__name__", type(model).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        drawn = replayed_trace()
        if drawn is None:  # no loss, so the plain model
            return self.fn(*args, **kwargs)
        plain = _Maps(self.fn, drawn, None)  # a run without arithmetic
        shape_trace(substitute(seed(plain, 0), substitute_fn=init_to_uniform), args, kwargs)
        if not plain.called:
            raise ValueError(
                "the model of local_reparam calls no linear(x, w, site=...), so nothing would"
                " change; write it in place of x @ w, or leave local_reparam out."
            )
        return _Maps(self.fn, drawn, plain.called)(*args, **kwargs)


class _Maps(Messenger):
    """The linear maps of a model, with noise on the outputs for the sites ``names``; None for the
    plain model, which lists its sites in ``called``."""

    def __init__(self, fn: Model, drawn: Trace, names: list[str] | None) -> None:
        super().__init__(fn)
        self.drawn, self.names = drawn, names
        self.values: Sites = {}
        self.called: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _MAPS.set(self)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            _MAPS.reset(token)

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            self.values[msg["name"]] = msg["value"]

    def check(self, w: Any, site: str) -> None:
        if site not in self.drawn or site not in self.values:
            raise ValueError(
                f"linear has site='{site}', which is no latent site of both model and guide."
            )
        if w is not self.values[site]:
            raise ValueError(f"linear was given another array than the value of its site '{site}'.")
        if site in self.called:
            raise ValueError(
                f"linear is called twice with site='{site}'; noise of its own for each call would"
                " not be one draw of the weights. Train this model without local_reparam."
            )
        self.called.append(site)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["name"] in (self.names or ()):
            name = msg["name"]
            prior, ours = base_distribution(msg["fn"]), base_distribution(self.drawn[name]["fn"])
            for what, fn in (("the model", prior), ("the guide", ours)):
                if type(fn) not in (dist.Normal, _PriorOfMap):
                    raise ValueError(
                        f"{what} draws '{name}' from {type(fn).__name__}; local_reparam needs"
                        " Normal in both, for the KL divergence in closed form."
                    )
            loc, scale = (
                jnp.broadcast_to(a, msg["fn"].batch_shape + msg["fn"].event_shape)
                for a in (msg["fn"].mean, jnp.sqrt(msg["fn"].variance))
            )
            msg["fn"] = _PriorOfMap(loc, scale).to_event(msg["fn"].event_dim)

    def apply(self, x: Array, w: Array, site: str) -> Array:
        self.check(w, site)
        if self.names is None:
            return x @ w
        fn = self.drawn[site]["fn"]
        mean, variance = x @ fn.mean, x**2 @ fn.variance
        # The square root has no derivative at 0, where all inputs of a row are.
        positive = variance > 0
        sd = jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1.0)), 0.0)
        key: Any = numpyro.prng_key()
        return mean + sd * random.normal(key, mean.shape, mean.dtype)


class _PriorOfMap(dist.Normal):
    """A normal prior without a density: its KL divergence is known."""

    def log_prob(self, value: Any, intermediates: Any = None) -> Array:
        raise ValueError(
            "local_reparam needs a loss with the KL divergence in closed form; use"
            " TraceMeanField_ELBO, or leave local_reparam out."
        )


_MAPS: ContextVar[_Maps | None] = ContextVar("local_maps", default=None)
