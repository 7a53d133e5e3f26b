"""Fits in files: save one, load it in another process, and go on."""

from numpyro_ext.saving.fits import load, save

__all__ = ["load", "save"]
