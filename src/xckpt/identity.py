"""Ids of tensors that stay the same: what a value that is derived from a tensor is kept under.

They are those of gpt.rs, made of names only, so tensors of every format have them:

base id
    of a name: the same in every file and every process.
namespace
    of an opened checkpoint: a number that no other one opened in this process has.
param key
    of a tensor of an opened checkpoint, derived from both. Two checkpoints with the same names
    never share one.

All are unsigned numbers of up to 128 bits. Reference: ``params.rs`` of
github.com/Lallapallooza/gpt.rs.
"""

from __future__ import annotations

from itertools import count
from threading import Lock

__all__ = ["base_id", "next_namespace", "param_key", "stable_id"]

_NBYTES = 16
_PARAM_KEY = b"gpt-rs:param-key:v1"

_namespaces = count(1)
_lock = Lock()


def base_id(name: str) -> int:
    """Compute the id of a parameter's name: the first 128 bits of its BLAKE3 hash."""
    if not name.isascii():
        raise ValueError(f"only names in ASCII have a base id, not {name!r}")
    return _digest(name.encode("ascii"))


def param_key(namespace: int, base_id: int) -> int:
    """Derive the id of a parameter of one opened checkpoint."""
    told = (number.to_bytes(_NBYTES, "little") for number in (namespace, base_id))
    return _digest(b"".join([_PARAM_KEY, *told]))


def stable_id(namespace: int, name: str) -> int:
    """Derive the id of a tensor of one opened checkpoint of whatever format."""
    # JSON can spell lone surrogates, so names of some formats may have them.
    return param_key(namespace, _digest(name.encode("utf-8", "surrogatepass")))


def next_namespace() -> int:
    """Return a namespace that no opened checkpoint of this process has."""
    with _lock:
        return next(_namespaces)


def _digest(data: bytes) -> int:
    from blake3 import blake3

    return int.from_bytes(blake3(data).digest(_NBYTES), "little")
