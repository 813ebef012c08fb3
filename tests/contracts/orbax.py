"""Golden checkpoints of Orbax and tensorstore, and manifests that are written here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.conftest import golden_files
from tests.contracts.declared import Bad, Declared, Expected, Want, arrays_in
from tests.formats.orbax_files import manifest
from xckpt import formats

if TYPE_CHECKING:
    from pathlib import Path

# Compressors that are not read.
UNSUPPORTED = {"blosc_lz4", "blosc_zstd_bits", "bz2"}


def mark(folder: Path) -> Path:
    """Return the file by which a folder is opened."""
    marks = formats.get("orbax").folder_marks
    return next(folder / name for name in marks if (folder / name).exists())


def root_of(path: Path) -> Path:
    """Return the folder with the expected contents of a checkpoint."""
    return next(folder for folder in path.parents if (folder / "expected.json").exists())


class Orbax(Declared):
    def good(self) -> list[Any]:
        found = []
        for path in golden_files("orbax/*/expected.json"):
            folder = json.loads(path.read_text("utf-8"))["open"]
            found.append(mark(path.parent / "ckpt" / folder))
        return found

    def expected(self, path: Path) -> Expected:
        folder = root_of(path)
        document = json.loads((folder / "expected.json").read_text("utf-8"))
        arrays = arrays_in(folder / "expected.npz")
        tensors, stored = {}, {}
        for tensor in document["tensors"]:
            name = tensor["name"] or "tensor"
            values = arrays[tensor.get("f32_npz", tensor["npz"])]
            values = values.astype(values.dtype.newbyteorder("="))
            is_read = name not in UNSUPPORTED
            tensors[name] = Want(values if is_read else None)
            if is_read and tensor["dtype"] not in {"int2", "int4"}:
                bits = arrays[tensor["npz"]]
                stored[name] = bits.astype(bits.dtype.newbyteorder("=")).tobytes()
        return Expected(tensors, stored, complete=False)

    def bad(self) -> list[Any]:
        names = [path.with_suffix("") for path in golden_files("orbax/bad/*.txt")]
        return [mark(folder) for folder in names]

    def verdict(self, path: Path) -> Bad:
        index = json.loads((path.parents[1] / "INDEX.json").read_text("utf-8"))
        return Bad(path, index[path.parent.name]["when"])

    def small(self) -> dict[str, bytes]:
        return {"empty": manifest(None), "uncompressed": manifest(None, compression=0)}


DECLARED = Orbax(name="orbax", is_folder=True)
