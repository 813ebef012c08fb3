"""Imports of a pickle that let whoever unpickles it run code.

A pickle names functions and classes, and what unpickles it imports and calls them. Here nothing is
imported. Python's own modules have all functions that run programs or read files, but pickles of
checkpoints need only a few of their types: everything else from them is named. Packages are not
judged: ``torch.load(weights_only=True)`` refuses those.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Modules of Python whose types only hold values.
_MODULES = frozenset(
    ("collections", "datetime", "decimal", "enum", "fractions", "ipaddress", "numbers", "pathlib")
)
_MODULES |= {"typing", "uuid", "zoneinfo", "copyreg", "copy_reg"}
_NAMES = frozenset({"argparse.Namespace", "_codecs.encode", "functools.partial", "random.Random"})
_NAMES |= {"types.SimpleNamespace", "types.MappingProxyType", "dataclasses._MISSING_TYPE"}
_BUILTINS = frozenset({"bool", "int", "float", "complex", "str", "bytes", "bytearray", "object"})
_BUILTINS |= {"list", "dict", "tuple", "set", "frozenset", "slice", "range", "type", "ellipsis"}
_BUILTINS |= {"NotImplemented", "long", "unicode", "basestring", "xrange"}
_BUILTIN_MODULES = {"builtins", "__builtin__"}
# Modules of Python under other names: of Windows, and of Python 2.
_PLATFORMS = {"nt", "posix", "commands", "popen2"}
_MOST, _LONGEST = 100, 100  # names, and characters of each part


def dangerous(imports: Iterable[tuple[str, str]]) -> list[str]:
    """Return the imports of Python's own functions that a checkpoint does not need."""
    functions = []
    for module, name in imports:
        root = module.partition(".")[0]
        is_own = root in sys.stdlib_module_names or root in _PLATFORMS
        if module in _BUILTIN_MODULES:
            is_needed = name in _BUILTINS or name.endswith(("Error", "Exception", "Warning"))
        else:
            is_needed = root in _MODULES or f"{module}.{name}" in _NAMES
        # A name with a dot is a method, such as Path.unlink.
        if (is_own or root in _BUILTIN_MODULES) and ("." in name or not is_needed):
            functions.append(f"{module[:_LONGEST]}.{name[:_LONGEST]}")
    return functions[:_MOST]
