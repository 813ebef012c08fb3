"""Files that this package plans, read by the reference implementations of both versions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.formats.indexes import coo, csr, dense, draft_of, filled
from tests.formats.planned import materialize
from xckpt import formats
from xckpt.elements import stored_dtype
from xckpt.formats.ztensor.manifest import LONG, SHORT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xckpt.formats.plan import Draft, WantedTensor

ours = formats.get("ztensor")
ztensor = pytest.importorskip("ztensor", reason="the reference implementation is not installed")

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7, 5), (0, 4), (2, 1, 3))

# The last release that reads version 1.0, and what it needs beside what is installed.
OLD_RELEASE = ["ztensor==1.0.1", "cffi", "pycparser"]

READ_OLD = """
import json, sys
from ztensor import Reader

ROLES = {"sparse_csr": ["values", "indices", "indptr"], "sparse_coo": ["values", "coords"]}
found = {}
with Reader(sys.argv[1]) as reader:
    for name in reader.tensor_names:
        meta = reader.metadata(name)
        if meta.layout == "dense":
            parts = {"data": reader.read_tensor(name).tobytes().hex()}
        else:
            parts = {}
            for role in ROLES[meta.layout]:
                array, memory = reader._read_component(name, role, lambda: "u1")
                parts[role] = array.tobytes().hex()
        found[name] = [meta.dtype_str, list(meta.shape), meta.layout, parts]
