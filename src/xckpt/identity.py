"""Stable ids of tensors, as keys for values that are derived from them.

The ids are compatible with gpt.rs. They depend only on names, so tensors of every format have them:

base id
    Id of a name, the same in every file and every process.
namespace
    Number of an opened checkpoint, unique in this process.
param key
    Id of a tensor of an opened checkpoint, derived from both. Checkpoints with the same names have
    different param keys.

All are unsigned numbers of up to 128 bits. Specification: ``params.rs`` of
github.com/Lallapallooza/gpt.rs.
"""

from __future__ import annotations

import re
from itertools import count
from operator import index
from threading import Lock

_NBYTES = 16
_HEX_ID = re.compile(r"[0-9a-f]{32}", re.IGNORECASE)
_PARAM_KEY = b"gpt-rs:param-key:v1"

_namespaces = count(1)
_lock = Lock()


def base_id(name: str) -> int:
    """Return the id of a parameter's name: the first 128 bits of its BLAKE3 hash.

    Parameters
    ----------
    name : str
        Name of the parameter, in ASCII.

    Returns
    -------
    int
        Unsigned number of up to 128 bits, the same in every file and every process.

    Raises
    ------
    ValueError
        If the name has characters other than ASCII.

    Examples
    --------
    >>> from xckpt.identity import base_id
    >>> f"{base_id('lm_head'):032x}"
    'a962c72e0d59ef7a13ff91bdee235d58'
    """
    if not name.isascii():
        raise ValueError(f"only names in ASCII have a base id, not {name!r}")
    return _digest(name.encode("ascii"))


def base_id_text(base_id: int | bytes | str) -> str:
    """Return an id as 32 hexadecimal digits."""
    if isinstance(base_id, str):
        if _HEX_ID.fullmatch(base_id) is None:
            raise ValueError(f"a base id has 32 hexadecimal digits, unlike {base_id!r}")
        return base_id.lower()
    if isinstance(base_id, bytes):
        if len(base_id) != _NBYTES:
            raise ValueError(f"a base id has {_NBYTES} bytes, unlike {base_id!r}")
        return f"{int.from_bytes(base_id, 'little'):032x}"
    number = index(base_id)
    if not 0 <= number < 1 << 8 * _NBYTES:
        raise ValueError(f"a base id is a number of {8 * _NBYTES} bits, unlike {number}")
    return f"{number:032x}"


def param_key(namespace: int, base_id: int) -> int:
    """Return the id of a parameter of an opened checkpoint.

    Parameters
    ----------
    namespace : int
        Number of the opened checkpoint, from ``ds.encoding["namespace"]``.
    base_id : int
        Id of the parameter's name, from `base_id`.

    Returns
    -------
    int
        Unsigned number of up to 128 bits, unique in this process.

    Examples
    --------
    >>> from xckpt.identity import base_id, param_key
    >>> param_key(1, base_id("lm_head")) == param_key(2, base_id("lm_head"))
    False
    """
    numbers = [number.to_bytes(_NBYTES, "little") for number in (namespace, base_id)]
    return _digest(b"".join([_PARAM_KEY, *numbers]))


def stable_id(namespace: int, name: str) -> int:
    """Return the id of a tensor of an opened checkpoint of any format."""
    # Names from JSON may have lone surrogates.
    return param_key(namespace, _digest(name.encode("utf-8", "surrogatepass")))


def next_namespace() -> int:
    """Return a namespace that is unique in this process."""
    with _lock:
        return next(_namespaces)


def _digest(data: bytes) -> int:
    from blake3 import blake3

    return int.from_bytes(blake3(data).digest(_NBYTES), "little")
