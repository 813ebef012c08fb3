"""HDF5 files with structures that only the HDF5 library reads, by way of h5py.

Only descriptions are read, never the data of a dataset: no filter runs, so that no plug-in of
the library is loaded, and no link to elsewhere is followed.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, FormatError, UnsupportedError, escaped, shown
from xckpt.formats.keras.hdf5 import Chunk, Contents, Dataset, Image, NewerError
from xckpt.formats.keras.types import element

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.formats import kit

_MOST_NAMES, _LARGEST_ATTRIBUTE = 1_000_000, 64 << 20


class _RawFile(io.RawIOBase):
    """The bytes of an image as an open file."""

    def __init__(self, image: Image) -> None:
        self._image, self._at = image, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._image.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, memory: Any) -> int:
        image = self._image
        nbytes = max(0, min(len(memory), image.size - self._at))
        if nbytes:  # addresses of a damaged file may lie behind its end
            memory[:nbytes] = image.source.read(image.start + self._at, nbytes)
        self._at += nbytes
        return nbytes


class _File(io.BufferedReader):
    """A buffered file of an image, which checks heaps before the library reads them."""

    def __init__(self, image: Image) -> None:
        super().__init__(_RawFile(image), 1 << 16)
        self._image = image

    def readinto(self, memory: Any) -> int:
        at, nbytes = self.tell(), super().readinto(memory)
        if bytes(memory[:4]) == b"GCOL":
            # The library would not return from a heap with an object of no bytes.
            self._image.heap(at)
        return nbytes


def is_available() -> bool:
    """Return whether h5py is installed."""
    return find_spec("h5py") is not None


def read(image: Image, notes: kit.Notes, newer: NewerError | None = None) -> Contents:
    """Read all descriptions with h5py, or raise `newer` if it is not installed."""
    if newer is not None and not is_available():
        raise newer
    import h5py

    try:
        with h5py.File(_File(image), "r") as file:
            return _walk(h5py, file, image, notes)
    except CheckpointError:
        raise
    # The library has an exception for each of its error codes, and their texts have paths.
    except Exception as error:
        reason = f"HDF5 cannot read the file: {escaped(str(error))}"
        raise FormatError(reason, offset=image.offset(0), rule="Hdf5") from error


def _walk(h5py: Any, file: Any, image: Image, notes: kit.Notes) -> Contents:
    contents, visited = Contents(), set()
    stack: list[tuple[tuple[str, ...], Any]] = [((), file)]
    while stack:
        path, obj = stack.pop()
        address = h5py.h5o.get_info(obj.id).addr
        if isinstance(obj, h5py.Dataset):
            contents.datasets[path] = _dataset(h5py, obj, address, image)
        elif isinstance(obj, h5py.Group):
            if address in visited or len(path) > 1000:
                reason = "a group with several names is read under one of them"
                notes.add(reason, shown("/".join(path)))
                continue
            visited.add(address)
            contents.groups[path] = _attributes(obj)
            for name in obj:
                entry = (*path, name)
                if len(visited) + len(stack) + len(contents.datasets) > _MOST_NAMES:
                    raise FormatError("too many names", rule="Name", offset=image.offset(0))
                if isinstance(obj.get(name, getlink=True), h5py.HardLink):
                    stack.append((entry, obj[name]))
                else:
                    reason = "a link to elsewhere, which is not followed"
                    notes.add(reason, shown("/".join(entry)))
    return contents


def _attributes(obj: Any) -> dict[str, Any]:
    attrs = {}
    for name in obj.attrs:
        try:
            stored = obj.attrs.get_id(name)
            # Arrays are not kept, and may claim more elements than the file has bytes.
            if stored.shape != () or stored.get_storage_size() > _LARGEST_ATTRIBUTE:
                continue
            value = obj.attrs[name]
        except CheckpointError:
            raise
        # numpy has no such type.
        except (OSError, TypeError, ValueError, RuntimeError, KeyError):
            continue
        value = value.tolist() if hasattr(value, "tolist") else value
        value = value.decode(errors="replace") if type(value) is bytes else value
        if type(value) in {str, int, float, bool}:
            attrs[name] = value
    return attrs


def _dataset(h5py: Any, obj: Any, address: int, image: Image) -> Dataset:
    dataset = Dataset(address, attrs=_attributes(obj))
    try:
        # The encoded type has two bytes in front.
        dataset.element = element(obj.id.get_type().encode()[2:])[0]
        dataset.shape = obj.shape
        created = obj.id.get_create_plist()
        layout = created.get_layout()
        if created.get_external_count():
            raise UnsupportedError("its data are in another file", rule="External")
        if layout == h5py.h5d.VIRTUAL:
            raise UnsupportedError("its data are those of other datasets, or files", rule="Virtual")
        if obj.fillvalue is not None and dataset.element.dtype is not None:
            # As an array, because a scalar of numpy always has native byte order.
            dataset.fill = obj.fillvalue.reshape(1).astype(obj.dtype).tobytes()
        if layout == h5py.h5d.CHUNKED:
            dataset.chunk = obj.chunks
            filters = [created.get_filter(number) for number in range(created.get_nfilters())]
            dataset.filters = [(number, tuple(values)) for number, _, values, _ in filters]
            obj.id.chunk_iter(
                lambda info: dataset.chunks.append(
                    Chunk(tuple(info.chunk_offset), info.byte_offset, info.size, info.filter_mask)
                )
            )
            if _is_ambiguous(obj, dataset.chunks):
                reason = "HDF5 does not report the positions of its chunks"
                hint = "Pack the file again with h5repack"
                raise UnsupportedError(reason, rule="Chunks", hint=hint)
        elif layout == h5py.h5d.COMPACT:
            raise UnsupportedError("its data are in the header of a newer file", rule="Compact")
        else:
            dataset.at, dataset.nbytes = obj.id.get_offset(), obj.id.get_storage_size()
    except CheckpointError as error:
        dataset.problem = error.located(offset=image.offset(address))
    return dataset


def _is_ambiguous(obj: Any, chunks: Sequence[Chunk]) -> bool:
    """Return whether the positions of chunks in an extensible array may be wrong."""
    # If one axis is unlimited, and not the first, the library counts chunks along that axis only.
    unlimited = [axis for axis, size in enumerate(obj.maxshape) if size is None]
    if len(unlimited) != 1:
        return False
    before = range(unlimited[0])
    is_split = any(obj.maxshape[axis] > obj.chunks[axis] for axis in before)
    is_along = any(chunk.origin[unlimited[0]] for chunk in chunks)
    return is_split and is_along and not any(chunk.origin[n] for chunk in chunks for n in before)
