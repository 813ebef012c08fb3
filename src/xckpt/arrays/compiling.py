"""Compiled loops: how numba compiles them, and where what it made is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["compiled", "generated", "inlined", "within"]

# Each wrapper takes as long to make as a short loop, and nobody calls these from C. What is divided
# by is not looked at, as numpy does not either.
_OPTIONS: Any = {"nogil": True, "no_cfunc_wrapper": True, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile when first called, for the types that it is called with, and keep it on disk."""
    try:
        return numba.njit(**_OPTIONS, cache=True)(function)
    except RuntimeError:  # there is no folder that a cache can be written to
        return numba.njit(**_OPTIONS)(function)


def within(function: Callable[..., Any]) -> Any:
    """Compile for compiled functions that call this one, which are what is kept on disk."""
    return numba.njit(**_OPTIONS | {"no_cpython_wrapper": True})(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Make a function a part of the compiled ones that call it, which saves a compilation."""
    return numba.njit(nogil=True, inline="always")(function)


def generated(function: Callable[..., Any]) -> Any:
    """Let compiled functions call what writes its instructions for LLVM itself."""
    return intrinsic(function)
