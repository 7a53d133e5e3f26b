"""Sphinx configuration: `make docs`."""

import importlib
import inspect
from pathlib import Path
import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.util.inspect import stringify_signature
from sphinx_gallery.sorting import ExplicitOrder

import numpyro_ext

project = "numpyro_ext"
author = "The numpyro_ext authors"
copyright = "2026, The numpyro_ext authors"
release = numpyro_ext.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "templates"]
html_theme = "furo"
html_title = f"{project} {release}"
html_theme_options = {
    f"{mode}_css_variables": {"sidebar-item-spacing-vertical": "0.3rem"}
    for mode in ("light", "dark")
}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
templates_path = ["templates"]  # a page for each class
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
html_static_path = ["static"]
html_css_files = ["widths.css"]
smartquotes = False  # `--` in a command stays as it is typed
nitpicky = False

# Where other projects document the names that our pages mention: plain text, so that a build needs
# no network.
HOMES = {
    "numpyro": "https://num.pyro.ai/en/stable/",
    "jax": "https://docs.jax.dev/en/latest/",
    "optax": "https://optax.readthedocs.io/en/latest/",
    "arviz": "https://python.arviz.org/projects/",
}
intersphinx_mapping = {name: (home, f"inventories/{name}.txt") for name, home in HOMES.items()}

# These run within minutes, so the pages show what they print and draw; the others show what
# `docs/record.py` has kept of a run.
RUN = [
    "start_here",
    "choosing_a_step_size",
    "is_my_result_wrong",
    "large_data",
    "networks",
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
    "remove_config_comments": True,
    "write_computation_times": False,
    "image_srcset": ["2x"],
    "capture_repr": (),
}

MODULES = (
    "data",
    "diagnostics",
    "ep",
    "guides",
    "mcmc",
    "objectives",
    "optim",
    "particles",
    "saving",
    "scores",
    "svae",
    "targets",
)
PUBLIC = {
    name: f"numpyro_ext.{module}.{name}"
    for module in (*MODULES, "transforms")
    for name in importlib.import_module(f"numpyro_ext.{module}").__all__
}


def elsewhere() -> dict[str, str]:
    """How our pages write a name, `SVI` or `numpyro.param` or `az.loo`, to its full name."""
    names = {}
    for path in (Path(__file__).parent / "inventories").glob("*.txt"):
        lines = [x for x in path.read_text().split("\n") if x and not x.startswith("#")]
        for full in (line.split()[0] for line in lines):
            room, last = full.split(".")[0], full.split(".")[-1]
            names[full] = names[{"arviz": "az"}.get(room.split("_")[0], room) + "." + last] = full
            if room == "numpyro" and (last[0].isupper() or last.startswith("init_to")):
                names[last] = full
    return names


LINKED = elsewhere() | PUBLIC


def link_public_names(app, doctree):
    """A name in the prose, `SGLD` or `VRELBO(0.5)` or `SVI`, links to where it is documented."""
    linked = {
        id(literal)
        for link in doctree.findall(lambda node: isinstance(node, nodes.reference | pending_xref))
        for literal in link.findall(nodes.literal)
    }
    for literal in list(doctree.findall(nodes.literal)):
        name = re.fullmatch(r"([\w.]+)(\(.*\))?", literal.astext())
        if not name or name[1] not in LINKED or id(literal) in linked:
            continue
        where = {"refdomain": "py", "reftype": "obj", "reftarget": LINKED[name[1]]}
        doc = {"refdoc": app.env.docname, "refexplicit": True, "refwarn": True}
        link = pending_xref("", literal.deepcopy(), **where, **doc)
        literal.replace_self(link)


def sign_classes(app, what, name, obj, options, signature, returns):
    """The arguments of a class are those of its ``__init__``; a default has no address."""
    if what == "class" and signature:
        own = inspect.signature(obj).replace(return_annotation=inspect.Signature.empty)
        signature = stringify_signature(own, unqualified_typehints=True)
    return re.sub(r"<(?:function|class) '?([\w.]+).*?>", r"\1", signature or "") or None, returns


def documented(doc):
    """The arguments that a docstring describes, with the lines of each."""
    found, name = {}, None
    for line in inspect.cleandoc(doc or "").split("\n"):
        field = re.match(r":param (?:[^:]* )?\**(\w+):", line)
        name = field[1] if field else name if name and re.match(r"\s+\S", line) else None
        if name:
            found.setdefault(name, []).append(line)
    return found


def inherit_arguments(app, what, name, obj, options, lines):
    """The page of a class describes all its arguments, also those that a base describes."""
    of_this = what == "class" and obj.__module__.startswith("numpyro_ext")
    if not of_this or issubclass(obj, Exception):
        return
    own, bases = documented("\n".join(lines)), {}
    for base in obj.__mro__[1:]:
        if base.__module__.startswith("numpyro_ext"):
            bases = documented(base.__doc__) | bases
    missing = [x for x in inspect.signature(obj).parameters if x not in own and x in bases]
    last = own[next(reversed(own))][-1] if own else None
    place = len(lines) - lines[::-1].index(last) if last else len(lines)
    added = [line for x in missing for line in bases[x]]
    lines[place:place] = added if own else ["", *added, ""]


def adapt_markdown(app, docname, source):
    """A link to the script of an example leads to its page; and MyST drops the line breaks of an
    alternative text, and with them the blanks."""
    text = re.sub(r"\]\((?:\.\./)+examples/(\w+)\.py\)", r"](/gallery/\1.rst)", source[0])
    source[0] = re.sub(r"!\[[^\]]*\]", lambda match: match[0].replace("\n", " "), text)


def break_paths(app, pagename, templatename, context, doctree):
    """A path in a table may go on in the next line behind a slash or an underscore, and nowhere
    else."""

    def broken(path):
        return f"{path[1]}{re.sub(r'(?<=[/_])(?=.)', '<wbr>', path[2])}</span>"

    if pagename == "evidence":
        path = r'(<span class="pre">)([\w.]*/[\w./]*)</span>'
        context["body"] = re.sub(path, broken, context["body"])


def setup(app):
    app.connect("doctree-read", link_public_names)
    app.connect("autodoc-process-signature", sign_classes)
    app.connect("autodoc-process-docstring", inherit_arguments)
    app.connect("source-read", adapt_markdown)
    app.connect("html-page-context", break_paths)
