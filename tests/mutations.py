"""Breaks a formula of each sub-package, one after the other, and says whether its tests notice.

``make mutations`` works on a copy of the checkout. For each formula it runs the tests of the
sub-package, first those of ``make test`` and, if these pass, the others, and stops at a failure.
"""

from pathlib import Path
import shutil
import subprocess
import sys
import tempfile

ROOT = Path(__file__).resolve().parents[1]

# File, what stands there, what is put in its place; the tests are those of the same folder.
FORMULAS = [
    ("_model/density.py", "total + jnp.sum(transform.log_abs", "total - jnp.sum(transform.log_abs"),
    ("diagnostics/weighted_ess.py", "squares = w**2", "squares = w"),
    ("ep/sweep.py", "(found.log_normaliser + cavity.gain)", "(found.log_normaliser - cavity.gain)"),
    ("expfam/gaussian.py", "axis=-1) / 2 - half_logdet(L)", "axis=-1) / 2 + half_logdet(L)"),
    ("guides/normal_mixture.py", "norm.logpdf(x) - jnp.log(scale)", "norm.logpdf(x)"),
    ("mcmc/sgld.py", "jnp.sqrt(2 * eps * T)", "jnp.sqrt(eps * T)"),
    ("objectives/power_mean.py", "jnp.log(total) - jnp.log(num_particles)", "jnp.log(total)"),
    ("optim/vadam.py", "return mean, num_data * s + lam", "return mean, num_data * s"),
    ("particles/svgd.py", "stein_sums(kernel, xi, x, grad", "stein_sums(kernel, xi, x, 2 * grad"),
    ("scores/score_matching.py", "b = kernel.length**4", "b = 2 * kernel.length**4"),
    ("svae/potentials.py", "_dot(step, matvec(J, away)) / 2", "_dot(step, matvec(J, away))"),
    ("transforms/planar.py", "(1.0 - h**2) * jnp.dot(self.u", "(1.0 - h) * jnp.dot(self.u"),
]


def is_noticed(checkout: Path, folder: str, leg: str) -> str | None:
    """The name of a test that fails, if one does."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-n", "2"]
    options = ["--dist", "loadfile", "--leg", leg, f"tests/{folder}"]
    done = subprocess.run([*command, *options], cwd=checkout, capture_output=True, text=True)
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(done.stdout + done.stderr)
    failed = [
        x.split(" ")[1] for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))
    ]
    return failed[0] if failed else None


def main() -> None:
    noticed = {"fast": 0, "slow": 0, None: 0}
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        left_out = shutil.ignore_patterns(
            ".git", ".venv", ".jax_cache", "build", "_build", "gallery"
        )
        shutil.copytree(ROOT, checkout, ignore=left_out)
        for name, right, wrong in FORMULAS:
            file = checkout / "numpyro_ext" / name
            text = file.read_text()
            if text.count(right) != 1:
                raise ValueError(
                    f"{name} has {right!r} {text.count(right)} times; it must be once."
                )
            file.write_text(text.replace(right, wrong))
            for leg in ("fast", "slow"):
                test = is_noticed(checkout, name.split("/")[0], leg)
                if test:
                    break
            noticed[leg if test else None] += 1
            print(f"{name}: {f'{leg} leg, {test}' if test else 'not noticed'}", flush=True)
            file.write_text(text)
    print(
        f"{len(FORMULAS)} formulas: {noticed['fast']} noticed by the fast leg, {noticed['slow']}"
        f" by the slow one, {noticed[None]} by none"
    )


if __name__ == "__main__":
    main()
