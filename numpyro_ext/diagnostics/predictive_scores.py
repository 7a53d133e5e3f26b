"""One table of scores of the predictions of a fit at new data."""

from typing import Any, NamedTuple

import numpy as np
from numpyro.distributions import Distribution

from numpyro_ext.diagnostics._fit_of import is_fit
from numpyro_ext.diagnostics._predicted import (
    Predicted,
    predictions_of_distribution,
    predictions_of_fit,
)
from numpyro_ext.diagnostics.calibration import calibration_of
from numpyro_ext.diagnostics.classification import (
    bins_of,
    brier_of,
    classes_of,
    error_of,
    perfect_calibration_error,
    uncertainty_of,
)
from numpyro_ext.diagnostics.held_out import log_mean_exp
from numpyro_ext.diagnostics.predictive_density import gaussian_log_density_bound
from numpyro_ext.diagnostics.table import in_table, shown


def _with_error(x: float, error: float) -> str:
    return shown(x) if np.isnan(error) else f"{shown(x)} +- {shown(error, 2)}"


class RegressionScores(NamedTuple):
    """The result of :func:`predictive_scores` for numbers and counts; it prints as a table."""

    title: str
    """What predicts, and what."""
    count: int
    """The number n of observations."""
    rmse: float
    """Root mean squared error of the mean prediction, in the unit of the observations."""
    rmse_of_constant: float
    """The RMSE of the mean of these observations."""
    log_density: float
    """Mean over rows of the log predictive density, pointwise, in nats."""
    log_density_error: float
    """Its standard error over rows."""
    joint_log_density: float
    """The joint one, in nats per row."""
    gaussian_bound: float
    """:func:`gaussian_log_density_bound` of ``rmse``; NaN for counts and for several numbers a
    row."""
    coverage_50: float
    """Share of the observations in the central 50 % intervals."""
    coverage_90: float
    """Share of the observations in the central 90 % intervals."""
    calibration_error: float
    """``error`` of :func:`regression_calibration`."""
    perfect_calibration_error: float
    """Its mean for a perfect model on as many observations."""
    sd: float
    """Root of the mean predictive variance."""
    noise_sd: float
    """The part that is noise of the observed site."""
    network_sd: float
    """The part that is the spread of the mean between draws, of a network or another function."""

    def __str__(self) -> str:
        half, most = ((level * (1 - level) / self.count) ** 0.5 for level in (0.5, 0.9))
        bound = "" if np.isnan(self.gaussian_bound) else shown(self.gaussian_bound)
        of_normal = f"{bound} of a calibrated normal with this RMSE" if bound else ""
        lines = [
            ("RMSE", shown(self.rmse), f"{shown(self.rmse_of_constant)} of the best constant"),
            (
                "log density, pointwise",
                _with_error(self.log_density, self.log_density_error),
                of_normal,
            ),
            ("log density, joint", shown(self.joint_log_density), "all rows together"),
            ("in the 50 % intervals", shown(self.coverage_50), f"0.5 +- {shown(half, 2)}"),
            ("in the 90 % intervals", shown(self.coverage_90), f"0.9 +- {shown(most, 2)}"),
            (
                "calibration error",
                shown(self.calibration_error),
                f"{shown(self.perfect_calibration_error, 2)} of a perfect model on as many rows",
            ),
            ("predictive sd", shown(self.sd), ""),
            ("  of the noise", shown(self.noise_sd), ""),
            ("  of the network", shown(self.network_sd), "between draws"),
        ]
        return in_table(self.title, lines)

    __repr__ = __str__


