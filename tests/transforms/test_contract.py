"""The promises of every transform: one table of constructors, one test per law."""

from functools import cache, partial
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions.transforms import ComposeTransform
import pytest

from numpyro_ext.transforms import (
    AdditiveCoupling,
    AffineCoupling,
    Coupling,
    GatedInverseAutoregressive,
    HouseholderTransform,
    LeapfrogTransform,
    MaskedAffineAutoregressive,
    PlanarTransform,
    RadialTransform,
    RationalQuadraticSpline,
    SplineCoupling,
    VectorTransform,
)

D, SPLIT = 4, 1


def net(weights, a):
    return jnp.tanh(a @ weights["w"] + weights["b"])


def masked(weights, x):
    """Autoregressive: entry i of both halves depends on the entries before i alone."""
    before = jnp.triu(jnp.ones((D, D)), 1)
    return 1.5 * jnp.tanh(x @ (weights["w"] * jnp.tile(before, 2)) + weights["b"])


def force(weights, z):
    return jnp.tanh(z) * weights + 0.3 * z


def draws(seed, *shapes):
    return [
        random.normal(k, s)
        for k, s in zip(random.split(random.key(seed), len(shapes)), shapes, strict=True)
    ]


def coupling(cls, outputs, seed, **kwargs):
    w, b = draws(seed, (SPLIT, outputs * (D - SPLIT)), (outputs * (D - SPLIT),))
    return cls(partial(net, {"w": w, "b": b}), SPLIT, **kwargs)


def autoregressive(cls, seed):
    w, b = draws(seed, (D, 2 * D), (2 * D,))
    return cls(partial(masked, {"w": w, "b": b}))


def planar(seed):
    u, w = draws(seed, (D,), (D,))
    # With u.w = -2, because the inverse loses digits as the u.w that is allowed comes near -1.
    u = u - (u @ w + 2.0) / (w @ w) * w
    return PlanarTransform(PlanarTransform.constrain(u, w), w, jnp.array(0.4))


def radial(seed):
    (center,) = draws(seed, (D,))
    return RadialTransform(center, jnp.array(0.7), jnp.array(-0.6))


def spline(seed):
    (raw,) = draws(seed, (D, 14))
    return RationalQuadraticSpline.from_unconstrained(0.7 * raw, jnp.array(2.5))


