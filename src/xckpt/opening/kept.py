"""Attributes that the files of a format have room for, and those that describe the files."""

from __future__ import annotations

from typing import NamedTuple

from xckpt import formats


class AttributeRoom(NamedTuple):
    """The attributes of a format."""

    #: Names of attributes that state how a file is stored, not what it contains.
    storage: frozenset[str] = frozenset()
    #: Names of attributes that the format derives from other fields.
    derived: frozenset[str] = frozenset()
    #: Whether files have room for any attribute, and for any attribute of a tensor.
    is_open: bool = False
    is_open_for_tensors: bool = False


def room_for_attributes(name: str | None) -> AttributeRoom:
    """Return the attributes of a format; no room for an object in memory."""
    if name is None or name not in formats.names():
        return AttributeRoom()
    form = formats.get(name)
    return AttributeRoom(
        frozenset(form.storage_attrs),
        frozenset(form.can.stated_attrs),
        is_open=form.can.file_attrs is None,
        is_open_for_tensors=form.can.tensor_attrs is None or form.can.arrangement,
    )