class ClassificationScores(NamedTuple):
    """The result of :func:`predictive_scores` for classes; it prints as a table."""

    title: str
    """What predicts, and what."""
    count: int
    """The number N of observations."""
    accuracy: float
    """Share of the observations in the class of the highest probability."""
    accuracy_of_constant: float
    """The accuracy of the most frequent class of these observations."""
    log_density: float
    """Mean over rows of the log probability of the observation, pointwise, in nats."""
    log_density_error: float
    """Its standard error over rows."""
    joint_log_density: float
    """The joint one, in nats per row."""
    log_density_of_constant: float
    """The log density of the shares of the classes among these observations."""
    brier: float
    """:func:`brier_score`."""
    brier_of_constant: float
    """The score of the shares of the classes among these observations."""
    calibration_error: float
    """:func:`expected_calibration_error` in 15 bins."""
    perfect_calibration_error: float
    """Its mean where labels are drawn from these probabilities."""
    entropy: float
    """Mean entropy of the prediction, in nats."""
    aleatoric: float
    """The part that is noise of the label."""
    epistemic: float
    """The part that is doubt between draws."""

    def __str__(self) -> str:
        error = (self.accuracy * (1 - self.accuracy) / self.count) ** 0.5
        frequent = f"{shown(self.accuracy_of_constant)} of the most frequent class"
        shares = "of the shares of the classes"
        perfect = f"{shown(self.perfect_calibration_error, 2)} of a perfect model on as many rows"
        lines = [
            ("accuracy", _with_error(self.accuracy, error), frequent),
            (
                "log density, pointwise",
                _with_error(self.log_density, self.log_density_error),
                f"{shown(self.log_density_of_constant)} {shares}",
            ),
            ("log density, joint", shown(self.joint_log_density), "all rows together"),
            ("Brier score", shown(self.brier), f"{shown(self.brier_of_constant)} {shares}"),
            ("calibration error", shown(self.calibration_error), perfect),
            ("predictive entropy", shown(self.entropy), ""),
            ("  aleatoric", shown(self.aleatoric), "noise of the label"),
            ("  epistemic", shown(self.epistemic), "doubt between draws"),
        ]
        return in_table(self.title, lines)

    __repr__ = __str__


def predictive_scores(
    obj: Any,
    result: Any = None,
    *,
    model_args: tuple | None = None,
    model_kwargs: dict[str, Any] | None = None,
    y: Any = None,
    site: str | None = None,
    num_samples: int = 1000,
    rng_key: Any = None,
) -> RegressionScores | ClassificationScores:
    r"""Scores of predictions on new data, each beside the number to compare it with.

    With :math:`p_s` the distribution of the observed site under draw s, the prediction is
    :math:`\frac1S \sum_s p_s`. The support of the site decides what is printed.

    Of **numbers and counts**, with the mean :math:`\mu_s`, variance :math:`v_s` and cdf
    :math:`F_s` of :math:`p_s`:

    - the RMSE of :math:`\frac1S \sum_s \mu_s`, beside the RMSE of the mean of the observations;
    - the log density, pointwise and joint (:func:`log_predictive_density`), beside
      :func:`gaussian_log_density_bound` of the RMSE;
    - the shares of the observations in the central 50 % and 90 % intervals, by :math:`u_n =
      \frac1S \sum_s F_s(y_n)`, and the calibration error (:func:`regression_calibration`);
    - the predictive sd; its square is the mean over rows of :math:`\frac1S \sum_s v_s` (noise)
      plus the variance of :math:`\mu_s` over draws (the network).

    Of **classes**: accuracy, log density, :func:`brier_score`, :func:`expected_calibration_error`,
    and the entropy of the prediction with its parts (:func:`predictive_uncertainty`).

    The rows of the fit itself are predicted too well. Where NumPyro has no cdf, mean or variance of
    the site, 100 draws of it stand in for each draw of the fit. Every plate runs on all of its
    rows; masked entries are left out. For a latent site of each row use
    :func:`held_out_log_likelihood`.

    :param obj: an ``SVI``, an engine, or an ``MCMC`` that has run; or a NumPyro distribution of
        shape ``(S, *shape of y)`` (or of the shape of y, a single draw).
    :param result: for an ``SVI`` or engine: what its ``run`` returned, or the state of the ``SVI``;
        a list of restarts is a deep ensemble.
    :param tuple model_args: the model's arguments with the data to predict, observations included.
    :param dict model_kwargs: its keyword arguments.
    :param y: for a distribution: the observations.
    :param str site: the observed site, if the model has several.
    :param int num_samples: draws from a guide, per restart; an ``MCMC`` and particles have their
        own.
    :param rng_key: a key, new-style or legacy; default ``jax.random.key(0)``.
    :return: :class:`RegressionScores` or :class:`ClassificationScores`, which print as a table.

    **References**

    1. *Strictly Proper Scoring Rules, Prediction, and Estimation*, T. Gneiting, A. Raftery
       (JASA 2007).
    2. *Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles*,
       B. Lakshminarayanan, A. Pritzel, C. Blundell (NIPS 2017).

    >>> from numpyro_ext.diagnostics import predictive_scores
    >>> def model(x, y=None):
    ...     slope = numpyro.sample("slope", dist.Normal(0, 3))
    ...     with numpyro.plate("data", len(x)):
    ...         numpyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)
    >>> x = jax.random.normal(jax.random.key(0), (300,))
    >>> y = 2 * x + 0.5 * jax.random.normal(jax.random.key(1), (300,))
    >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.05), Trace_ELBO())
    >>> fit = svi.run(jax.random.key(2), 500, x[:200], y[:200], progress_bar=False)
    >>> scores = predictive_scores(svi, fit, model_args=(x[200:], y[200:]))
    >>> bool(scores.rmse < 0.3 * scores.rmse_of_constant), f"{scores.noise_sd:.2f}"
    (True, '0.50')
    """
    if is_fit(obj):
        if y is not None:
            raise TypeError("y is for a distribution; pass model_args=(X_test, y_test).")
        predicted = predictions_of_fit(
            obj,
            result,
            site=site,
            model_args=model_args,
            model_kwargs=model_kwargs,
            num_samples=num_samples,
            rng_key=rng_key,
        )
    elif isinstance(obj, Distribution):
        predicted = predictions_of_distribution(obj, y, rng_key)
    else:
        raise TypeError(
            f"obj is a {type(obj).__name__}; it must be a numpyro.infer.SVI or an engine with its"
            " result, an MCMC that has run, or a distribution with draws on its first axis."
        )
    return _classification(predicted) if predicted.kind == "classes" else _regression(predicted)


