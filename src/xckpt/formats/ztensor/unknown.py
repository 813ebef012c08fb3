"""Features that are not known: the tensor is listed, its `problem` says why it is not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.errors import UnsupportedError, shown

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

__all__ = ["unknown_element", "unknown_encoding", "unknown_encodings"]


def unknown_element(spelled: str, tensor: str, offset: int | None = None) -> UnsupportedError:
    """Make the error for an element type that is not known."""
    return UnsupportedError(
        f"unknown element type {shown(spelled)}",
        tensor=tensor,
        offset=offset,
        rule="Schema",
        hint=_rest(tensor),
    )


def unknown_encoding(spelled: str, tensor: str, offset: int) -> UnsupportedError:
    """Make the error for an encoding that is not known."""
    return UnsupportedError(
        f"unknown encoding {shown(spelled)}",
        tensor=tensor,
        offset=offset,
        rule="Encoding",
        hint=_rest(tensor),
    )


def unknown_encodings(
    tensor: str, encodings: Iterable[tuple[str | None, int]], known: Container[str | None]
) -> UnsupportedError | None:
    """Find the reason why a tensor that is shown as its parts cannot be."""
    for encoding, offset in encodings:
        if encoding not in known:
            return unknown_encoding(str(encoding), tensor, offset)
    return None


def _rest(tensor: str) -> str:
    return f"The rest opens with drop_variables=[{shown(tensor)}]"
