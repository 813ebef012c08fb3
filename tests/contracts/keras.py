"""Golden files of Keras and h5py, and small files that h5py writes here."""

from __future__ import annotations

import io
import json
import re
import zipfile
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from tests.conftest import golden_files
from tests.contracts.declared import (
    LARGE,
    Bad,
    Declared,
    Expected,
    Want,
    arrays_in,
    golden_json,
    small_dataset,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Files that may be refused or read, and whether reading them warns.
TOLERATED = {
    "data_into_header.weights": False,
    "data_size_smaller.weights": True,
    "external_link.weights": True,
    "external_link_absolute.weights": True,
    "external_link_group.weights": True,
    "external_link_vars.weights": True,
    "hard_link_bomb.weights": True,
    "hard_link_loop.weights": True,
    "index_wrong_file.weights": True,
    "legacy_config_json": True,
    "legacy_missing_layer": False,
    "legacy_missing_weight": False,
    "legacy_names_number": False,
    "legacy_path_climbs": False,
    "name_dot.weights": False,
    "soft_link.weights": True,
    "soft_link_dangling.weights": True,
    "type_array.weights": False,
    "type_bfloat16_4_bytes.weights": False,
    "type_float_odd.weights": False,
    "zip_config_deep": True,
    "zip_config_json": True,
    "zip_config_lambda": False,
    "zip_inflates": False,
}


def natural(name: str) -> list[Any]:
    """Return the key of a path among the others of a file."""
    return [
        [
            (int(text), text) if text.isdecimal() else (-1, text)
            for text in re.split("([0-9]+)", part)
        ]
        for part in name.split("/")
    ]


def hdf5(tensors: Mapping[str, Any], **options: Any) -> bytes:
    """Write datasets; a tuple has an array and keywords of h5py."""
    file = io.BytesIO()
    with h5py.File(file, "w", **options) as root:
        root.attrs["keras_version"] = "3.15.1"
        for name, values in tensors.items():
            array, keywords = values if isinstance(values, tuple) else (values, {})
            dataset = root.create_dataset(name, data=array, **keywords)
            dataset.parent.attrs["name"] = "first"
    return file.getvalue()


def archive(weights: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Write a model around its weights."""
    layer = {"class_name": "Dense", "config": {"name": "first", "units": 2}}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as writer:
        writer.writestr("metadata.json", json.dumps({"keras_version": "3.15.1"}))
        writer.writestr(
            "config.json", json.dumps({"class_name": "M", "config": {"layers": [layer]}})
        )
        writer.writestr("model.weights.h5", weights)
    return file.getvalue()


class Keras(Declared):
    def good(self) -> list[Any]:
        patterns = ("*.h5", "*.hdf5", "*.keras", "sharded/*.json")
        return [path for pattern in patterns for path in golden_files(f"keras/{pattern}")]

    def expected(self, path: Path) -> Expected:
        stem = path.name.partition(".")[0]
        beside = (
            path.parent.with_name("sharded")
            if path.parent.name == "sharded"
            else path.parent / stem
        )
        document = golden_json(beside)
        values = beside.with_name(f"{beside.name}.expected.npz")
        arrays = arrays_in(values) if values.exists() else {}
        tensors: dict[str, Want] = {}
        stored = {}
        for tensor in document["tensors"]:
            name = tensor["name"]
            array = arrays[tensor.get("f32_npz", tensor["npz"])]
            attrs = {"layer": tensor["layer_name"]} if tensor.get("layer_name") else {}
            array = array.astype(array.dtype.newbyteorder("="))
            tensors[name] = Want(array, attrs=attrs)
            bits = arrays[tensor["npz"]]
            stored[name] = bits.astype(bits.dtype.newbyteorder("=")).tobytes()
        tensors |= {entry["name"]: Want(None) for entry in document.get("unreadable", ())}
        ordered = {name: tensors[name] for name in sorted(tensors, key=natural)}
        return Expected(ordered, stored)

    def bad(self) -> list[Any]:
        files = golden_files("keras/bad/INDEX.json")
        return [
            path.with_name(entry["file"])
            for path in files
            for entry in json.loads(path.read_text("utf-8")).values()
        ]

    def verdict(self, path: Path) -> Bad:
        index = json.loads(path.with_name("INDEX.json").read_text("utf-8"))
        return Bad(
            path, next(entry["when"] for entry in index.values() if entry["file"] == path.name)
        )

    def small(self) -> dict[str, bytes]:
        arrays = small_dataset()
        plain = {
            f"layers/dense/vars/{n}": v.values for n, v in enumerate(arrays.data_vars.values())
        }
        packed: dict[str, Any] = {"chunks": (2, 2), "shuffle": True, "fletcher32": True}
        chunked = {"w": (plain["layers/dense/vars/0"], packed | {"compression": "gzip"})}
        chunked["v"] = (np.arange(6.0), {"chunks": (4,), "compression": "lzf"})
        weights = hdf5(plain)
        return {
            "weights": weights,
            "model": archive(weights),
            "deflated": archive(weights, zipfile.ZIP_DEFLATED),
            "chunked": hdf5(chunked),
            "newest": hdf5(plain, libver="latest"),
        }

    def large(self, path: Path) -> None:
        arrays: dict[str, Any] = {
            str(name): v.values for name, v in small_dataset().data_vars.items()
        }
        path.write_bytes(hdf5(arrays | {"large": LARGE, "more": -LARGE}))


DECLARED = Keras(name="keras", is_shared=True, tolerated=TOLERATED)
