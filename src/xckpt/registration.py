"""Registration of ``.ckpt`` with xarray, and of the summary of large Datasets with IPython."""

from __future__ import annotations

import sys
from importlib import import_module

from xckpt.imports import after_import

#: True after ``%unload_ext xckpt``: opening a file then does not load the extension again.
is_extension_declined = False


def register_accessor() -> None:
    """Register ``.ckpt`` now if xarray is imported, or else as soon as it is."""
    if "xarray" in sys.modules:
        _load_accessor()
    else:
        # Importing xarray takes 50 times as long as importing xckpt, which leaves it to the user.
        after_import("xarray", _load_accessor)


def _load_accessor() -> None:
    try:
        import_module("xckpt.accessor")
    except RuntimeError as error:
        # Another thread is loading it, and waits for the package that this one is loading.
        if type(error).__name__ != "_DeadlockError":
            raise


def register_formatter() -> None:
    """Load the IPython extension when a checkpoint is opened, unless it was unloaded before."""
    # Importing xckpt changes no session, and neither does opening a file outside of IPython. In
    # IPython and Jupyter, xarray's HTML of 18,000 variables would take minutes.
    ipython = sys.modules.get("IPython")
    session = None if ipython is None else ipython.get_ipython()
    if session is None or is_extension_declined:
        return
    if "xckpt" not in session.extension_manager.loaded:
        session.extension_manager.load_extension("xckpt")
