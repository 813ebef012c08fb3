"""Imports by this package: an action follows a module, and Ctrl-C waits until a module is complete.

If an import is interrupted, Python removes the module, but not the submodules that it has loaded,
and many packages cannot be imported after that. An interrupt in the import system itself can leave
its lock held, so that all threads wait forever. Therefore `xckpt.interrupts` defers Ctrl-C while
another package is loaded on behalf of this one. Modules of this package can be loaded again, so
that between two packages that they import, Ctrl-C is delivered.
"""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from xckpt.interrupts import begin_import, deliver, end_import, is_pending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType

_PACKAGE = __name__.partition(".")[0]
_SYSTEM = "<frozen importlib"
# Packages whose code between imports can be interrupted and run again.
_TRANSPARENT = {_PACKAGE, "importlib"}

# Actions after the first load of a module, by its name.
_actions: dict[str, Callable[[], None]] = {}


def watch_imports() -> None:
    """Defer Ctrl-C during imports from now on."""
    # The finder is never removed, because other threads may iterate over `sys.meta_path`.
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call a function as soon as a module is loaded."""
    _actions[name] = action
    watch_imports()


class LazyModule:
    """A module that is loaded when an attribute of it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


class _Finder:
    """A finder that leaves the search to the finders after it, and wraps the loader they return."""

    def __init__(self) -> None:
        #: The code in the main thread that imports a module, until it is loaded.
        self.importer: FrameType | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        action = _actions.get(name)
        is_outermost = _is_main() and self.importer is None
        if is_outermost or (is_pending() and _is_main() and _can_stop(self.importer)):
            deliver()
        is_guarded = is_outermost and (action is not None or _is_for_us(name))
        if action is None and not is_guarded:
            return None
        finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            guard = self if is_guarded else None
            spec.loader = _Loader(spec.loader, guard, action)  # type: ignore[assignment]
        return spec

    def begin(self) -> None:
        self.importer = _importer()
        begin_import(self.importer)

    def end(self) -> None:
        self.importer = None
        end_import()


class _Loader:
    """A loader of one module, which puts the original one in its place."""

    def __init__(
        self, loader: Any, guard: _Finder | None, action: Callable[[], None] | None
    ) -> None:
        self._loader, self._guard, self._action = loader, guard, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if self._guard is not None:
            self._guard.begin()
        try:
            module: ModuleType | None = self._loader.create_module(spec)
        except BaseException:
            self._end()
            raise
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
            if self._action is not None:
                self._action()
        finally:
            self._end()

    def _end(self) -> None:
        if self._guard is not None and self._guard.importer is not None:
            self._guard.end()


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _importer() -> FrameType:
    """Return the innermost frame that belongs neither to the import system nor to this module."""
    frame = sys._getframe()  # noqa: SLF001  documented
    while frame.f_back is not None and (
        frame.f_globals is globals() or frame.f_code.co_filename.startswith(_SYSTEM)
    ):
        frame = frame.f_back
    return frame


def _is_ours(name: object) -> bool:
    return str(name).partition(".")[0] == _PACKAGE


def _is_for_us(name: str) -> bool:
    """Return whether code of this package imports a module, directly or through other packages."""
    frame: FrameType | None = _importer()
    while frame is not None and not _is_ours(name):
        name = str(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return _is_ours(name)


def _can_stop(importer: FrameType | None) -> bool:
    """Return whether only code of this package runs, for modules of this package."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame is not importer:
        if not frame.f_code.co_filename.startswith(_SYSTEM):
            if str(frame.f_globals.get("__name__")).partition(".")[0] not in _TRANSPARENT:
                return False
        elif frame.f_code.co_name == "_load_unlocked" and not _is_ours(
            getattr(frame.f_locals.get("spec"), "name", "")
        ):
            return False
        frame = frame.f_back
    return True
