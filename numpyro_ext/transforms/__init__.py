"""Bijections of vectors: NumPyro ``Transform`` objects that NumPyro does not have."""

from numpyro_ext.transforms.coupling import AffineCoupling

__all__ = ["AffineCoupling"]
