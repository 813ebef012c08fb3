"""Paths of tensors in a tree of modules: `tree_paths` makes them, `flat_name` is the inverse.

Tensors ``a.b.c`` and ``a/b/c`` are both variable ``c`` of node ``/a/b``. If a file has both, only
dots separate words there. A path does not record which of them its name has, so `flat_name`
restores slashes only if it is given the original name.

Names are free text. These parts of them are escaped, because paths or DataTree cannot have them:

===================  ==========================================================
in a name            in the tree
===================  ==========================================================
``%``                ``%25``
``/``, NUL           ``%2F``, ``%00`` (a slash that is not a separator)
a byte that is not   ``%80`` to ``%FF`` (a lone surrogate in Python's strings,
UTF-8                which cannot be printed)
``.`` or ``..``      ``%2E``, ``%2E%2E`` (words of a tensor that states its path)
an empty word        ``%``
a tensor that is     variable ``%self`` of the module's node: in DataTree, a
also a module        variable and a child cannot have the same name
===================  ==========================================================

Words after the 64th stay joined in the variable's name, so that no name makes a tree too deep to
walk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from posixpath import commonprefix, join

from xckpt.errors import shown
from xckpt.structure.numbering import split_name

_MAX_DEPTH = 64
_SELF = "%self"
# Python decodes an invalid byte 0x80 as U+DC80, and so on ("surrogateescape").
_BYTES = {0xDC00 + byte: f"%{byte:02X}" for byte in range(0x80, 0x100)}
_ESCAPES = str.maketrans({"%": "%25", "/": "%2F", "\0": "%00"}) | _BYTES
_ESCAPED = re.compile("%([0-9A-F]{2})")


def tree_paths(
    names: Iterable[str] | Mapping[str, tuple[str, ...] | None],
) -> dict[str, tuple[str, str]]:
    """Return the node and the variable of each tensor in a tree."""
    # A mapping has the words of tensors that state them, and None for the others.
    stated = names if isinstance(names, Mapping) else dict.fromkeys(names)
    split = {
        name: _escape_words(path or split_name(name, _MAX_DEPTH)) for name, path in stated.items()
    }
    if len(set(split.values())) < len(split):
        # The file has both a.b and a/b: the slash is not a separator.
        counts = Counter(split.values())
        for name, path in stated.items():
            if path is None and "/" in name and counts[split[name]] > 1:
                split[name] = _escape_words(name.split(".", _MAX_DEPTH))
    modules = {node[:depth] for node, _ in split.values() for depth in range(1, len(node) + 1)}
    paths = {}
    for name, (node, leaf) in split.items():
        is_module = (*node, leaf) in modules
        words = (*node, leaf) if is_module else node
        paths[name] = ("/" + "/".join(words), _SELF if is_module else leaf)
    if len(set(paths.values())) < len(paths):
        (place, _), *_ = Counter(paths.values()).most_common(1)
        raise ValueError(f"two tensors state the same path, {shown(join(*place))}")
    return paths


def flat_name(path: str, variable: str, original: str = "") -> str:
    """Return the flat name of a variable in the tree, with the slashes of the original name."""
    words = [word for word in path.split("/") if word]
    if variable != _SELF:
        words.append(variable)
    name = ".".join("" if word == "%" else _ESCAPED.sub(_unescape, word) for word in words)
    if "/" in original:  # restore its slashes as far as the names agree
        same = len(commonprefix([original.replace("/", "."), name]))
        name = original[:same] + name[same:]
    return name


def child_nodes(paths: Iterable[str]) -> dict[str, dict[str, None]]:
    """Return the names of the children of each node above the given ones, in their order."""
    children: dict[str, dict[str, None]] = {}
    for path in paths:
        node = path
        while node != "/":
            parent, _, name = node.rpartition("/")
            node = parent or "/"
            children.setdefault(node, {})[name] = None
    return children


def _escape_words(words: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Escape the words of a name, and set the last one apart."""
    *node, leaf = map(_escape, words)
    return tuple(node), leaf


# A checkpoint has very many names, but they share few words.
@lru_cache(maxsize=4096)
def _escape(word: str) -> str:
    if word in {".", ".."}:
        return word.replace(".", "%2E")
    return word.translate(_ESCAPES) or "%"


def _unescape(match: re.Match[str]) -> str:
    code = int(match[1], 16)
    return chr(code if code < 0x80 else 0xDC00 + code)
