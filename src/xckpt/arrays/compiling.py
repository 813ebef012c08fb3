"""Compiled loops: options of numba, and a cache of machine code on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

# A wrapper takes as long to make as a short loop, and nobody calls these functions from C. Division
# by zero gives infinity or NaN, as in numpy, instead of a check and an error.
_OPTIONS: Any = {"nogil": True, "no_cfunc_wrapper": True, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function at its first call with arguments of some types; cache it on disk."""
    # numba compiles again if the file of the function changes, but not if only the file of a
    # function that it calls does.
    try:
        return numba.njit(**_OPTIONS, cache=True)(function)
    except RuntimeError:  # no folder can be written to
        return numba.njit(**_OPTIONS)(function)


def within(function: Callable[..., Any]) -> Any:
    """Compile a function that only compiled functions call; their machine code includes it."""
    return numba.njit(**_OPTIONS | {"no_cpython_wrapper": True})(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Make a function part of the compiled functions that call it, which saves a compilation."""
    return numba.njit(nogil=True, inline="always")(function)


def generated(function: Callable[..., Any]) -> Any:
    """Make a function that writes LLVM instructions callable from compiled functions."""
    return intrinsic(function)
