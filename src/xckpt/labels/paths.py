"""Names as paths of a tree: one function that splits them, and its inverse.

Tensor ``a.b.c`` is variable ``c`` of node ``/a/b``, and so is ``a/b/c``, but not where both are
there: the inverse gives dots, and only what else is known of a variable says that it had slashes.
Names are free text, so some need an escape that neither the path syntax nor DataTree trips over:

===================  ==========================================================
in a name            in the tree
===================  ==========================================================
``%``                ``%25``
``/``, NUL           ``%2F``, ``%00`` (a slash that separates no words)
a byte that is not   ``%80`` to ``%FF`` (a lone surrogate in Python's text,
UTF-8                which cannot be printed)
``.`` or ``..``      ``%2E``, ``%2E%2E`` (of a tensor that states its path)
an empty component   ``%``
a tensor that is     variable ``%self`` of the module's node: DataTree has no
also a module        room for a variable and a child of one name
===================  ==========================================================

Components beyond the 64th stay joined in the variable's name, so that no name makes a tree too deep
to walk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from os.path import commonprefix
from typing import TYPE_CHECKING

from xckpt.labels.numbering import split_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["child_nodes", "flat_name", "tree_paths"]

_DEEPEST = 64
_SELF = "%self"
# Of Python's error handler "surrogateescape": byte 0x80 is U+DC80 and so on.
_BYTES = {0xDC00 + byte: f"%{byte:02X}" for byte in range(0x80, 0x100)}
_ESCAPES = str.maketrans({"%": "%25", "/": "%2F", "\0": "%00"}) | _BYTES
_ESCAPED = re.compile("%([0-9A-F]{2})")


def tree_paths(
    names: Iterable[str] | Mapping[str, tuple[str, ...] | None],
) -> dict[str, tuple[str, str]]:
    """Place flat names in a tree."""
    stated = names if isinstance(names, Mapping) else dict.fromkeys(names)
    split = {name: _components(path or split_name(name, _DEEPEST)) for name, path in stated.items()}
    if len(set(split.values())) < len(split):
        # Of a/b and a.b, the slash is no separator.
        times = Counter(split.values())
        for name, path in stated.items():
            if path is None and "/" in name and times[split[name]] > 1:
                split[name] = _components(name.split(".", _DEEPEST))
    modules = {node[:depth] for node, _ in split.values() for depth in range(1, len(node) + 1)}
    placed = {}
    for name, (node, leaf) in split.items():
        is_module = (*node, leaf) in modules
        path = (*node, leaf) if is_module else node
        placed[name] = ("/" + "/".join(path), _SELF if is_module else leaf)
    if len(set(placed.values())) < len(placed):
        raise ValueError("two tensors state one path")
    return placed


def flat_name(path: str, variable: str, known: str = "") -> str:
    """Return the flat name of a variable in the tree, the inverse of `tree_paths`.

    As far as it is that of a `known` tensor, it has the slashes of this one.
    """
    components = [part for part in path.split("/") if part]
    if variable != _SELF:
        components.append(variable)
    name = ".".join(["" if part == "%" else _ESCAPED.sub(_unescaped, part) for part in components])
    if "/" in known:
        same = len(commonprefix([known.replace("/", "."), name]))  # noqa: RUF071  by character
        name = known[:same] + name[same:]
    return name


def child_nodes(paths: Iterable[str]) -> dict[str, set[str]]:
    """Return the names of the nodes right below each node."""
    below: dict[str, set[str]] = {}
    for path in paths:
        above = path
        while above != "/":
            above, _, child = above.rpartition("/")
            above = above or "/"
            below.setdefault(above, set()).add(child)
    return below


def _components(path: Sequence[str]) -> tuple[tuple[str, ...], str]:
    *node, leaf = map(_escaped, path)
    return tuple(node), leaf


# Few components are in very many names.
@lru_cache(maxsize=4096)
def _escaped(component: str) -> str:
    if component in {".", ".."}:
        return component.replace(".", "%2E")
    return component.translate(_ESCAPES) or "%"


def _unescaped(match: re.Match[str]) -> str:
    code = int(match[1], 16)
    return chr(code if code < 0x80 else 0xDC00 + code)
