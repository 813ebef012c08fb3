"""The format of a file, and the attributes of a format, for rooms that may not import `formats`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt import formats
from xckpt.errors import CheckpointError, FormatError, MissingShardError
from xckpt.opening.files import SeveralFilesError, files_of
from xckpt.opening.hints import advising
from xckpt.opening.reading import open_place
from xckpt.storage import Location, Source
from xckpt.storage.limits import Pool

if TYPE_CHECKING:
    from xckpt.opening.checkpoint import CheckpointFiles

# Formats of files on the Hub, because xarray asks all engines in turn.
_on_hub: Pool[str] = Pool(limit=256)


def format_of(path: Any, storage_options: dict[str, Any] | None = None) -> str:
    """Return the format of a checkpoint, detected from its content."""
    location = Location.of(path, storage_options)
    with advising(location):
        source = _readable_file(files_of(location))
    with source.reading_header() as header:
        return formats.detect(header).name


def is_format(path: Any, format: str) -> bool:
    """Return whether an object is a checkpoint of a format; False for anything else."""
    try:
        location = Location.of(path)
        if location.kind == "hub":
            return _is_format_on_hub(location, format)
        if not location.is_local and location.is_named:
            return _is_called_like(location.file_name, format)
        source = _readable_file(files_of(location))
        recognized = formats.recognized(source)
    except PermissionError:
        raise
    except SeveralFilesError:
        return True  # so that the user sees the error with the list of files
    except (OSError, TypeError, ValueError) as error:
        # The error of opening a missing file suggests a similar name, which xarray does not.
        return type(error) is FileNotFoundError and _is_called_like(str(path), format)
    if recognized is not None:
        return recognized.name == format
    # The error of opening a damaged file explains the damage, which xarray does not.
    return _is_called_like(source.name, format) and formats.is_foreign(source)


def _is_format_on_hub(location: Location, format: str) -> bool:
    try:
        return _on_hub.get(location.pinned().text, lambda: format_of(location)) == format
    except FormatError:
        return False
    except (OSError, ImportError, CheckpointError, ValueError):
        return True  # so that the user sees the error of opening it, not an error of xarray


def _is_called_like(path: str, format: str) -> bool:
    """Return whether a name has a suffix of this format alone; other formats are not loaded."""
    name = path.lower()
    return name.endswith(formats.suffixes(format)) and name.endswith(
        formats.get(format).own_suffixes
    )


def _readable_file(files: CheckpointFiles) -> Source:
    """Open the first file of a known format, else the first file."""
    if not files.places:
        raise MissingShardError("all of its files are missing", path=files.name)
    places = list(files.places.values())
    if files.by == "ranks":
        return _readable_file(files_of(Location.of(places[0])))
    first = open_place(places[0])
    if files.weight_map is None or formats.recognized(first) is not None:
        return first
    others = map(open_place, places[1:])
    return next((file for file in others if formats.recognized(file) is not None), first)


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
