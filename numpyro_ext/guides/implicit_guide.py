"""A network that turns data and noise into local latents, without a density."""

from dataclasses import dataclass

from jax import Array
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to

from numpyro_ext._checks import check_count, if_given
from numpyro_ext._model.implicit import Implicit
from numpyro_ext.guides.amortized import AmortizedGuide, LocalSite
from numpyro_ext.guides.networks import flat_module
from numpyro_ext.transforms.base import checked_output


@dataclass(kw_only=True, eq=False, repr=False)
class ImplicitGuide(AmortizedGuide):
    r"""Local latents from the data of their row and noise, through a network of any shape.

    For row i of the plate, with the features :math:`x_i \in R^f`,

    .. math::
        z_i = net(x_i, e_i), \qquad e_i \sim N(0, I_{noise\_dim}) ,

    in unconstrained space, where :math:`z_i` holds all latent sites of the row. There is no
    density: the loss must need samples alone, such as
    :class:`~numpyro_ext.objectives.ImplicitELBO`. Latents outside the plate keep a density.

    *What it is biased by.* One network serves all rows (the amortisation gap), local latents do not
    depend on draws of the global ones, and the loss has a bias.

    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, from :math:`f
        + noise\_dim` inputs, features first, to one output for each unconstrained number of a row.
        Its weights are the vector ``{prefix}_net$params``.
    :param int noise_dim: numbers of noise per row, by default as many as latents. With fewer the
        draws would lie on a surface, on which no density exists.

    **References:** *Adversarial variational Bayes*, section 3.1, Mescheder, Nowozin and Geiger
    (ICML 2017); *Gradient estimators for implicit models*, section 4.2, Li and Turner (ICLR 2018)

    >>> from jax.example_libraries import stax
    >>> from numpyro_ext.objectives import ImplicitELBO
    >>> def model(x):
    ...     with numpyro.plate("rows", len(x), subsample_size=10):
    ...         z = numpyro.sample("z", dist.Normal(0, 1))
    ...         numpyro.sample("x", dist.Normal(z, 0.5), obs=numpyro.subsample(x, event_dim=0))
    >>> def features(x):
    ...     return numpyro.subsample(x[:, None], event_dim=1)
    >>> net = stax.serial(stax.Dense(16), stax.Elu, stax.Dense(1))
    >>> guide = ImplicitGuide(model, net, plate="rows", features=features)
    >>> svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(20))
    >>> x = jax.random.normal(jax.random.key(0), (50,))
    >>> params = svi.run(jax.random.key(1), 20, x, progress_bar=False).params
    >>> guide.sample_posterior(jax.random.key(2), params, x[:7], sample_shape=(100,))["z"].shape
    (100, 7)
    """

    noise_dim: int | None = None

    def __post_init__(self) -> None:
        self.noise_dim = if_given(check_count, "noise_dim", self.noise_dim)
        super().__post_init__()

    def draw_local(self, x: Array) -> Array:
        L = self.local_dim
        noise_dim = L if self.noise_dim is None else self.noise_dim
        if noise_dim < L:
            raise ValueError(
                f"noise_dim is {noise_dim}, and a row has {L} latent numbers; with less noise than"
                f" that its draws lie on a surface and have no score, so use at least {L}."
            )
        noise = numpyro.sample(
            f"_{self.prefix}_noise",
            dist.Normal().expand([noise_dim]).to_event(1),
            infer={"is_auxiliary": True},
        )
        inputs = jnp.concatenate([x, jnp.reshape(noise, (len(x), noise_dim))], axis=-1)
        net = flat_module(f"{self.prefix}_net$params", self.network, inputs.shape[1:])
        because = f"the {L} latent numbers of each row"
        return checked_output("the network", inputs, net(inputs), (len(x), L), because)

    def register(self, name: str, u: Array, site: LocalSite) -> Array:
        value = biject_to(site.support)(u)
        fn = Implicit(value, event_dim=site.event_dim, support=site.support)
        return jnp.asarray(numpyro.sample(name, fn))
