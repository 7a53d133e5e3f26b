"""Breaks two formulas or more of each sub-package, one after the other, and says which test
notices.

``make mutations`` works on a copy of the checkout. For each formula it runs the file of tests that
should notice and, if that passes, all tests of the sub-package, and stops at the first failure.
Words after ``python -m tests.mutations`` choose the formulas whose path has one of them.
"""

import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile

ROOT = Path(__file__).resolve().parents[1]
FORMULAS = """
_model/density.py -> _model/test_density.py
    total + jnp.sum(transform.log_abs
    total - jnp.sum(transform.log_abs
_model/masked.py -> _model/test_masked.py
    "value": value}) & self.where
    "value": value})
_model/normal_fit.py -> mcmc/test_normal_fit.py
    mixed * mixed.T) / 4
    mixed * mixed.T) / 2
_model/normal_fit.py -> mcmc/test_normal_fit.py
    np.std(beyond)
    2 * np.std(beyond)
_model/normal_fit.py -> _model/test_large_matrix.py
    center, spent = center - step
    center, spent = center + step
_model/operations.py -> _model/test_operations.py
    if "callback" in text or
    if False or
_model/taylor.py -> objectives/test_taylor_proxy.py
    of_all_rows + self.size * jnp.mean(residuals)
    of_all_rows + jnp.sum(residuals)
_model/units.py -> objectives/test_base.py
    [sorted(axes).index(axis) for axis in axes]
    [sorted(axes).index(axis) for axis in sorted(axes)]
diagnostics/_moves.py -> diagnostics/test_moves.py
    of_draws = draws_each * np.var
    of_draws = np.var
diagnostics/_moves.py -> diagnostics/test_moves.py
    independent * (1 - slope) ** 2 / m
    (1 - slope) ** 2 / m
diagnostics/checks/losses.py -> diagnostics/test_diagnosis.py
    math.sqrt(sum(variances) / fifth)
    math.sqrt(variances[0] / fifth)
diagnostics/checks/weights.py -> diagnostics/test_weights.py
    error = 0.5 * ratio * np.sqrt
    error = ratio * np.sqrt
diagnostics/evidence.py -> diagnostics/test_evidence.py
    / (size * divisor**2)
    / (size * divisor)
diagnostics/predictive_density.py -> diagnostics/test_predictive_density.py
    log_mean_exp(matrix.sum(1)) / matrix
    np.mean(matrix.sum(1)) / matrix
diagnostics/weighted_ess.py -> diagnostics/test_weighted_ess.py
    squares = w**2
    squares = w
ep/pbp/moments.py -> ep/pbp/test_moments.py
    v - v * v * (dm * dm - 2 * dv)
    v - v * v * (dm * dm - dv)
ep/state.py -> ep/test_ep.py
    / (power or 1.0) + cavity.gain
    / (power or 1.0) - cavity.gain
ep/stochastic.py -> ep/test_stochastic.py
    of_all * (parts - 1) / parts
    of_all * (parts - 1)
expfam/dirichlet.py -> expfam/test_contract.py
    - jnp.sum(q, axis=-1)
    + jnp.sum(q, axis=-1)
expfam/gaussian.py -> expfam/test_contract.py
    axis=-1) / 2 - half_logdet(L)
    axis=-1) / 2 + half_logdet(L)
guides/normal_mixture.py -> guides/test_mixture.py
    norm.logpdf(x) - jnp.log(scale)
    norm.logpdf(x)
guides/transitions.py -> guides/test_auto_implicit.py
    jnp.sqrt(2.0) * jnp.exp(0.5 * log_step)
    jnp.exp(0.5 * log_step)
mcmc/base.py -> mcmc/test_warmup.py
    lower, back = warm & finite &
    lower, back = finite &
mcmc/laws.py -> mcmc/test_laws.py
    (float(np.max(scale)) * stiffness)
    float(np.max(scale))
mcmc/sghmc.py -> mcmc/test_sghmc.py
    (1 + c) ** 2 / 4 * eps**2 * V
    (1 + c) / 2 * eps**2 * V
mcmc/sgld.py -> mcmc/test_sgld.py
    jnp.sqrt(2 * eps * T)
    jnp.sqrt(eps * T)
objectives/power_mean.py -> objectives/test_power_mean.py
    jnp.log(total) - jnp.log(num_particles)
    jnp.log(total)
objectives/renyi.py -> objectives/test_renyi_gradients.py
    alpha + (1 - alpha) * weights)
    1 - alpha * (1 - weights))
optim/ivon.py -> optim/test_mean_field.py
    * unbiased / precision,
    * unbiased / g.precision,
optim/vadam.py -> optim/test_mean_field.py
    return mean, num_data * s + lam
    return mean, num_data * s
particles/dynamics.py -> particles/test_dynamics.py
    velocity(r, -r / self.mass)
    velocity(r, -r)
particles/svgd.py -> particles/test_svgd.py
    matmul(k, grad_log_p) + repulsion
    matmul(k, 2 * grad_log_p) + repulsion
scores/kde.py -> scores/test_kde.py
    self.x) / (2.0 * h2)
    self.x) / h2
scores/score_matching.py -> scores/test_score_matching.py
    b = kernel.length**4
    b = 2 * kernel.length**4
svae/elbo.py -> svae/test_elbo.py
    jnp.sum(scale_local * guide_run
    jnp.sum(guide_run
svae/potentials.py -> svae/test_potentials.py
    _dot(step, matvec(J, away)) / 2
    _dot(step, matvec(J, away))
transforms/planar.py -> transforms/test_contract.py
    (1.0 - h**2) * jnp.dot(self.u
    (1.0 - h) * jnp.dot(self.u
transforms/radial.py -> transforms/test_contract.py
    (x.shape[-1] - 1) * jnp.log1p
    x.shape[-1] * jnp.log1p
"""
"""The file, the tests that should notice, what stands in the file, and what is put in its place."""


def failing_test(checkout: Path, tests: str) -> str | None:
    """The name of a test that fails, if one does."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", f"tests/{tests}"]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(done.stdout + done.stderr)
    lines = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" ")[1] if lines else None


def main(words: list[str]) -> None:
    lines = [line.strip() for line in FORMULAS.strip().splitlines()]
    formulas = [(*lines[i].split(" -> "), *lines[i + 1 : i + 3]) for i in range(0, len(lines), 3)]
    chosen = [x for x in formulas if not words or any(word in x[0] for word in words)]
    noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        left_out = shutil.ignore_patterns(".git", ".venv", ".jax_cache", "build", "_build")
        shutil.copytree(ROOT, checkout, ignore=left_out)
        for name, tests, right, wrong in chosen:
            file = checkout / "numpyro_ext" / name
            text = file.read_text()
            if text.count(right) != 1:
                raise ValueError(f"{name} has {right!r} {text.count(right)} times, not once.")
            file.write_text(text.replace(right, wrong))
            test = failing_test(checkout, tests) or failing_test(checkout, name.split("/")[0])
            noticed += test is not None
            print(f"{name}: {test or 'not noticed'}", flush=True)
            file.write_text(text)
    print(f"{noticed} of {len(chosen)} formulas are noticed")


if __name__ == "__main__":
    main(sys.argv[1:])
