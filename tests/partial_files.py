"""Checkpoints of which a part is missing or damaged, in all formats whose header stays readable."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

import xckpt
from tests.formats.torch_files import legacy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xckpt.typing import Array

VALUES: dict[str, Array] = {
    f"layers.{n}.w": np.random.default_rng(n).random((8, 16), np.float32) for n in range(5)
}
NBYTES = 8 * 16 * 4


def written(path: Path, values: dict[str, Array] | None = None, **options: Any) -> Path:
    """Save tensors."""
    xckpt.save(VALUES if values is None else values, path, **options)
    return path


def cut(path: Path, nbytes: int) -> Path:
    """Remove the last bytes of a file."""
    path.write_bytes(path.read_bytes()[:-nbytes])
    return path


def safetensors(folder: Path) -> Path:
    """Write a safetensors file that was cut inside of its last tensor but one."""
    return cut(written(folder / "m.safetensors"), NBYTES + 100)


def gguf(folder: Path) -> Path:
    """Write a GGUF file that was cut inside of its last tensor but one."""
    ds = xckpt.open(VALUES).assign_attrs({"general.architecture": "llama"})
    xckpt.save(ds, folder / "m.gguf")
    return cut(folder / "m.gguf", NBYTES + 100)


def pt(folder: Path) -> Path:
    """Write a file of torch before 1.6 that was cut inside of its last storage but one."""
    path = folder / "m.pt"
    path.write_bytes(legacy(VALUES))
    return cut(path, NBYTES + 100)


def shards(folder: Path) -> Path:
    """Write an index of shards, and delete one of the shards."""
    path = written(folder / "m.safetensors", max_shard_size=2 * NBYTES)
    (folder / "m-00002-of-00003.safetensors").unlink()
    return path.with_name("m.safetensors.index.json")


def _field(number: int, data: bytes | int) -> bytes:
    """Encode a field of protobuf."""
    if isinstance(data, int):
        return bytes([number << 3]) + _varint(data)
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    encoded = b""
    while value > 127:
        encoded += bytes([value & 127 | 128])
        value >>= 7
    return encoded + bytes([value])


def _entry(key: str, value: object) -> bytes:
    return _field(1, key.encode()) + _field(2, str(value).encode())


def onnx(folder: Path, *, names: tuple[str, ...] = ("first.bin", "second.bin")) -> Path:
    """Write a model whose data are in two files, of which the second one is missing."""
    graph = b""
    data: dict[str, bytes] = dict.fromkeys(names, b"")
    for number, (name, values) in enumerate(VALUES.items()):
        location = names[number >= 3]
        place = {"location": location, "offset": len(data[location]), "length": values.nbytes}
        data[location] += values.tobytes()
        tensor = b"".join(_field(1, n) for n in values.shape) + _field(2, 1)
        tensor += _field(8, name.encode())
        tensor += b"".join(_field(13, _entry(*item)) for item in place.items()) + _field(14, 1)
        graph += _field(5, tensor)
    path = folder / "m.onnx"
    path.write_bytes(_field(1, 8) + _field(7, graph + _field(2, b"g")))
    (folder / names[0]).write_bytes(data[names[0]])
    return path


def short_onnx(folder: Path) -> Path:
    """Write a model whose second file with data is cut inside of its first tensor."""
    path = onnx(folder)
    (folder / "second.bin").write_bytes(bytes(100))
    return path


#: Functions that write a checkpoint of which the last one or two tensors cannot be read, or the
#: third and the fourth one.
PARTIAL: dict[str, Callable[[Path], Path]] = {
    "safetensors": safetensors,
    "gguf": gguf,
    "pt": pt,
    "onnx": onnx,
    "short onnx": short_onnx,
    "shards": shards,
}


def lost(kind: str) -> list[str]:
    """Return the names of the tensors that cannot be read."""
    names = list(VALUES)
    return names[2:4] if kind == "shards" else names[3:]


def safetensors_file(shapes: dict[str, list[int]]) -> bytes:
    """Encode a file of zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)
