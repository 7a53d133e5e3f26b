"""Values of the transforms by hand, and where a formula needs care."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.transforms import (
    AffineCoupling,
    GatedInverseAutoregressive,
    HouseholderTransform,
    LeapfrogTransform,
    MaskedAffineAutoregressive,
    PlanarTransform,
    RadialTransform,
    RationalQuadraticSpline,
)

Z = jnp.array([0.5, -1.0])


def assert_maps(transform, x, y, log_det, rtol):
    got, cached = transform.call_with_intermediates(jnp.asarray(x))
    assert jnp.allclose(got, jnp.array(y), rtol=rtol, atol=rtol)
    assert jnp.allclose(cached, log_det, rtol=rtol, atol=rtol)


@pytest.mark.x64
def test_planar(tol):
    # a = .5 - 2 + .1 = -1.4, tanh a = -.8853516482; log(1 - .5 (1 - .7838475)).
    flow = PlanarTransform(jnp.array([0.3, -0.4]), jnp.array([1.0, 2.0]), 0.1)
    assert_maps(flow, Z, [0.2343945055, -0.6458593407], -0.1143746091, tol(1e-6, 1e-9))
    # u.w = -4, and m(-4) = log(1 + (e - 1) / e^4) - 1 = -.9690157; u + (4 + m(-4)) w / 5.
    w, product = jnp.array([1.0, 2.0]), np.log1p((np.e - 1) * np.exp(-4.0)) - 1
    u = PlanarTransform.constrain(jnp.array([-2.0, -1.0]), w)
    assert jnp.allclose(u, jnp.array([-2.0, -1.0]) + (4 + product) * w / 5, rtol=tol(1e-5, 1e-9))
    assert jnp.allclose(u @ w, product, rtol=tol(1e-5, 1e-9))


def test_planar_has_derivatives_where_its_plane_vanishes():
    """Also where |w|^4 is 0 in single precision. There u + (m'(0) - 1) (u.w) w / |w|^2 has, along
    u = w / |w|, the derivative m'(0) = 1 - 1 / e in u and none in w.
    """
    for size in (1e-8, 1e-11, 1e-14):
        w = size * jnp.array([0.6, 0.8])
        u = jnp.array([0.6, 0.8])
        by_u, by_w = jax.jacobian(PlanarTransform.constrain, argnums=(0, 1))(u, w)
        np.testing.assert_allclose(by_u @ u, (1 - np.exp(-1)) * u, rtol=1e-5)
        np.testing.assert_allclose(size * by_w @ u, 0.0, atol=1e-5)
        across = jnp.array([-0.8, 0.6])
        np.testing.assert_allclose(size * by_w @ across, -np.exp(-1) * across, rtol=1e-4)


def test_planar_without_a_direction_is_a_shift_with_finite_gradients():
    u, zero = jnp.array([1.0, -3.0]), jnp.zeros(2)
    assert jnp.array_equal(PlanarTransform.constrain(u, zero), u)
    value, gradient = jax.value_and_grad(lambda w: PlanarTransform.constrain(u, w).sum())(zero)
    assert value == -2.0 and jnp.isfinite(gradient).all()
    flow = PlanarTransform(u, zero, 0.3)
    assert jnp.allclose(flow.inv(flow(Z)), Z, atol=1e-6)


@pytest.mark.x64
def test_planar_is_inverted_where_it_nearly_folds(tol):
    # u.w = -1 + 1e-3: the slope along w is 1e-3 at the plane, and float32 loses three digits.
    w = jnp.array([1.0, 2.0])
    flow = PlanarTransform(w / 5 * (-1 + 1e-3), w, -0.7)
    x = jnp.array([[0.1, 0.3], [0.0, 0.35], [30.0, -40.0], [-2.0, 1.35]])
    assert jnp.allclose(flow(flow.inv(flow(x))), flow(x), atol=tol(2e-5, 1e-12))


@pytest.mark.x64
def test_radial(tol):
    flow = RadialTransform(jnp.array([0.2, 0.3]), 0.8, -0.5)
    assert_maps(flow, Z, [0.4297149465, -0.6954314349], -0.3588634535, tol(1e-6, 1e-9))


def test_radial_at_its_centre_has_finite_gradients_and_keeps_it():
    center = jnp.array([0.2, 0.3])
    for beta in (-0.7, 5.0):
        flow = RadialTransform(center, 0.8, beta)
        assert jnp.array_equal(flow(center), center) and jnp.array_equal(flow.inv(center), center)
        # There the map is the scaling by 1 + beta / alpha.
        slope = 1 + beta / 0.8
        assert jnp.allclose(jax.jacobian(flow)(center), slope * jnp.eye(2), rtol=1e-5)
        inverse = jax.jacobian(flow.inv)(center)
        assert jnp.allclose(inverse, jnp.eye(2) / slope, rtol=1e-4)
        gradient = jax.grad(lambda f: f.log_abs_det_jacobian(center, center))(flow)
        assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("beta", [-0.79, 200.0])
def test_radial_is_inverted_without_cancellation_near_and_far(beta):
    flow = RadialTransform(jnp.zeros(2), 0.8, beta)
    x = jnp.array([[1e-4, 0.0], [0.0, 0.5], [300.0, -400.0]])
    assert jnp.allclose(flow.inv(flow(x)), x, rtol=2e-5)


@pytest.mark.x64
def test_householder(tol):
    flow = HouseholderTransform(jnp.array([1.0, -2.0, 0.5]))
    expected = [0.9095238095, -0.5190476190, -0.6952380952]
    assert_maps(flow, [0.3, 0.7, -1.0], expected, 0.0, tol(1e-6, 1e-9))
    tiny = HouseholderTransform(1e-30 * flow.v)  # its square is 0 in single precision
    assert jnp.allclose(tiny(Z[jnp.array([0, 1, 0])]), flow(Z[jnp.array([0, 1, 0])]), rtol=1e-5)


@pytest.mark.x64
def test_spline(tol):
    spline = RationalQuadraticSpline(
        jnp.array([1.0, 2.0, 2.0, 1.0]),
        jnp.array([2.0, 1.0, 0.5, 2.5]),
        jnp.array([0.5, 1.5, 2.0]),
        3.0,
    )
    x = jnp.array([-2.5, -0.4, 1.3, 2.9, 4.0])
    y, log_slopes = spline.with_log_slopes(x, inverse=False)
    expected = jnp.array([-1.9090909091, -0.3939393939, 0.2396112601, 2.8760775862, 4.0])
    assert jnp.allclose(y, expected, rtol=tol(2e-6, 1e-9))
    expected = jnp.array([1.0678406300, -0.4242352108, -2.4995976235, 0.3963071703, 0.0])
    assert jnp.allclose(log_slopes, expected, rtol=tol(1e-5, 1e-9), atol=tol(1e-6, 1e-9))
    assert jnp.allclose(spline.inv(y), x, atol=tol(1e-5, 1e-9))


@pytest.mark.slow
def test_spline_of_zeros_is_the_identity_and_beyond_the_bound_gradients_are_finite():
    spline = RationalQuadraticSpline.from_unconstrained(jnp.zeros(23), 4.0)
    x = jnp.array([-400.0, -4.0, -1.7, 0.0, 2.2, 4.0, 1e6])
    y, log_det = spline.call_with_intermediates(x)
    assert jnp.allclose(y, x, rtol=1e-6) and abs(log_det) < 1e-5

    def total(raw, x):
        spline = RationalQuadraticSpline.from_unconstrained(raw, 4.0)
        y, log_det = spline.call_with_intermediates(x)
        return y.sum() + log_det + spline.inv(x).sum()

    raw = 5.0 * random.normal(random.key(0), (23,))
    for gradient in jax.jit(jax.grad(total, (0, 1)))(raw, x):
        assert jnp.isfinite(gradient).all()


@pytest.mark.x64
def test_leapfrog(tol):
    # U = z^2 / 2 by hand, three steps of .1 from (1, .5).
    z, v = 1.0, 0.5
    for _ in range(3):
        v -= 0.05 * z
        z += 0.1 * v
        v -= 0.05 * z
    flow = LeapfrogTransform(lambda z: z, 0.1, 3)
    assert_maps(flow, [1.0, 0.5], [1.1033045, 0.182379775], 0.0, tol(1e-6, 1e-9))
    assert_maps(flow, [1.0, 0.5], [z, v], 0.0, tol(1e-6, 1e-12))


@pytest.mark.x64
def test_affine_coupling(tol):
    # a = .5: s_raw = 1, t = -.25; s = 2 tanh(1 / 2); y_b = -1.5 e^s - .25.
    flow = AffineCoupling(lambda a: jnp.concatenate([2 * a, -0.5 * a], -1), 1)
    s = 2 * np.tanh(0.5)
    assert_maps(flow, [0.5, -1.5], [0.5, -1.5 * np.exp(s) - 0.25], s, tol(1e-6, 1e-12))


@pytest.mark.x64
def test_autoregressive_flows_by_an_explicit_loop(tol):
    w = random.normal(random.key(4), (3, 6)) * jnp.tile(jnp.triu(jnp.ones((3, 3)), 1), 2)

    def net(x):
        return jnp.sin(x @ w) + jnp.array([0.1, 0.2, 0.3, -0.4, 3.0, 0.6])

    x = np.array([0.7, -1.9, 2.4])
    y, log_det = np.zeros(3), 0.0
    for i in range(3):
        m, s_raw = np.split(np.asarray(net(jnp.asarray(y))), 2)
        s = 1.2 * np.tanh(s_raw[i] / 1.2)
        y[i] = m[i] + np.exp(s) * x[i]
        log_det += s
    flow = MaskedAffineAutoregressive(net, clamp=1.2)
    assert_maps(flow, x, y, log_det, tol(1e-5, 1e-10))

    m, s_raw = np.split(np.asarray(net(jnp.asarray(x))), 2)
    gate = 1 / (1 + np.exp(-(s_raw + 2)))
    gated = GatedInverseAutoregressive(net)
    assert_maps(gated, x, gate * x + (1 - gate) * m, np.log(gate).sum(), tol(1e-5, 1e-10))
