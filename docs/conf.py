"""Configuration of Sphinx."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import xckpt

project = "xckpt"
author = "xckpt developers"
copyright = "xckpt developers"
release = xckpt.__version__

extensions = ["myst_nb", "numpydoc", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_extra_path = ["extra"]  # for programs: llms.txt, and schemas of JSON
html_theme = "furo"
html_title = "xckpt"
pygments_dark_style = "a11y-dark"  # the default one underlines modules, like links

autodoc_typehints = "none"
numpydoc_show_class_members = False

# Notebooks are stored without outputs and run here, again only when they changed.
nb_execution_mode = "cache"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 180
nb_merge_streams = True
# Bars of progress are gone when a page is read.
os.environ["TQDM_DISABLE"] = "1"


def copy_notebooks(source: Path, target: Path) -> None:
    """Copy the notebooks beside the pages: Sphinx links to nothing outside of their folder."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (target / ".gitignore").write_text("*\n", encoding="utf-8")
    for notebook in source.glob("*.ipynb"):
        shutil.copy2(notebook, target)


_HERE = Path(__file__).parent
copy_notebooks(_HERE.parent / "notebooks", _HERE / "notebooks")
myst_heading_anchors = 3  # links to sections
myst_enable_extensions = ["attrs_inline"]  # pictures for the light and the dark theme
