"""Checkpoints of PyTorch, written opcode by opcode, without PyTorch."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

CLASSES = {"f4": "FloatStorage", "f8": "DoubleStorage", "i8": "LongStorage", "u1": "ByteStorage"}
CLASSES |= {"c8": "ComplexFloatStorage", "i1": "QInt8Storage", "u2": "BFloat16Storage"}
CLASSES |= {"f2": "HalfStorage", "i4": "QInt32Storage"}
MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def several(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def sizes(*values: int) -> bytes:
    return several(*map(number, values))


def mapping(items: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def name(module: str, qualname: str) -> bytes:
    return f"c{module}\n{qualname}\n".encode()


def called(function: bytes, *args: bytes) -> bytes:
    return function + several(*args) + b"R"


def storage(key: str, count: int, kind: str = "FloatStorage") -> bytes:
    words = (text("storage"), name("torch", kind), text(key), text("cpu"), number(count))
    return several(*words) + b"Q"


def view(
    stored: bytes, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *more: bytes
) -> bytes:
    """Write a tensor that is a view of a storage."""
    hooks = name("collections", "OrderedDict") + b")R"
    place = (stored, number(offset), sizes(*shape), sizes(*strides))
    return called(name("torch._utils", "_rebuild_tensor_v2"), *place, b"\x89", hooks, *more)


def whole(key: str, array: np.ndarray[Any, Any]) -> bytes:
    """Write a tensor that is all of a storage."""
    steps = tuple(step // array.itemsize for step in array.strides)
    kind = CLASSES[array.dtype.str[1:]]
    return view(storage(key, array.size, kind), 0, array.shape, steps)


def typed_view(
    key: str, dtype: str, array: np.ndarray[Any, Any], bits: Mapping[str, bytes] | None = None
) -> bytes:
    """Write a tensor of a type that has no class of storages, as newer versions do.

    The last axis of `array` has the bytes of an element. `bits` are what is set of conj and neg.
    """
    shape = array.shape[:-1]
    strides = tuple(step // array.shape[-1] for step in array.strides[:-1])
    hooks = name("collections", "OrderedDict") + b")R"
    place = (storage(key, array.nbytes, "UntypedStorage"), number(0), sizes(*shape))
    layout = (sizes(*strides), b"\x89", hooks, name("torch", dtype))
    more = () if bits is None else (mapping(bits),)
    return called(name("torch._utils", "_rebuild_tensor_v3"), *place, *layout, *more)


def quantized(key: str, codes: np.ndarray[Any, Any], scheme: str, *parameters: bytes) -> bytes:
    """Write a quantised tensor that is all of a storage."""
    steps = tuple(step // codes.itemsize for step in codes.strides)
    place = (storage(key, codes.size, CLASSES[codes.dtype.str[1:]]), number(0))
    layout = (sizes(*codes.shape), sizes(*steps), several(name("torch", scheme), *parameters))
    hooks = name("collections", "OrderedDict") + b")R"
    return called(name("torch._utils", "_rebuild_qtensor"), *place, *layout, b"\x89", hooks)


def sparse(layout: str, shape: tuple[int, ...], *parts: bytes) -> bytes:
    """Write a sparse tensor of its parts."""
    kind = called(name("torch.serialization", "_get_layout"), text(f"torch.{layout}"))
    size = called(name("torch", "Size"), sizes(*shape))
    data = several(*parts, size)
    return called(name("torch._utils", "_rebuild_sparse_tensor"), kind, data)


def real(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def ndarray(array: np.ndarray[Any, Any]) -> bytes:
    """Write an array of numpy, which has its bytes in the pickle as protocol 2 spells them."""

    def encoded(data: bytes) -> bytes:
        return called(name("_codecs", "encode"), text(data.decode("latin-1")), text("latin1"))

    kind = called(name("numpy", "dtype"), text(array.dtype.str[1:]), b"\x89", b"\x88")
    kind += several(number(3), text("<"), b"N", b"N", b"N") + b"b"
    start = name("numpy", "ndarray"), sizes(0), encoded(b"b")
    state = number(1), sizes(*array.shape), kind, b"\x89", encoded(array.tobytes())
    created = called(name("numpy.core.multiarray", "_reconstruct"), *start)
    return created + several(*state) + b"b"


def pickled(value: bytes) -> bytes:
    return b"\x80\x02" + value + b"."


def zipped(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for member, data in members.items():
            archive.writestr(zipfile.ZipInfo(member), data, method)
    return file.getvalue()


def archive(value: bytes, storages: Mapping[str, bytes] | None = None, **more: Any) -> bytes:
    """Write a zip archive with a value."""
    members = {"m/data.pkl": pickled(value)}
    members |= {f"m/data/{key}": data for key, data in (storages or {}).items()}
    return zipped(members | {"m/version": b"3\n"}, **more)


def checkpoint(arrays: Mapping[str, np.ndarray[Any, Any]], **more: Any) -> bytes:
    """Write a zip archive with arrays by name."""
    numbered = {str(at): item for at, item in enumerate(arrays.items())}
    value = mapping({label: whole(key, array) for key, (label, array) in numbered.items()})
    return archive(value, {key: array.tobytes() for key, (_, array) in numbered.items()}, **more)


def legacy(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """Write the chain of pickles of old files."""
    numbered = {str(at): item for at, item in enumerate(arrays.items())}
    value = mapping({label: whole(key, array) for key, (label, array) in numbered.items()})
    keys = b"](" + b"".join(map(text, numbered)) + b"e"
    head = MAGIC + pickled(b"M\xe9\x03") + pickled(mapping({"little_endian": b"\x88"}))
    data = [struct.pack("<q", array.size) + array.tobytes() for _, array in numbered.values()]
    return head + pickled(value) + pickled(keys) + b"".join(data)


CHECKPOINT = "torch.distributed.checkpoint"


def built(module: str, class_name: str, state: bytes) -> bytes:
    """Write an instance with a state."""
    return name(f"{CHECKPOINT}.{module}", class_name) + b")\x81" + state + b"b"


def distributed(
    tensors: Mapping[str, Mapping[tuple[int, ...], np.ndarray[Any, Any]]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str = "float32",
) -> dict[str, bytes]:
    """Write a folder: of each tensor, chunks by where they begin, by turns in two files.

    The last axis of chunks of another type has the bytes of an element.
    """
    files = {"__0_0.distcp": b"", "__1_0.distcp": b""}
    tensors_metadata, places = {}, []
    for label, chunks in tensors.items():
        listed = []
        for number, (origin, array) in enumerate(chunks.items()):
            file = f"__{number % 2}_0.distcp"
            is_plain = dtype == "float32"
            value = whole("0", array) if is_plain else typed_view("0", dtype, array)
            item = archive(value, {"0": array.tobytes(order="A")})
            extents = array.shape if is_plain else array.shape[:-1]
            chunk = {"offsets": sizes(*origin), "sizes": sizes(*extents)}
            listed.append(built("metadata", "ChunkStorageMetadata", mapping(chunk)))
            key = mapping({"fqn": text(label), "offset": sizes(*origin)})
            place = {"relative_path": text(file), "offset": number64(len(files[file]))}
            place |= {"length": number64(len(item))}
            places.append(built("metadata", "MetadataIndex", key))
            places.append(built("filesystem", "_StorageInfo", mapping(place)))
            files[file] += item
        properties = built("metadata", "TensorProperties", several(name("torch", dtype)))
        state = {"properties": properties, "size": sizes(*shapes[label])}
        state |= {"chunks": b"](" + b"".join(listed) + b"e"}
        tensors_metadata[label] = built("metadata", "TensorStorageMetadata", mapping(state))
    state = {"state_dict_metadata": mapping(tensors_metadata)}
    state |= {"storage_data": b"}(" + b"".join(places) + b"u", "version": text("1.0.0")}
    root = built("metadata", "Metadata", mapping(state))
    return {".metadata": pickled(root), **files}


def number64(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)