def _log_densities(predicted: Predicted) -> tuple[float, float, float]:
    """Pointwise, its standard error, and joint."""
    rows, n = log_mean_exp(predicted.log_lik), predicted.log_lik.shape[1]
    error = float(np.std(rows, ddof=1) / n**0.5) if n > 1 else np.nan
    return float(rows.mean()), error, float(log_mean_exp(predicted.log_lik.sum(1)) / n)


def _regression(predicted: Predicted) -> RegressionScores:
    assert predicted.mean is not None
    assert predicted.variance is not None
    assert predicted.pit is not None
    y, mean = predicted.y, predicted.mean.mean(0)
    rmse = float(np.mean((y - mean) ** 2) ** 0.5)
    pointwise, error, joint = _log_densities(predicted)
    calibration = calibration_of(predicted)
    central = np.abs(2 * np.clip(predicted.pit, 0, 1) - 1)
    one_a_row = predicted.log_lik.shape[1] == y.size
    # A Cauchy prediction has no mean.
    bounded = predicted.kind == "numbers" and one_a_row and np.isfinite(rmse)
    return RegressionScores(
        title=f"{predicted.title}: {predicted.kind} '{predicted.site}', {y.size:,} observations",
        count=y.size,
        rmse=rmse,
        rmse_of_constant=float(y.std()),
        log_density=pointwise,
        log_density_error=error,
        joint_log_density=joint,
        gaussian_bound=gaussian_log_density_bound(rmse) if bounded else np.nan,
        coverage_50=float(np.mean(central <= 0.5)),
        coverage_90=float(np.mean(central <= 0.9)),
        calibration_error=calibration.error,
        perfect_calibration_error=calibration.perfect_error,
        sd=calibration.sharpness**0.5,
        noise_sd=float(np.mean(predicted.variance)) ** 0.5,
        network_sd=float(np.mean(predicted.mean.var(0))) ** 0.5,
    )


def _classification(predicted: Predicted) -> ClassificationScores:
    probs, labels = classes_of(predicted)
    mean = probs.mean(0)
    pointwise, error, joint = _log_densities(predicted)
    shares = np.bincount(labels, minlength=mean.shape[1]) / labels.size
    total, aleatoric, epistemic = (float(x.mean()) for x in uncertainty_of(probs))
    return ClassificationScores(
        title=f"{predicted.title}: {mean.shape[1]} classes '{predicted.site}', {labels.size:,}"
        " observations",
        count=labels.size,
        accuracy=float(np.mean(mean.argmax(-1) == labels)),
        accuracy_of_constant=float(shares.max()),
        log_density=pointwise,
        log_density_error=error,
        joint_log_density=joint,
        log_density_of_constant=float(np.mean(np.log(shares[labels]))),
        brier=brier_of(mean, labels),
        brier_of_constant=brier_of(np.broadcast_to(shares, mean.shape), labels),
        calibration_error=error_of(bins_of(mean, labels, 15)),
        perfect_calibration_error=perfect_calibration_error(mean),
        entropy=total,
        aleatoric=aleatoric,
        epistemic=epistemic,
    )
