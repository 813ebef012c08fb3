"""Configuration of Sphinx."""

from __future__ import annotations

import xckpt

project = "xckpt"
author = "xckpt developers"
copyright = "xckpt developers"
release = xckpt.__version__

extensions = ["myst_nb", "numpydoc", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "xckpt"

autodoc_typehints = "none"
numpydoc_show_class_members = False
# Notebooks are shown as they were saved.
nb_execution_mode = "off"
