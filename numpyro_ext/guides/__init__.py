"""Guides for ``SVI(model, guide, ...)`` beyond NumPyro's own."""

from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext._model.posterior_as_prior import posterior_as_prior
from numpyro_ext.guides.auxiliary import AutoAuxiliary
from numpyro_ext.guides.base import AutoAtModes, AutoJoint
from numpyro_ext.guides.critic import with_critic
from numpyro_ext.guides.dropout import AutoDropout
from numpyro_ext.guides.flow_guide import FlowGuide
from numpyro_ext.guides.flows import AutoFlowNormal, CouplingFlowNormal
from numpyro_ext.guides.hamiltonian import AutoHVI
from numpyro_ext.guides.householder import AutoHouseholderNormal
from numpyro_ext.guides.iaf import AutoGatedIAFNormal
from numpyro_ext.guides.implicit import AutoImplicit
from numpyro_ext.guides.implicit_guide import ImplicitGuide
from numpyro_ext.guides.init_to_fan_in import init_to_fan_in
from numpyro_ext.guides.langevin_diffusion import AutoLangevinDiffusion
from numpyro_ext.guides.laplace_ggn import AutoLaplaceGGN
from numpyro_ext.guides.local_reparam import linear, local_reparam
from numpyro_ext.guides.maf import AutoMAFNormal
from numpyro_ext.guides.markov import AutoMarkov
from numpyro_ext.guides.matrix_normal import AutoMatrixNormal
from numpyro_ext.guides.mixture import AutoMixtureNormal
from numpyro_ext.guides.nice import AutoNICENormal
from numpyro_ext.guides.planar import AutoPlanarNormal
from numpyro_ext.guides.radial import AutoRadialNormal
from numpyro_ext.guides.realnvp import AutoRealNVPNormal
from numpyro_ext.guides.reverse import with_reverse
from numpyro_ext.guides.semi_implicit import AutoSemiImplicit
from numpyro_ext.guides.spline import AutoSplineNormal
from numpyro_ext.guides.structured import AutoStructuredNormal
from numpyro_ext.guides.transitions import Langevin, NNSampler

__all__ = [
    "AutoAtModes",
    "AutoAuxiliary",
    "AutoDropout",
    "AutoFlowNormal",
    "AutoGatedIAFNormal",
    "AutoHVI",
    "AutoHouseholderNormal",
    "AutoImplicit",
    "AutoJoint",
    "AutoLangevinDiffusion",
    "AutoLaplaceGGN",
    "AutoMAFNormal",
    "AutoMarkov",
    "AutoMatrixNormal",
    "AutoMixtureNormal",
    "AutoNICENormal",
    "AutoPlanarNormal",
    "AutoRadialNormal",
    "AutoRealNVPNormal",
    "AutoSemiImplicit",
    "AutoSplineNormal",
    "AutoStructuredNormal",
    "CouplingFlowNormal",
    "FlowGuide",
    "Implicit",
    "ImplicitGuide",
    "IntractableDensityError",
    "Langevin",
    "NNSampler",
    "init_to_fan_in",
    "linear",
    "local_reparam",
    "posterior_as_prior",
    "with_critic",
    "with_reverse",
]
