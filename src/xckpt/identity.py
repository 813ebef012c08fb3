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
    """Compute the id of a parameter's name: the first 128 bits of its BLAKE3 hash.

    Parameters
    ----------
    name : str
        In ASCII, as gpt.rs demands of the names of parameters.

    Returns
    -------
    int
        The first 16 bytes of the hash, read in little-endian order. A checkpoint has the same 16
        bytes, in that order.

    Raises
    ------
    ValueError
        If the name is not ASCII.

    Examples
    --------
    >>> f"{base_id('lm_head'):032x}"
    'a962c72e0d59ef7a13ff91bdee235d58'
    """
    if not name.isascii():
        raise ValueError(f"only names in ASCII have a base id, not {name!r}")
    return _digest(name.encode("ascii"))


def param_key(namespace: int, base_id: int) -> int:
    """Derive the id of a parameter of one opened checkpoint.

    Parameters
    ----------
    namespace : int
        Of the checkpoint; see `next_namespace`.
    base_id : int
        Of the parameter's name.

    Returns
    -------
    int
        The first 128 bits of a BLAKE3 hash of both.

    Raises
    ------
    OverflowError
        If one of them is negative or has more than 128 bits.

    Examples
    --------
    >>> f"{param_key(1, base_id('lm_head')):032x}"
    'bc874dba78a0af10e0bf65eac431acd0'
    """
    told = (number.to_bytes(_NBYTES, "little") for number in (namespace, base_id))
    return _digest(b"".join([_PARAM_KEY, *told]))


def stable_id(namespace: int, name: str) -> int:
    """Derive the id of a tensor of one opened checkpoint of whatever format.

    Parameters
    ----------
    namespace : int
        Of the checkpoint; see `next_namespace`.
    name : str
        Name of the tensor. Names that are not ASCII, which no parameter of gpt.rs has, count
        with their bytes in UTF-8.

    Returns
    -------
    int
        The `param_key` of the name's `base_id`.

    Raises
    ------
    OverflowError
        If the namespace is negative or has more than 128 bits.

    Examples
    --------
    >>> stable_id(1, "lm_head") == param_key(1, base_id("lm_head"))
    True
    """
    # JSON can spell lone surrogates, so names of some formats may have them.
    return param_key(namespace, _digest(name.encode("utf-8", "surrogatepass")))


def next_namespace() -> int:
    """Give a namespace that no opened checkpoint of this process has.

    Returns
    -------
    int
        From 1 on. It is in no file: another process counts for itself.

    Examples
    --------
    >>> next_namespace() < next_namespace()
    True
    """
    with _lock:
        return next(_namespaces)


def _digest(data: bytes) -> int:
    from blake3 import blake3

    return int.from_bytes(blake3(data).digest(_NBYTES), "little")
