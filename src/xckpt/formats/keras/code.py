"""Code that Keras runs or imports when it builds a model from its configuration.

An object in a configuration has ``class_name``, ``module``, ``registered_name`` and ``config``.
Keras 3 looks up classes by their module, which versions before 3.9 import whatever it is; functions
are named in ``config`` if the class is ``function``. A ``Lambda`` layer has marshalled code of
Python, as ``__lambda__`` in Keras 3 and as a list in Keras 2. Custom objects have
``PACKAGE>NAME`` as ``registered_name``: the program that loads them must have registered them.

Specification: saving/serialization_lib.py and layers/core/lambda_layer.py of
github.com/keras-team/keras, 3.15.
"""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown
from xckpt.formats.pickles.executing import is_own

if TYPE_CHECKING:
    from xckpt.formats import kit

_KERAS = {"keras", "tf_keras", "keras_hub", "keras_cv", "keras_nlp", "tensorflow", "builtins"}
# Modules of Keras whose functions load files.
_TOOLS = ("keras.utils", "keras.saving", "keras.models", "keras.config", "keras.preprocessing")
# Keras loads its module with torch.load.
_PICKLED = "TorchModuleWrapper"
_BUILTINS = {"__import__", "breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals"}
_BUILTINS |= {"input", "locals", "open", "setattr", "vars"}
_LONGEST = 100


def add_code(config: Any, notes: kit.Notes) -> None:
    """Add the code of a configuration to `notes`."""
    stack = [config]
    while stack:
        value = stack.pop()
        if type(value) is list:
            stack += value
        elif type(value) is dict:
            _add(value, notes)
            stack += value.values()


def _add(entry: dict[str, Any], notes: kit.Notes) -> None:
    kind, inner = entry.get("class_name"), entry.get("config")
    if type(kind) is not str:
        return
    module, registered = entry.get("module"), entry.get("registered_name")
    is_function = kind == "function"
    name = inner if is_function and type(inner) is str else kind
    options = inner if type(inner) is dict else {}
    if kind == "__lambda__":
        notes.executes.append("a lambda of Keras")
    elif kind == "Lambda" and type(options.get("function")) is list:
        layer = shown(str(options.get("name"))[:_LONGEST])
        notes.executes.append(f"a lambda of Keras, layer {layer}")
    elif kind == "Lambda" and type(options.get("module")) is str and is_own(options["module"]):
        # Keras 2 looks for the function in that module.
        function = str(options.get("function"))
        notes.executes.append(f"{options['module'][:_LONGEST]}.{function[:_LONGEST]}")
    elif kind == _PICKLED:
        notes.executes.append(f"the pickle in a {_PICKLED}")
    elif type(module) is str:
        text = f"{module[:_LONGEST]}.{name[:_LONGEST]}"
        if _is_run(module, name, is_function=is_function):
            notes.executes.append(text)
        elif module.partition(".")[0] not in _KERAS:
            notes.imports.append(text)
    if type(registered) is str and ">" in registered and module is None:
        notes.imports.append(registered[:_LONGEST])


def _is_run(module: str, name: str, *, is_function: bool) -> bool:
    """Return whether an object may run code or read files."""
    if module == "builtins":
        # Functions of Keras have this module, too.
        return name in _BUILTINS if is_function else hasattr(builtins, name)
    return is_own(module) or (is_function and module.startswith(_TOOLS))