print(json.dumps(found))
"""


def all_of(dtypes: Iterable[str], **fields: Any) -> list[WantedTensor]:
    return [
        dense(f"{dtype}/{'x'.join(map(str, shape))}", dtype, shape, **fields)
        for dtype in dtypes
        for shape in SHAPES
    ]


def written(tmp_path: Path, index: Draft, **options: Any) -> str:
    path = tmp_path / "m.zt"
    path.write_bytes(materialize(ours.plan(index, **options), contents(index)))
    return str(path)


def contents(index: Draft) -> dict[tuple[str, str], bytes]:
    """Fill parts, with booleans and packed elements that the reference accepts."""
    data = filled(index)
    for name, tensor in index.tensors.items():
        if tensor.dtype == "bool":
            data[name, "data"] = bytes(byte & 1 for byte in data[name, "data"])
        if tensor.dtype == "float4_e2m1fn" and tensor.size % 2:
            data[name, "data"] = data[name, "data"][:-1] + b"\7"
    return data


def sparse(index_type: str) -> list[WantedTensor]:
    return [
        csr("csr", "float32", (2, 9), 3, index_type),
        csr("csr.empty", "int8", (4, 3), 0, index_type),
        coo("coo", "bfloat16", (3, 4, 5), 2, index_type),
    ]


SPARSE: dict[tuple[str, str], list[list[int]]] = {
    ("csr", "indices"): [[0, 8, 1]],
    ("csr", "indptr"): [[0, 2, 3]],
    ("csr.empty", "indices"): [[]],
    ("csr.empty", "indptr"): [[0] * 5],
    ("coo", "coords"): [[0, 2], [3, 3], [1, 4]],
}


def with_indices(index: Draft, data: dict[tuple[str, str], bytes]) -> None:
    for (name, role), rows in SPARSE.items():
        dtype = stored_dtype(index.tensors[name].parts[role].dtype)
        data[name, role] = np.array(rows, dtype).tobytes()


@pytest.mark.parametrize("alignment", [None, 4096])
@pytest.mark.parametrize("encoding", [None, "zstd"])
def test_the_maintained_reader_reads_version_2(
    tmp_path: Path, encoding: str | None, alignment: int | None
) -> None:
    tensors = [
        *all_of(ours.can.types, compression=encoding),
        *sparse("uint32"),
        dense("Ünïcode 名", algorithm="sha256", dims=("a", None), attrs={"k": [1, None, 0.5]}),
    ]
    index = draft_of(*tensors, epoch=3, note="ünï", nested={"κ": [1.5, True]})
    data = contents(index)
    with_indices(index, data)
    path = tmp_path / "m.zt"
    path.write_bytes(materialize(ours.plan(index, version="2", alignment=alignment), data))
    assert ztensor.verify(str(path)).undigested == 0
    source = ztensor.open(str(path))
    assert set(source) == set(index.tensors)
    assert source.attributes == {**index.attrs, "xckpt.dims": '{"Ünïcode 名":["a",null]}'}
    for name, tensor in index.tensors.items():
        values = source[name]
        assert tuple(values.shape) == tensor.shape
        for role in tensor.parts:
            assert values[role].tobytes() == data[name, role]


def test_version_2_equals_what_the_maintained_writer_makes(tmp_path: Path) -> None:
    shapes = ((7, 5), (), (0, 4), (3, 0), (40, 50, 9))
    dtypes = ("f64", "f32", "f16", "bf16", "i64", "i8", "u16")
    names = {spelled: SHORT[spelled] for spelled in dtypes}
    index = draft_of(
        *(dense(f"{at}é{d}", names[d], shape) for d in dtypes for at, shape in enumerate(shapes)),
        a=1.5,
        l=[1, "x", None],
        m={"q": True},
    )
    data = filled(index)
    path = tmp_path / "theirs.zt"
    with ztensor.Writer(str(path)) as writer:
        for name in sorted(index.tensors):
            tensor = index.tensors[name]
            spelled = next(spelled for spelled in dtypes if names[spelled] == tensor.dtype)
            writer.add(name, data[name, "data"], list(tensor.shape), spelled)
        writer.set_attributes(dict(index.attrs))
    assert materialize(ours.plan(index, version="2"), data) == path.read_bytes()


def test_the_maintained_reader_reads_a_new_generation(tmp_path: Path) -> None:
    old, more = draft_of(dense("a"), epoch=1), draft_of(dense("b", "float8_e5m2"), epoch=2)
    path = Path(written(tmp_path, old, version="2"))
    file = path.read_bytes()
    plan = ours.append(_Bytes(file), more)
    path.write_bytes(materialize(plan, filled(more), file))
    source = ztensor.open(str(path))
    assert {name: source[name]["data"].tobytes() for name in source} == {
        name: data for (name, _), data in (filled(old) | filled(more)).items()
    }
    assert source.attributes == {"epoch": 2}


class _Bytes:
    name = "m.zt"

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def read(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self._data)[offset : offset + nbytes]

    def sibling(self, name: str) -> _Bytes:
        raise FileNotFoundError(name)

    def folders(self) -> tuple[str, ...]:
        return ()


@pytest.fixture(scope="session")
def old_release(pytestconfig: pytest.Config) -> Path:
    """Return a folder with the old release, installed once, or skip."""
    if pytestconfig.cache is None:
        pytest.skip("there is no cache to install the old release of ztensor into")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = pytestconfig.cache.mkdir("ztensor-1.0.1") / python
    if not folder.is_dir():
        # Of several processes that install it, one is the first to rename.
        begun = folder.with_name(f"{python}.{os.getpid()}")
        _install(begun)
        with suppress(OSError):
            begun.rename(folder)
        shutil.rmtree(begun, ignore_errors=True)
    return folder


def _install(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries=1", "--no-deps"]
    try:
        run([*pip, f"--target={folder}", *OLD_RELEASE], timeout=120)
    except subprocess.SubprocessError as error:
        shutil.rmtree(folder, ignore_errors=True)
        reason = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"ztensor 1.0.1 cannot be installed: {reason.strip()}")


def run(command: list[str], timeout: float) -> str:
    done = subprocess.run(  # noqa: S603  nothing but our own text
        command, capture_output=True, text=True, check=True, timeout=timeout
    )
    return done.stdout


def read_old(release: Path, path: str) -> dict[str, Any]:
    script = f"import sys; sys.path.insert(0, {str(release)!r})\n{READ_OLD}"
    document: dict[str, Any] = json.loads(run([sys.executable, "-c", script, path], timeout=60))
    return document


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"compression": "zstd"},
        {"algorithm": "crc32c"},
        {"compression": "zstd", "algorithm": "crc32c"},
    ],
    ids=str,
)
def test_the_release_of_version_1_reads_it(
    tmp_path: Path, old_release: Path, fields: dict[str, Any]
) -> None:
    tensors = [
        *all_of(LONG, **fields),
        *sparse("uint64"),
        dense("Ünïcode 名", dims=("a", None), attrs={"k": [1, None, 0.5]}),
    ]
    index = draft_of(*tensors, license="MIT")
    data = contents(index)
    with_indices(index, data)
    path = tmp_path / "m.zt"
    path.write_bytes(materialize(ours.plan(index), data))
    assert read_old(old_release, str(path)) == _expected(index, data)


def test_the_release_of_version_1_reads_what_was_added(tmp_path: Path, old_release: Path) -> None:
    old, more = draft_of(dense("a")), draft_of(dense("b", "int64", dims=("x", None)))
    path = Path(written(tmp_path, old))
    file = path.read_bytes()
    path.write_bytes(materialize(ours.append(_Bytes(file), more), filled(more), file))
    index = draft_of(*old.tensors.values(), *more.tensors.values())
    assert read_old(old_release, str(path)) == _expected(index, filled(index))


def _expected(index: Draft, data: dict[tuple[str, str], bytes]) -> dict[str, Any]:
    return {
        name: [
            tensor.dtype,
            list(tensor.shape),
            tensor.layout,
            {role: data[name, role].hex() for role in tensor.parts},
        ]
        for name, tensor in index.tensors.items()
    }
