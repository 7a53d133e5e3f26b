"""Sphinx configuration: `make docs`."""

import importlib
from importlib import metadata
import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx_gallery.sorting import ExplicitOrder

project = "numpyro_ext"
author = "The numpyro_ext authors"
copyright = "2026, The numpyro_ext authors"
release = metadata.version("numpyro-ext-inference")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.doctest",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build"]
html_theme = "furo"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 90
autosummary_generate = False
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
html_static_path = ["static"]
html_css_files = ["narrow.css"]
smartquotes = False  # `--` in a command stays as it is typed
# Roles that point into NumPyro and JAX have no inventory offline; they render as plain names.
nitpicky = False

# These run within minutes, so the pages show what they print and draw; the others are shown
# as they are, and their results are in examples/README.md.
RUN = [
    "start_here",
    "choosing_a_step_size",
    "is_my_result_wrong",
    "large_data",
    "comparing_variational_and_mcmc",
    "welling_teh_mixture",
    "kernel_hmc_banana",
    "particles_on_the_banana",
    "svae_pinwheel",
]
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": rf"/({'|'.join(RUN)})\.py$",
    "within_subsection_order": ExplicitOrder(["quickstart.py", *(f"{x}.py" for x in RUN), "*"]),
    "download_all_examples": False,
    "min_reported_time": 600,
    "write_computation_times": False,
    "image_srcset": ["2x"],
    "capture_repr": (),
}

MODULES = (
    "diagnostics",
    "ep",
    "guides",
    "mcmc",
    "objectives",
    "optim",
    "particles",
    "scores",
    "svae",
    "targets",
)
PUBLIC = {
    name: f"numpyro_ext.{module}.{name}"
    for module in (*MODULES, "transforms")
    for name in importlib.import_module(f"numpyro_ext.{module}").__all__
}


def link_public_names(app, doctree):
    """A public name in the prose, `SGLD` or `VRELBO(0.5)`, links to its entry in the API."""
    if app.env.docname.startswith("api/"):
        return
    linked = {
        id(literal)
        for link in doctree.findall(lambda node: isinstance(node, nodes.reference | pending_xref))
        for literal in link.findall(nodes.literal)
    }
    for literal in list(doctree.findall(nodes.literal)):
        name = re.fullmatch(r"(\w+)(\(.*\))?", literal.astext())
        if not name or name[1] not in PUBLIC or id(literal) in linked:
            continue
        where = {"refdomain": "py", "reftype": "obj", "reftarget": PUBLIC[name[1]]}
        doc = {"refdoc": app.env.docname, "refexplicit": True, "refwarn": True}
        link = pending_xref("", literal.deepcopy(), **where, **doc)
        literal.replace_self(link)


def setup(app):
    app.connect("doctree-read", link_public_names)
