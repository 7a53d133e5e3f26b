"""The bases of guides: all latent sites as one vector, and where they begin."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
import math
from typing import Any, ClassVar, Self

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.tree_util import Partial
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform
from numpyro.handlers import block, seed, substitute
from numpyro.infer.initialization import init_to_uniform
from numpyro.primitives import Messenger
from numpyro.util import not_jax_tracer

from numpyro_ext._checks import OwnArgumentsFirst, check_count, check_positive
from numpyro_ext._model.arguments import check_frames, is_traced
from numpyro_ext._model.arrow import Arrow
from numpyro_ext._model.checks import read_global
from numpyro_ext._model.circular_guide import CircularGuide
from numpyro_ext._model.implicit import IntractableDensityError
from numpyro_ext._model.masked import record_filled
from numpyro_ext._model.mode_search import is_searched, modes_or_warning
from numpyro_ext._model.modes import (
    DENSE_UP_TO,
    SEARCH,
    InitFrom,
    Mode,
    Modes,
    check_sites,
    given_modes,
)
from numpyro_ext._model.normal import Normal
from numpyro_ext._model.operations import quick_options, run_once
from numpyro_ext._model.potential import supports_of
from numpyro_ext._model.read import (
    ModelInfo,
    call_and_trace,
    is_only_recorded,
    steps_of_draw,
    transforms_of,
    values_of,
    without_expand,
)
from numpyro_ext._model.same import is_of_libraries
from numpyro_ext._model.start import guide_start
from numpyro_ext._numpyro import handlers_around
from numpyro_ext._typing import Model, Params, Shape, Sites
from numpyro_ext.guides.fixed import fixed_param
from numpyro_ext.transforms import VectorTransform

NUM_QUANTILE_DRAWS = 10_000


class _drawn_by_programs(Messenger):
    """Each draw through transforms in one program, where every operation of a flow would be
    compiled by itself. ``seed`` gives the same keys.

    :param first: whether the guide is called for the first time: then any program is made for one
        run, and log densities of the draws may be asked for.
    """

    def __init__(self, fn: Model | None = None, *, first: bool) -> None:
        super().__init__(fn)
        self.first = first

    def process_message(self, msg: dict[str, Any]) -> None:
        given = msg["value"] is not None or msg["kwargs"].get("rng_key") is not None
        if msg["type"] != "sample" or given or not transforms_of(msg["fn"]):
            return
        rng_key: Any = numpyro.prng_key()
        msg["kwargs"]["rng_key"] = rng_key
        fn, shape = msg["fn"], msg["kwargs"].get("sample_shape", ())
        if rng_key is not None and not is_traced(rng_key) and _is_argument(fn):
            fn, shape = without_expand(fn, shape)
            numbers = math.prod(shape) * sum(map(np.size, jax.tree.leaves(fn)))
            draw = _draw(not quick_options(numbers))
            msg["value"], msg["intermediates"] = draw(fn, rng_key, shape, self.first)
        elif rng_key is not None and self.first:
            draw = partial(fn.sample_with_intermediates, sample_shape=shape)
            msg["value"], msg["intermediates"] = run_once(draw, rng_key)

    @classmethod
    def evaluate(cls, fn: Callable[[Any], Any], x: Any) -> Any:
        """``fn(x)``, in one program inside of this handler."""
        if is_traced(x) or not any(isinstance(handler, cls) for handler in handlers_around()):
            return fn(x)
        y = run_once(fn, x)
        # Of what is not finite NumPyro says more, where it is no result of a program.
        return y if all(np.all(np.isfinite(a)) for a in jax.tree.leaves(y)) else fn(x)


def _is_argument(fn: dist.Distribution) -> bool:
    """Whether a distribution can be the argument of a program: its leaves are arrays of known
    numbers and other floats, and what is no leaf is code of libraries."""
    if not _has_code_of_libraries(fn):  # whose classes lose nothing in flattening
        return False
    leaves = jax.tree.leaves(fn)
    return not is_traced(leaves) and all(isinstance(x, Array | np.ndarray | float) for x in leaves)


def _has_code_of_libraries(x: Any) -> bool:
    if isinstance(x, list | tuple):
        return all(map(_has_code_of_libraries, x))
    if not is_of_libraries(x.func if isinstance(x, Partial) else x):
        return False
    if isinstance(x, VectorTransform) and not all(_is_hashable(getattr(x, n)) for n in x.static):
        return False  # JAX compares them in every call
    parts = vars(x).values() if isinstance(x, Transform | dist.Distribution) else ()
    return all(map(_has_code_of_libraries, parts))


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


@cache
def _draw(optimised: bool) -> Callable[..., tuple[Array, list[Any]]]:
    """A program that has nothing of a guide in it: the distribution is its argument."""

    def draw(fn: Any, rng_key: Array, shape: Shape, intermediates: bool) -> tuple[Any, list[Any]]:
        if intermediates:
            return steps_of_draw(fn, rng_key, shape)
        return fn.sample(rng_key, shape), []

    options: Any = None if optimised else quick_options()
    return jax.jit(draw, static_argnums=(2, 3), compiler_options=options)


@dataclass(kw_only=True, eq=False, repr=False)
class AutoJoint(CircularGuide):
    """Base of the guides over all latent sites together, as one vector in unconstrained space.

    A subclass writes ``latent_distribution()``, the distribution of the ``(latent_dim,)`` vector,
    with its parameters by ``numpyro.param``; ``{prefix}_loc`` is one of them. It is a
    transformation of ``get_base_dist()``, by default standard normal.

    :param model: a NumPyro model of continuous latent sites, none of them local to a subsampled
        plate.
    :param float init_scale: the initial standard deviation of every unconstrained coordinate.
    :param str prefix: the first part of the names of the guide's own sites.
    :param init_loc_fn: a per-site initialization function, for ``loc``.
    :param bool forward_mode_differentiation: as of NumPyro's guides. Starts and modes are found in
        forward mode in any case where a primitive, such as ``while_loop``, has no derivative in
        reverse; the steps of an ``SVI`` take the argument of this name of its ``run``.
    """

    __signature__ = OwnArgumentsFirst()

    model: Model = field(kw_only=False)
    init_scale: float = 0.1
    prefix: str = "auto"
    init_loc_fn: Callable[..., Any] = init_to_uniform
    forward_mode_differentiation: bool = False

    def __post_init__(self) -> None:
        check_model(type(self), self.model)
        check_positive("init_scale", self.init_scale)
        super().__init__(
            self.model,
            prefix=self.prefix,
            init_loc_fn=self.init_loc_fn,
            forward_mode_differentiation=self.forward_mode_differentiation,
        )

    def supports_at(self, z: Sites, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        return supports_of(self, args, kwargs, z)

    def evaluate(self, fn: Callable[[Any], Any], x: Any) -> Any:
        return _drawn_by_programs.evaluate(fn, x)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_frames(self.model, args, kwargs)
        once = self.prototype_trace is None and is_only_recorded()
        with _drawn_by_programs(first=True) if once else nullcontext():
            values = super().__call__(*args, **kwargs)
        record_filled(f"_{self.prefix}", self, values, args, kwargs)
        return values

    def read(self, *args: Any, **kwargs: Any) -> ModelInfo:
        """The latent sites of the model; an error if one is local to a subsampled plate."""
        because = f"{type(self).__name__} is one distribution over all latents together"
        return read_global(self.model, args, kwargs, because=because)

    def start(self, *args: Any, **kwargs: Any) -> tuple[Array, Sites]:
        return guide_start(self, self.read(*args, **kwargs), args, kwargs)

    def get_base_dist(self) -> dist.Distribution:
        zeros = np.zeros(self.latent_dim, jnp.result_type(float))  # which compiles nothing
        return dist.Normal(zeros, 1, validate_args=False).to_event(1)

    def get_transform(self, params: Params) -> Transform:
        self.check_fitted(params)
        return super().get_transform(params)

    def check_fitted(self, params: Params) -> None:
        """An error if the guide has not seen its model, or if ``params`` are of another guide."""
        if self.prototype_trace is None:
            raise ValueError(
                f"{type(self).__name__} has not seen its model; call svi.init or svi.run first."
            )
        check_params(params, [f"{self.prefix}_loc"], self)

    def draw(
        self,
        rng_key: Array,
        params: Params,
        sample_shape: Shape = (),
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Array:
        """Latent vectors from ``sample_vector``, without a trace of their sites."""
        self.check_fitted(params)
        with block(), self.on_cuts(params):
            vector = _drawn_by_programs(self.sample_vector, first=False)
            fn: Any = substitute(seed(vector, rng_key), params)
            z, trace = call_and_trace(fn, (sample_shape, args, kwargs or {}), {})
        check_params(params, values_of(trace, "param"), self)
        return z

    def sample_latent(
        self, rng_key: Array, params: Params, num_samples: int | None = None
    ) -> Array:
        """The ``(num_samples, latent_dim)`` draws of :meth:`sample_posterior` before constraining,
        differentiable in ``params``."""
        return self.draw(rng_key, params, (check_count("num_samples", num_samples),))

    def sample_posterior(
        self, rng_key: Array, params: Params, *args: Any, sample_shape: Shape = (), **kwargs: Any
    ) -> Sites:
        """Draws of the latent sites, constrained, with the model's deterministic sites.

        :param args: the model's arguments, for sites that depend on them; without any, the
            arguments of the first call are used (NumPyro's own guides always use these), and it is
            an error if a later fit began on others with which a site differs.
        :param tuple sample_shape: the leading axes of every site.
        :return: a dict of arrays of shape ``sample_shape + site shape``.
        """
        latent = self.draw(rng_key, params, sample_shape, args, kwargs)
        return self.constrain(latent, params, args, kwargs)

    def median(self, params: Params) -> Sites:
        """The 0.5 quantiles, see :meth:`quantiles`."""
        return self.quantiles(params, 0.5)

    def quantiles(self, params: Params, quantiles: Any) -> Sites:
        """Quantiles of every unconstrained coordinate, constrained, from 10,000 draws of one key.

        Where the bijection acts on each coordinate alone these are the marginal quantiles.
        Deterministic sites are evaluated there.

        :param quantiles: a number or a list of numbers between 0 and 1; their axis is the first.
        """
        q = levels_of(quantiles)
        draws = self.sample_latent(random.key(0), params, NUM_QUANTILE_DRAWS)
        return self.constrain(jnp.quantile(draws, q, axis=0), params)


@dataclass(kw_only=True, eq=False, repr=False)
class AutoAtModes(AutoJoint):
    r"""Base of the guides that begin at the modes of their posterior.

    At ``svi.init`` the guide searches for the modes of the posterior on the arguments of that call,
    by :func:`~numpyro_ext.optim.find_modes`. Its last layer is the fixed map :math:`z = c + A x` of
    the heaviest one. What is trained lies inside, where the posterior is near N(0, I), so that a
    learning rate means the same for every model. ``svi.get_params`` gives the map with the other
    parameters, as ``{prefix}_center`` and ``{prefix}_root``, but an optimiser neither sees nor
    moves it. The angles opposite of the cuts of latent circles are ``{prefix}_cut``, which has no
    gradient; mask it where there is weight decay.

    It begins at N(init_loc, init_scale^2 I) instead, as NumPyro's guides do, if ``init_loc_fn`` or
    ``init_scale`` is given or ``init_from`` is None; for models of more latent dimensions than
    ``most_searched``, 512, or 2,048 of a flow, and models with networks; and, with a warning, if
    arguments are traced or the search fails.

    :param init_from: ``"search"``; or a result of ``find_modes``, ``(guide, params)`` of a fitted
        normal guide of NumPyro on the same model, or a ``taylor_proxy`` of it at its mode; or None.
    """

    init_from: InitFrom = SEARCH

    num_searches, num_modes = 4, 1
    """The number of searches, and of modes at which the guide can begin."""
    most_searched: ClassVar[int | None] = DENSE_UP_TO
    """The latent numbers up to which the guide searches."""
    by_groups: ClassVar[bool] = False
    """Whether it takes the structure of a hierarchy of any size."""
    start_arguments = ("init_loc_fn", "init_scale")
    """Arguments that say where NumPyro's start is, so that giving one of them means no search."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        own = any(name in kwargs for name in cls.start_arguments) and "init_from" not in kwargs
        self.searches = not own
        return self

    def __post_init__(self) -> None:
        self.modes_given = given_modes(self.init_from)
        self.start_modes = self.modes_given
        """The modes at which the guide began, once it has."""
        self.searches = self.searches and isinstance(self.init_from, str)
        self.init_from = SEARCH if self.searches else None  # a fitted guide may not pickle
        self.find_modes: Callable[[], Modes | None] | None = None
        super().__post_init__()

    def read(self, *args: Any, **kwargs: Any) -> ModelInfo:
        info = super().read(*args, **kwargs)
        if self.modes_given is not None:
            check_sites(self.modes_given, info)
        return info

    def check_fitted(self, params: Params) -> None:
        super().check_fitted(params)
        if self.is_mapped:
            check_params(params, [f"{self.prefix}_center", f"{self.prefix}_root"], self)

    def start(self, *args: Any, **kwargs: Any) -> tuple[Array, Sites]:
        """The heaviest mode, where there is to be a map of it; elsewhere NumPyro's start."""
        info, modes = self.read(*args, **kwargs), self.modes_given
        most = self.most_searched
        searches = self.searches and is_searched(info.size, info.params, bool(info.mutable), most)
        center = fixed_param(f"{self.prefix}_center") if searches else None
        if searches and center is None:
            modes = self.modes()
        info = self.cut(info, args, kwargs, modes)
        if modes is None and (center is None or is_traced(center)):
            return guide_start(self, info, args, kwargs)
        rng_key: Any = numpyro.prng_key()
        at: Any = center if modes is None else modes.heaviest.center
        return rng_key, info.unravel(np.asarray(at))

    def start_circles(self) -> Array | None:
        modes = self.modes() if self.is_mapped else None
        if modes is None:
            return None
        return jnp.zeros(self.latent_dim) if modes.circles is None else modes.circles

    @property
    def is_mapped(self) -> bool:
        if self.modes_given is not None:
            return True
        trace: Any = self.prototype_trace
        params, mutable = values_of(trace, "param"), bool(values_of(trace, "mutable"))
        return self.searches and is_searched(self.latent_dim, params, mutable, self.most_searched)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.called_with(args, kwargs):
            return super().__call__(*args, **kwargs)

    @contextmanager
    def called_with(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
        """Let :meth:`modes` search on the arguments of this call of the guide, at most once."""
        starts, room = self.num_searches, self.num_modes
        how: Any = {"starts": starts, "room": room, "by_groups": self.by_groups}
        search = partial(modes_or_warning, self.model, args, kwargs, **how)
        before, self.find_modes = self.find_modes, cache(search)
        try:
            yield
        finally:
            self.find_modes = before

    def modes(self) -> Modes | None:
        """The modes at which the guide begins; None for NumPyro's start."""
        if self.modes_given is not None or self.find_modes is None:
            return self.modes_given
        self.start_modes = self.find_modes()
        return self.start_modes

    def known_map(self) -> tuple[Array, Any] | None:
        """The fixed map that is among the parameters already; None where there is none yet."""
        names = [f"{self.prefix}_{name}" for name in ("center", "root", "loc")]
        center, root = map(fixed_param, names[:2])
        loc = numpyro.param(names[2])
        if center is not None and root is not None:
            return lax.stop_gradient((jnp.asarray(center), jnp.asarray(root)))
        if loc is not None:  # in unknown units
            raise ValueError(
                f"the parameters have '{names[2]}' but not '{names[0]}' and '{names[1]}', its"
                f" units; give all of this {type(self).__name__}, or make it with init_from=None."
            )
        return None

    def new_map(self, center: Array, root: Any) -> tuple[Array, Any]:
        """Register the fixed map as parameters."""
        center, root = (
            jnp.asarray(fixed_param(f"{self.prefix}_{name}", value))
            for name, value in (("center", center), ("root", root))
        )
        return lax.stop_gradient((center, root))

    def begin(self) -> tuple[Array, Array, list[Transform], Mode | None]:
        """The location and standard deviations ``(latent_dim,)`` at the start; the fixed map after
        them, if there is one; and its mode, if that was found in this call."""
        d = self.latent_dim
        usual = partial(jnp.full, d, self.init_scale)
        if not self.is_mapped:
            return self.init_latent, usual(), [], None
        (loc, scale), mode = jax.device_put([np.zeros(d), np.ones(d)]), None  # compiles nothing
        fixed = self.known_map()
        if fixed is None:
            modes = self.modes()
            if modes is None:
                x, A = loc, scale
                loc, scale = self.init_latent, usual()
                A = jnp.eye(d) if d <= DENSE_UP_TO else A
            else:
                mode = modes.heaviest
                x, A = mode.center, self.units(mode)
            fixed = self.new_map(x, A)
        return loc, scale, [FixedMap(Normal(*fixed))], mode

    def units(self, mode: Mode) -> Any:
        arrow = isinstance(mode.factor, Arrow)
        return jnp.asarray(mode.conditional_sds) if arrow else mode.factor


@dataclass(kw_only=True, eq=False, repr=False)
class AutoWithoutDensity(AutoAtModes):
    """Base of the guides that draw the latent vector and auxiliary sites, by ``sample_vector``."""

    @abstractmethod
    def sample_vector(self, sample_shape: Shape, args: tuple, kwargs: Params) -> Array:
        """Latent vectors ``(*sample_shape, latent_dim)``, and the guide's own sites on the way."""

    def auxiliary(self, name: str, fn: dist.Distribution) -> Any:
        """A draw of the guide's own site ``_{prefix}_{name}``."""
        return numpyro.sample(f"_{self.prefix}_{name}", fn, infer={"is_auxiliary": True})

    def loc_and_scale(self) -> tuple[Any, Any, list[Transform]]:
        """The trained location and standard deviations, and the fixed map after them, if any."""
        loc, scale, fixed, _ = self.begin()
        loc, positive = numpyro.param(f"{self.prefix}_loc", loc), constraints.softplus_positive
        return loc, numpyro.param(f"{self.prefix}_scale", scale, constraint=positive), fixed

    def latent_distribution(self) -> dist.Distribution:
        raise IntractableDensityError(
            f"{type(self).__name__} has no density of its latent vector alone; use its draws, by"
            " sample_posterior, or a guide that has one, such as AutoRealNVPNormal."
        )

    def get_base_dist(self) -> dist.Distribution:
        return self.latent_distribution()  # raises


class FixedMap(VectorTransform):
    """The map :math:`c + A x` of a normal."""

    arrays = ("normal",)

    def __init__(self, normal: Normal) -> None:
        self.normal = normal

    def call_with_intermediates(self, x: Array) -> tuple[Array, Array]:
        y = jnp.vectorize(self.normal.to_z, signature="(n)->(n)")(x)
        return y, jnp.broadcast_to(self.normal.log_volume, x.shape[:-1])

    def _inverse(self, y: Array) -> Array:
        return jnp.vectorize(self.normal.to_xi, signature="(n)->(n)")(y)


def with_fixed_map(fn: dist.Distribution, fixed: Sequence[Transform]) -> dist.Distribution:
    """The distribution after the fixed map of :meth:`AutoAtModes.begin`, if there is one."""
    return dist.TransformedDistribution(fn, list(fixed)) if fixed else fn


def apply_fixed_map(x: Array, fixed: Sequence[Transform]) -> Array:
    """Apply the fixed map, if there is one."""
    return jnp.asarray(fixed[0](x)) if fixed else x


def inverse_fixed_map(z: Array, fixed: Sequence[Transform]) -> Array:
    """Invert the fixed map, if there is one."""
    return jnp.asarray(fixed[0].inv(z)) if fixed else z


def check_model(guide: type, model: Any) -> None:
    """An error unless ``model`` can be a model: ``SVI`` was given the class of a guide, mostly."""
    if not callable(model):
        raise TypeError(
            f"{guide.__name__} was given {type(model).__name__} for its model, which must be a"
            " function; if this comes from SVI, pass it a guide and not its class."
        )


def check_params(params: Params, names: Iterable[str], guide: Any) -> None:
    """An error unless ``params`` has these names: NumPyro takes initial values for the others."""
    for name in names:
        if name not in params:
            raise ValueError(
                f"params has no '{name}' but {sorted(params)}; pass what svi.get_params gives for"
                f" this {type(guide).__name__} (prefix '{guide.prefix}')."
            )


def draws_of[T](
    draw: Callable[[Array], T],
    rng_key: Array,
    sample_shape: Shape,
    batch_size: int | None = None,
) -> T:
    """``draw(key)`` for a key of each draw, the sample shape in front, ``batch_size`` at a time."""
    keys = random.split(rng_key, math.prod(sample_shape))
    if batch_size is not None:
        batch_size = min(batch_size, len(keys))
    draws = lax.map(draw, keys, batch_size=batch_size)
    return jax.tree.map(lambda x: x.reshape(*sample_shape, *x.shape[1:]), draws)


def levels_of(quantiles: Any) -> Array:
    """The levels of quantiles as an array, with an error unless they are between 0 and 1."""
    q = jnp.asarray(quantiles, dtype=jnp.result_type(float))
    if not_jax_tracer(q) and not bool(((q >= 0) & (q <= 1)).all()):
        raise ValueError(f"quantiles is {quantiles!r}; every entry must be between 0 and 1.")
    return q
