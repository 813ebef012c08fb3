"""Files that PyTorch writes, and hostile ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from tests.contracts.declared import (
    Bad,
    Declared,
    Expected,
    Want,
    golden_arrays,
    golden_json,
    large_dataset,
    widened,
)
from tests.formats import torch_files as files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Names of the types that have several values in a byte, or no type in numpy.
PACKED = "float4_e2m1fn_x2"
HALVES = {"complex32", "bcomplex32"}


class Torch(Declared):
    def good(self) -> list[Any]:
        return [path for path in super().good() if path.parent.name != "dcp_zstd"]

    def expected(self, path: Path) -> Expected:
        golden = path if path.name != ".metadata" else path.parent
        expected, arrays = golden_json(golden), golden_arrays(golden)
        tensors: dict[str, Want] = {}
        stored: dict[str, bytes] = {}
        listed = expected["tensors"]
        for tensor in listed if len(listed) < 100 else listed[::20]:
            name = tensor["name"]
            if name in tensors or f"{name}:data" in tensors:
                name = f"{name}#2"
            layout = tensor.get("layout", "dense")
            if layout == "dense":
                tensors |= _dense(name, tensor, arrays)
                stored |= _stored(name, tensor, arrays)
            elif layout == "meta":
                tensors[name] = Want(None)
            else:
                tensors |= _composite(name, layout, tensor, arrays)
        warns = path.stem == "huge_metadata"
        return Expected(tensors, stored, warns=warns, complete=False)

    def bad(self) -> list[Any]:
        return [path for path in super().bad() if path.suffix not in {".json", ".txt"}]

    def verdict(self, path: Path) -> Bad:
        golden = path if path.name != ".metadata" else path.parent
        failure = golden_json(golden.with_name("index"), ".json")[golden.name]["when"]
        return Bad(path, failure.replace("read:any", "read:"))

    def small(self) -> dict[str, bytes]:
        arrays = {"w": np.ones((2, 3), "f4"), "n": np.arange(4, dtype="i8")}
        views = {
            "rows": files.view(files.storage("0", 6), 3, (1, 3), (3, 1)),
            "columns": files.view(files.storage("0", 6), 1, (2, 2), (3, 1)),
        }
        return {
            "archive": files.archive(files.mapping(views), {"0": arrays["w"].tobytes()}),
            "legacy": files.legacy(arrays),
        }

    def large(self, path: Path) -> None:
        arrays = {str(name): variable.values for name, variable in large_dataset().items()}
        path.write_bytes(files.checkpoint(arrays))

    def hostile(self) -> Mapping[str, st.SearchStrategy[list[bytes]]]:
        opcodes = st.sampled_from([bytes((code,)) for code in range(256)])
        words = st.sampled_from(
            [
                files.text("storage"),
                files.number(3),
                files.name("torch._utils", "_rebuild_tensor_v2"),
                files.name("collections", "OrderedDict"),
                files.storage("0", 6),
                files.view(files.storage("0", 6), 0, (2, 3), (3, 1)),
                *(b"(", b"t", b"R", b"}", b"]", b"u", b"e", b"b", b"q\1", b"h\1", b"Q", b"2"),
            ]
        )
        value = st.lists(words | words | opcodes, max_size=30).map(b"".join)
        return {
            "archive": value.map(lambda pickled: [files.archive(pickled, {"0": bytes(24)})]),
            "legacy": value.map(lambda pickled: [files.MAGIC + files.pickled(pickled) * 4]),
        }


def _values(values: Any, tensor: dict[str, Any], arrays: Mapping[str, Any]) -> Any:
    """Return what stored values are decoded."""
    if tensor.get("f32"):
        return arrays[tensor["f32"]]
    dtype = tensor["dtype"]
    return widened(values) if dtype == "bfloat16" else values


def _dense(name: str, tensor: dict[str, Any], arrays: Mapping[str, Any]) -> dict[str, Want]:
    dtype, values = tensor["dtype"], arrays[tensor["key"]]
    if dtype in HALVES:
        return {}
    attrs = {key: True for key in ("requires_grad", "parameter") if tensor.get(key)}
    encoding = {"layout": "chunked"} if len(tensor.get("chunks", ())) > 2 else {}
    if dtype == PACKED:
        return {}
    if dtype.startswith("float8") and "f32" not in tensor:
        return {}
    # NaN of float8 have no payloads that count.
    exact = not dtype.startswith("float8")
    return {name: Want(_values(values, tensor, arrays), encoding, attrs, exact)}


def _stored(name: str, tensor: dict[str, Any], arrays: Mapping[str, Any]) -> dict[str, bytes]:
    dtype, values = tensor["dtype"], arrays[tensor["key"]]
    if dtype in HALVES:
        halves = np.ascontiguousarray(values).view("u2").reshape(*values.shape, 2)
        return {
            f"{name}:{role}": halves[..., at].tobytes() for at, role in enumerate(("real", "imag"))
        }
    if dtype == PACKED:
        codes = np.stack([values & 0xF, values >> 4], -1)
        return {name: codes.astype("u1").tobytes()}
    return {name: np.ascontiguousarray(values).tobytes()}


def _composite(
    name: str, layout: str, tensor: dict[str, Any], arrays: Mapping[str, Any]
) -> dict[str, Want]:
    """Return the whole tensor where there is one, else its parts."""
    is_matrix = layout in {"sparse_csr", "sparse_csc"} and len(tensor["shape"]) == 2
    parts = tensor["parts"]
    is_whole = layout in {"quantized", "sparse_coo", "sparse_bsr", "sparse_bsc"} or is_matrix
    if is_whole:
        values = arrays[tensor["dense"]]
        values = widened(values) if tensor["dtype"] == "bfloat16" else values
        return {name: Want(values, exact=False)}
    parts_by_role = {role: arrays[part["key"]] for role, part in parts.items() if part.get("key")}
    return {f"{name}:{role}": Want(values) for role, values in parts_by_role.items()}


DECLARED = Torch(
    name="torch",
    may_be_cut=True,  # the chain of pickles before version 1.6
    good_patterns=["*.pt", "*.pth", "*.ckpt", "*.bin", "dcp_*/.metadata"],
    bad_patterns=["bad/*.p*", "bad/*.docx", "bad/*.npz", "bad/dcp_*/.metadata"],
)
