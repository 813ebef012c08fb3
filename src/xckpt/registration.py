"""Registration of ``.ckpt`` with xarray, and of the summary of large Datasets with IPython."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["is_extension_declined", "register_accessor", "register_formatter"]

#: True after ``%unload_ext xckpt``: opening a file then does not load the extension again.
is_extension_declined = False


def register_accessor() -> None:
    """Register ``.ckpt`` now if xarray is imported, or else as soon as it is."""
    if "xarray" in sys.modules:
        _load_accessor()
    elif not any(isinstance(finder, _XarrayFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _XarrayFinder())


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


class _XarrayFinder:
    """An import hook that registers the accessor once xarray is imported."""

    # Importing xarray takes 50 times as long as importing xckpt, so xckpt leaves it to the user.
    # The finder is never removed, because other threads may iterate over `sys.meta_path`.

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "xarray":
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _load_accessor()

            # Patch the loader instead of replacing it, since others request sources from it.
            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