MAKE = {
    "additive": partial(coupling, AdditiveCoupling, 1),
    "affine": partial(coupling, AffineCoupling, 2),
    "gated IAF": partial(autoregressive, GatedInverseAutoregressive),
    "Householder": lambda seed: HouseholderTransform(*draws(seed, (D,))),
    "leapfrog": lambda seed: LeapfrogTransform(
        partial(force, *draws(seed, (D // 2,))), jnp.array([0.2, 0.4]), 3
    ),
    "MAF": partial(autoregressive, MaskedAffineAutoregressive),
    "planar": planar,
    "radial": radial,
    "spline": spline,
    "spline coupling": partial(coupling, SplineCoupling, 11, num_bins=4, bound=3.0),
}
# Far from the origin, of unequal scales, and some entries beyond the bounds of the splines.
POINTS = 0.4 + jnp.array([1.0, 2.0, 0.5, 1.5]) * random.normal(random.key(1), (2, 20, D))

every = pytest.mark.parametrize("name", MAKE)


@cache
def results(name):
    """Everything that the laws need, compiled at once."""

    # Compilation takes most of the time.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(transform, x):
        y, cached = transform.call_with_intermediates(x)
        one = x.reshape(-1, D)
        jacobians = jax.vmap(jax.jacobian(transform))(one)
        backwards = jax.vmap(jax.jacobian(transform.inv))(y.reshape(-1, D))
        return {
            "y": y,
            "inverse": transform.inv(y),
            "log_det": jnp.linalg.slogdet(jacobians)[1].reshape(x.shape[:-1]),
            "cached": cached,
            "fresh": transform.log_abs_det_jacobian(x, y),
            "of_inverse": -transform.inv.log_abs_det_jacobian(y, x),
            "identity": backwards @ jacobians,
            "weights": jax.grad(lambda t: (t(x) ** 2).sum())(transform),
            "back": jax.jvp(lambda t: t.inv(t(x)), (transform,), (transform,))[1],
        }

    return run(MAKE[name](0), POINTS)


@pytest.mark.slow
@pytest.mark.x64
@every
def test_log_determinant_is_that_of_autodiff(name, tol):
    got = results(name)
    for one in ("cached", "fresh", "of_inverse"):
        assert got[one].shape == POINTS.shape[:-1]
        assert jnp.allclose(got[one], got["log_det"], atol=tol(3e-5, 1e-10))


@pytest.mark.x64
@every
def test_inverse_gives_the_points_back(name, tol):
    got = results(name)
    assert jnp.allclose(got["inverse"], POINTS, atol=tol(1e-5, 1e-9))
    assert jnp.abs(got["y"] - POINTS).max() > 0.1


@pytest.mark.x64
@every
def test_inverse_has_the_derivatives_of_the_implicit_function_theorem(name, tol):
    got = results(name)
    assert jnp.allclose(got["identity"], jnp.eye(D), atol=tol(2e-4, 1e-8))
    # There and back is the identity whatever the parameters are.
    assert jnp.allclose(got["back"], 0.0, atol=tol(2e-4, 1e-8))


@every
def test_parameters_are_leaves_so_that_it_crosses_jit_vmap_and_grad(name):
    gradients = jax.tree.leaves(results(name)["weights"])
    assert gradients and all(jnp.isfinite(g).all() for g in gradients)
    assert any(jnp.abs(g).max() > 0 for g in gradients)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), MAKE[name](0), MAKE[name](1))
    y = jax.jit(jax.vmap(lambda t: t(POINTS[0, 0])))(both)
    expected = jnp.stack([jax.jit(lambda t: t(POINTS[0, 0]))(MAKE[name](i)) for i in range(2)])
    assert jnp.allclose(y, expected, rtol=1e-5, atol=1e-6)


@every
def test_equality_and_round_trips(name):
    transform = MAKE[name](0)
    assert isinstance(transform, VectorTransform) and transform == transform
    assert transform == jax.tree.unflatten(*jax.tree.flatten(transform)[::-1])
    assert transform != HouseholderTransform(jnp.arange(1.0, 3.0))
    assert bool(transform.eq(MAKE[name](0))) and not bool(transform.eq(MAKE[name](1)))
    again = pickle.loads(pickle.dumps(transform))
    assert jnp.array_equal(again(POINTS), transform(POINTS))


def test_own_draws_are_never_inverted(monkeypatch):
    """The base keeps the log determinant with the draw."""

    def refuse(self, y):
        raise AssertionError("inverted")

    monkeypatch.setattr(PlanarTransform, "_inverse", refuse)
    chain = ComposeTransform([planar(0), planar(1)])
    q = dist.TransformedDistribution(dist.Normal(jnp.zeros(D), 1).to_event(1), chain)

    def density(cached):
        z, used = q.sample_with_intermediates(random.key(2), (4,))
        return q.log_prob(z, used if cached else None)

    # Tracing is enough to meet an inverse.
    assert jax.eval_shape(lambda: density(True)).shape == (4,)
    with pytest.raises(AssertionError, match="inverted"):
        jax.eval_shape(lambda: density(False))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated IAF", "planar", "radial", "spline coupling"])
def test_density_integrates_to_one(name):
    grid = jnp.linspace(-14.0, 14.0, 1201)
    u, w = jnp.array([1.5, -2.0]), jnp.array([1.0, 0.8])
    flow = {
        "gated IAF": GatedInverseAutoregressive(
            lambda x: jnp.stack(
                [0 * x[..., 0], jnp.sin(x[..., 0]), 0 * x[..., 0], x[..., 0] - 1.0], -1
            )
        ),
        "planar": PlanarTransform(PlanarTransform.constrain(u, w), w, 0.3),
        "radial": RadialTransform(jnp.array([0.5, -0.4]), 1.3, 4.0),
        "spline coupling": SplineCoupling(lambda a: jnp.sin(a + jnp.arange(11.0)), 1, num_bins=4),
    }[name]
    q = dist.TransformedDistribution(dist.Normal(jnp.zeros(2), 1).to_event(1), flow)

    @jax.jit
    def mass():
        points = jnp.stack(jnp.meshgrid(grid, grid), -1)
        return jnp.exp(q.log_prob(points)).sum() * (grid[1] - grid[0]) ** 2

    # The density has kinks at the knots of a spline; the rule is of second order elsewhere.
    assert abs(mass() - 1.0) < 2e-3


def test_a_coupling_of_ones_own_needs_only_its_move():
    class Shift(Coupling):
        outputs_per_coordinate = 1

        def move(self, b, out, inverse):
            return (b - out if inverse else b + out), 0 * b

    net = lambda a: jnp.sin(a[..., :1]) * jnp.ones(3)  # noqa: E731
    ours, theirs = Shift(net, SPLIT), AdditiveCoupling(net, SPLIT)
    assert jnp.array_equal(ours(POINTS), theirs(POINTS))
    assert jnp.array_equal(ours.inv(POINTS), theirs.inv(POINTS))


V2 = jnp.ones(2)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: PlanarTransform(-V2, V2, 0.0), "u.w is -2; .*constrain"),
        (lambda: RadialTransform(V2, 0.0, 1.0), "alpha is 0.0"),
        (lambda: RadialTransform(V2, 0.5, -0.5), "beta is -0.5 and alpha"),
        (lambda: HouseholderTransform(0 * V2), "v is zero"),
        (lambda: LeapfrogTransform(jnp.sin, 0.0, 3), "step_size is 0.0"),
        (lambda: RationalQuadraticSpline(V2, V2, V2[:1], 2.0), "widths must add up to 2"),
        (lambda: RationalQuadraticSpline(V2, V2, V2, 1.0), r"end in axes of \[2, 2, 2\]"),
        (lambda: RationalQuadraticSpline(V2, V2, -V2[:1], 1.0), "must be positive"),
        (lambda: SplineCoupling(jnp.sin, 1, num_bins=1), "num_bins is 1"),
        (lambda: MaskedAffineAutoregressive(jnp.sin, clamp=0.0), "clamp is 0"),
        (lambda: AffineCoupling(jnp.sin, 2)(V2), "split is 2 and the vector has length 2"),
        (lambda: AffineCoupling(jnp.sin, 1)(V2), r"it must give \(2,\)"),
        (lambda: GatedInverseAutoregressive(jnp.sin)(V2), r"it must give \(4,\)"),
    ],
)
def test_bad_arguments_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
