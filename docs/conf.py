"""Sphinx configuration: `make docs`."""

from importlib import metadata

project = "numpyro_ext"
author = "The numpyro_ext authors"
copyright = "2026, The numpyro_ext authors"
release = metadata.version("numpyro-ext-inference")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.doctest"]
exclude_patterns = ["_build"]
html_theme = "furo"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
myst_heading_anchors = 3
# Roles that point into NumPyro and JAX have no inventory offline; they render as plain names.
nitpicky = False
