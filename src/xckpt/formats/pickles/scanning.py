"""The code in pickles whose values are not read: of other programs, in arrays and in archives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.errors import CheckpointError, FormatError
from xckpt.formats import archive, kit
from xckpt.formats.pickles.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST = 256 << 20  # bytes of a pickle
# Archives in archives, pickles one after another, and decoded bytes of an archive in an archive.
_DEEPEST, _MOST_PICKLES, _LARGEST_INNER = 3, 1000, 64 << 20
_PICKLES = (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")
_ZIP, _NUMPY = b"PK\3\4", b"\x93NUMPY"


def scan(read: Callable[[str], bytes], nbytes: int, label: str, notes: kit.Notes) -> None:
    """Add the code in the pickles of a member or a file to `notes`.

    A warning states that they cannot be examined. `read` takes the label for its errors.
    """
    try:
        if nbytes > LARGEST:
            raise FormatError(f"it has {nbytes} bytes, more than {LARGEST}")
        _scan(read(label), label, notes, 0)
    except CheckpointError as error:
        notes.executes += error.executes
        notes.add(f"code in its pickle cannot be examined: {error.reason}", label)


def _scan(data: bytes, label: str, notes: kit.Notes, level: int) -> None:
    if data.startswith(_NUMPY):
        width = 2 if data[6:7] == b"\1" else 4
        at = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
        head = data[:at]
        if b"O" in head or b"obj" in head:
            _scan_pickles(data, at, notes)
    elif not data.startswith(_ZIP):
        _scan_pickles(data, 0, notes)
    elif level < _DEEPEST:
        source, remaining = kit.Memory(label, data), _LARGEST_INNER
        for member, content in archive.Archive(source).contents():
            remaining -= member.nbytes
            if remaining < 0:
                raise FormatError(f"its members have more than {_LARGEST_INNER} bytes")
            inner = content.whole(label)
            if inner.startswith((*_PICKLES, _ZIP, _NUMPY)):
                _scan(inner, label, notes, level + 1)
    else:
        raise FormatError(f"archives are nested deeper than {_DEEPEST} levels")


def _scan_pickles(data: bytes, at: int, notes: kit.Notes) -> None:
    """Add the code of pickles one after another; raise an error if the first one is damaged."""
    first = at
    for _ in range(_MOST_PICKLES):
        machine = Machine(data, at)
        try:
            machine.run()
        except CheckpointError as error:
            notes.executes += error.executes
            if at == first and data.startswith(_PICKLES, at):
                raise
            return
        notes.add_code(machine.uses.executes, machine.uses.imports)
        at = machine.at
