"""Random files of every format as other programs write them, with names that collide.

A file is a mapping of names in a folder to their content; tests open the first one.
"""

from __future__ import annotations

import json
from hashlib import shake_128
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard
from hypothesis import strategies as st

from tests.formats import burnpack_files, gptrs_files, mlcp_files, primitiv_files
from tests.formats.safetensors_files import safetensors_file
from tests.formats.ztensor_files import Stored, stored, v0_file, v1_file, v2_file, v12_file
from xckpt.formats.safetensors import Safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Files = dict[str, bytes]

# Of parts beside tensors, of modules, of layers, and what axes could be called.
NAMES = st.sampled_from(
    [
        "w",
        "w:data",
        "w:scales",
        "w:scales:",
        "w:values",
        "w:scalar",
        "w:scalar:scalar",
        "batch",
        "d2",
        "d3_1",
        "a.b",
        "a.b.c",
        "fc.weight",
        "fc.bias",
        "norm.gamma",
        "norm.beta",
        "layers.0.w",
        "layers.1.w",
        "layers.1.w:scales",
        "layers.0.w:data",
    ]
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 2, 3, 3, 4]), max_size=3).map(tuple)
AXES = st.sampled_from([None, "batch", "d2", "x", "w"])


@st.composite
def _axes_text(draw: st.DrawFn, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Name some axes, as this package does."""
    axes = {
        name: draw(st.tuples(*[AXES] * len(shape)))
        for name, shape in shapes.items()
        if draw(st.booleans())
    }
    return json.dumps(axes) if axes else None


def _noise(nbytes: int, seed: int) -> bytes:
    return shake_128(bytes([seed % 256])).digest(nbytes)


@st.composite
def _bytes_of(draw: st.DrawFn, dtype: str, count: int) -> bytes:
    """Draw the bytes of values of an element type; only booleans cannot be any bytes."""
    data = np.frombuffer(_noise(count * np.dtype(dtype).itemsize, draw(st.integers(0, 9))), "u1")
    return (data & 1 if dtype == "bool" else data).tobytes()


# --- Burnpack -------------------------------------------------------------------------------------

_BURN_WIDTHS = {
    "F64": 8,
    "F32": 4,
    "Flex32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
}
_BURN_SCALARS = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1).map(lambda value: {"Int": value}),
    st.integers(0, (1 << 64) - 1).map(lambda value: {"UInt": value}),
    st.floats().map(lambda value: {"Float": value}),
    st.booleans().map(lambda value: {"Bool": value}),
)
_SCALE_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "UE8M0": 1, "UE4M3": 1}


@st.composite
def _quantized(draw: st.DrawFn) -> dict[str, Any]:
    """Make a quantised tensor of either dialect, also of schemes that burn does not split."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 9]), min_size=1, max_size=3).map(tuple))
    value = draw(st.sampled_from(["Q8S", "Q8S", "Q4S", "Q4F", "Q2F", "E4M3", "E2M1"]))
    bits = {"Q8S": 8, "Q4S": 4, "Q4F": 4, "Q2F": 2, "E4M3": 8, "E2M1": 4}[value]
    store: Any = draw(st.sampled_from(["Native", "PackedU32", "PackedU32", "PackedNative"]))
    count = prod(shape)
    if store != "Native":
        axis = draw(st.integers(0, min(1, len(shape) - 1)))
        word = 4 if store == "PackedU32" else 1
        count = count // shape[-1 - axis] * -(-shape[-1 - axis] * bits // (8 * word)) * word
        store = {store: axis}
    scale = draw(st.sampled_from(sorted(_SCALE_WIDTHS)))
    block = draw(st.none() | st.tuples(*[st.sampled_from([1, 2, 4])] * len(shape)))
    scales = 1
    fields: dict[str, Any] = {"tensor": scale, "block": None}
    size: dict[str, Any] | None = None
    if block is not None:
        size = {"storage": [*block, *[1] * (5 - len(block))], "len": len(block)}
        scales = prod(-(-n // b) for n, b in zip(shape, block, strict=True))
        fields = {"tensor": None, "block": {"size": size, "dtype": scale}}
    mode = draw(st.sampled_from(["Symmetric"] * 5 + ["Lookup"]))
    if draw(st.booleans()):
        fields = {"param": scale, "level": "Tensor" if size is None else {"Block": size}}
        mode = "Symmetric"
    data = _noise(count + scales * _SCALE_WIDTHS[scale], draw(st.integers(0, 9)))
    scheme = {"value": value, "store": store, "mode": mode, **fields}
    return burnpack_files.quantized(shape, data, scheme)


@st.composite
def _burnpack(draw: st.DrawFn) -> Files:
    tensors: dict[str, Any] = {}
    for name in draw(st.lists(NAMES, max_size=6, unique=True)):
        kind = draw(st.sampled_from([*_BURN_WIDTHS, "Bool", "quantized", "quantized", "quantized"]))
        if kind == "quantized":
            tensors[name] = draw(_quantized())
        else:
            shape = draw(SHAPES)
            dtype = {"Bool": draw(st.sampled_from(["Native", "U8"]))} if kind == "Bool" else kind
            width = _BURN_WIDTHS.get(kind, 1)
            data = draw(_bytes_of("bool" if kind == "Bool" else "u1", width * prod(shape)))
            tensors[name] = burnpack_files.raw(dtype, shape, data)
        if draw(st.booleans()):
            tensors[name]["param_id"] = draw(st.integers(0, (1 << 64) - 1))
    text = draw(_axes_text({name: tuple(entry["shape"]) for name, entry in tensors.items()}))
    return {
        "m.bpk": burnpack_files.burnpack(
            tensors,
            legacy=draw(st.booleans()),
            metadata={"format": "burnpack"} | ({} if text is None else {"xckpt.dims": text}),
            scalars=draw(st.dictionaries(NAMES, _BURN_SCALARS, max_size=4)),
        )
    }


# --- gpt.rs ---------------------------------------------------------------------------------------


@st.composite
def _gptrs(draw: st.DrawFn) -> Files:
    records: list[gptrs_files.Record] = []
    shapes = {}
    for name in draw(st.lists(NAMES, max_size=6, unique=True)):
        shape = shapes[name] = draw(SHAPES)
        tag = draw(st.sampled_from([0, 3]))
        stored_id = gptrs_files.id_bytes(name)
        data = _noise(4 * prod(shape), len(records))
        flag = draw(st.integers(0, 1))
        records.append(gptrs_files.Record(name, shape, data, tag, flag, stored_id))
    writer = draw(st.sampled_from(sorted(gptrs_files.WRITERS)))
    if writer != "checkpoint 2":
        return {"m.gptrs": gptrs_files.WRITERS[writer](records)}
    text = draw(_axes_text(shapes))
    config = gptrs_files.tagged("custom", {}, **({} if text is None else {"xckpt.dims": text}))
    return {"m.gptrs": gptrs_files.indexed_file(records, config)}


# --- MLCP -----------------------------------------------------------------------------------------


@st.composite
def _mlcp(draw: st.DrawFn) -> Files:
    shards = []
    shapes = {}
    for _ in range(draw(st.integers(1, 3))):
        tensors = []
        for name in draw(st.lists(NAMES, max_size=4, unique=True)):
            shape = shapes[name] = draw(SHAPES)
            dtype = draw(st.sampled_from(sorted(mlcp_files.NUMBERS)))
            numpy = mlcp_files.NUMPY[dtype].replace("bfloat16", "u2")
            data = draw(_bytes_of(numpy, prod(shape)))
            tensors.append(mlcp_files.Tensor(name, shape, data, dtype))
        shards.append(tensors)
    text = draw(_axes_text(shapes))
    custom = {"by": "test"} | ({} if text is None else {"xckpt.dims": text})
    payload = draw(st.sampled_from(["tail", "inline", "per_shard", "files"]))
    if payload != "files":
        custom |= {"payload": payload}
        return {"m.checkpoint": mlcp_files.checkpoint(shards, payload, customFields=custom)}
    fields = mlcp_files.fields(shards, customFields=custom)
    files = {"m.metadata.json": json.dumps(fields).encode()}
    files |= {
        f"m_shard_{rank}.shard": mlcp_files.shard_file(tensors, rank)
        for rank, tensors in enumerate(shards)
    }
    return files


# --- primitiv -------------------------------------------------------------------------------------

_KEYS = st.sampled_from(
    [
        ("w",),
        ("batch",),
        ("d2",),
        ("w:s",),
        ("a", "b"),
        ("a.b",),
        ("a", "batch"),
        ("fc", "w"),
        ("fc", "b"),
        ("layers", "0", "w"),
        ("layers", "1", "w"),
        ("layers", "2", "w"),
        ("batch", "batch"),
    ]
)
_STATS = st.sampled_from(["s", "Adam.m2", "Adam.m1", "batch", ":"])
_DIMS = st.lists(st.integers(1, 4), max_size=3)


@st.composite
def _primitiv_tensor(draw: st.DrawFn, *, most: int = 4) -> bytes:
    dims, batch = draw(_DIMS), draw(st.integers(1, most))
    data = _noise(4 * prod(dims) * batch, draw(st.integers(0, 9)))
    return primitiv_files.shape(dims, batch) + primitiv_files.binary(data)


@st.composite
def _parameter(draw: st.DrawFn) -> bytes:
    stats = draw(st.dictionaries(_STATS, _primitiv_tensor(), max_size=3))
    return primitiv_files.parameter(draw(_primitiv_tensor(most=1)), *stats.items())


@st.composite
def _primitiv(draw: st.DrawFn) -> Files:
    kind = draw(st.sampled_from(["Model"] * 6 + ["Parameter", "Tensor", "Optimizer"]))
    if kind == "Tensor":
        content, code = draw(_primitiv_tensor()), primitiv_files.TENSOR
    elif kind == "Parameter":
        content, code = draw(_parameter()), primitiv_files.PARAMETER
    elif kind == "Optimizer":
        integers = draw(st.dictionaries(_STATS, st.integers(0, (1 << 32) - 1)))
        floats = draw(st.dictionaries(_STATS, st.floats(width=32, allow_nan=False)))
        content = primitiv_files.optimizer(integers.items(), floats.items())
        code = primitiv_files.OPTIMIZER
    else:
        parameters: dict[tuple[str, ...], bytes] = {}
        for key in draw(st.lists(_KEYS, max_size=6, unique=True)):
            if not any(a[: len(b)] == b for k in parameters for a, b in [(k, key), (key, k)]):
                parameters[key] = draw(_parameter())
        content, code = primitiv_files.model(*parameters.items()), primitiv_files.MODEL
    return {"m.primitiv": primitiv_files.file(code, content)}


# --- safetensors ----------------------------------------------------------------------------------

_SAFE_CODES = Safetensors.types
_SAFE_WIDTHS = {code: 1 for code in _SAFE_CODES if code[1] == "8" or code.startswith("F8")} | {
    code: int(code.lstrip("BIUFC")) // 8 for code in _SAFE_CODES if code[-2:] in {"16", "32", "64"}
}


@st.composite
def _safetensors(draw: st.DrawFn) -> Files:
    shapes = draw(st.dictionaries(NAMES, SHAPES, max_size=6))
    header: dict[str, Any] = {}
    data = b""
    for name, shape in shapes.items():
        code = draw(st.sampled_from(sorted(_SAFE_WIDTHS)))
        nbytes = _SAFE_WIDTHS[code] * prod(shape)
        offsets = [len(data), len(data) + nbytes]
        data += _noise(nbytes, len(data))
        header[name] = {"dtype": code, "shape": shape, "data_offsets": offsets}
    text = draw(_axes_text(shapes))
    metadata = {"format": "pt"} | ({} if text is None else {"xckpt.dims": text})
    return {"m.safetensors": safetensors_file({"__metadata__": metadata, **header}, data)}


# --- zTensor --------------------------------------------------------------------------------------

_ZT_WIDTHS = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i8": 1, "u16": 2, "u32": 4}
_LONG = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}
_AWQ: dict[str, Any] = {
    "bits": 4,
    "group_size": 8,
    "axis": 1,
    "packing": {"word": "u32", "order": "lsb_first", "per_word": 8},
    "scale_form": "f16_factors",
    "zero_point": {"form": "none"},
}
_ATTRS = st.sampled_from([{}, {"note": "x", "list": [1, {"a": None}]}])


@st.composite
def _compressed(draw: st.DrawFn, data: bytes, version: str) -> Stored:
    if version == "2" or draw(st.booleans()):
        return stored(data)
    fields = {"encoding": "zstd"}
    if version != "1.0":
        fields["uncompressed_length"] = len(data)  # type: ignore[assignment]  # of any type
    return stored(zstandard.ZstdCompressor().compress(data), **fields)


@st.composite
def _ztensor_object(draw: st.DrawFn, version: str) -> dict[str, Any]:
    """Make an object of versions 1 and 2: dense, sparse, quantised, or of an unknown layout."""
    layouts = ["dense", "dense", "sparse_csr", "sparse_coo", "odd"]
    layout = draw(st.sampled_from([*layouts, *(["group"] * 3 if version == "2" else [])]))
    spelled = draw(st.sampled_from(sorted(_ZT_WIDTHS)))
    width = _ZT_WIDTHS[spelled]
    seed = draw(st.integers(0, 9))
    parts: dict[str, tuple[bytes, str]]
    attrs = dict(draw(_ATTRS))
    shape: tuple[int, ...] = (3, 4)
    index = "u64" if version == "1.0" else draw(st.sampled_from(["u32", "u64"]))
    wide = np.dtype({"u32": "<u4", "u64": "<u8"}[index])
    if layout == "dense":
        shape = draw(SHAPES)
        parts = {"data": (_noise(width * prod(shape), seed), spelled)}
    elif layout == "sparse_csr":
        parts = {
            "values": (_noise(2 * width, seed), spelled),
            "indices": (np.array([1, 3], wide).tobytes(), index),
            "indptr": (np.array([0, 1, 1, 2], wide).tobytes(), index),
        }
    elif layout == "sparse_coo":
        parts = {
            "values": (_noise(2 * width, seed), spelled),
            "coords": (np.array([0, 2, 1, 3], wide).tobytes(), index),
        }
    elif layout == "group":
        shape = (4, 16)
        parts = {"data": (_noise(32, seed), "u32"), "scales": (_noise(16, seed), "f16")}
        attrs |= _AWQ
    else:
        parts = {"data": (_noise(8, seed), "u8"), "b:scales": (_noise(3, seed), "u8")}
    names = {
        "dense": "dense",
        "sparse_csr": "zt.sparse_csr/1" if version == "2" else layout,
        "sparse_coo": "zt.sparse_coo/1" if version == "2" else layout,
        "group": "zt.quant_group/1",
        "odd": "other.odd/1",
    }
    written = {role: draw(_compressed(data, version)) for role, (data, _) in parts.items()}
    head: dict[str, Any] = {"shape": list(shape)}
    if attrs:
        head["attributes"] = attrs
    if version == "1.0":
        values = "values" if "values" in parts else "data"
        kind = parts[values][1].rstrip("0123456789")
        dtype = _LONG[kind] + parts[values][1].removeprefix(kind)
        return head | {"dtype": dtype, "format": names[layout], "components": written}
    for role, (_, dtype) in parts.items():
        written[role].fields["dtype"] = dtype
    if version == "1.2":
        return head | {"format": names[layout], "components": written}
    return head | {"layout": names[layout], "parts": written}


@st.composite
def _ztensor(draw: st.DrawFn) -> Files:
    version = draw(st.sampled_from(["0", "1.0", "1.2", "2"]))
    names = draw(st.lists(NAMES, max_size=6, unique=True))
    if version == "0":
        entries: list[dict[str, Any]] = []
        for name in names:
            shape = draw(SHAPES)
            data = _noise(4 * prod(shape), len(entries))
            entry = {"name": name, "dtype": "float32", "shape": list(shape), "layout": "dense"}
            order = draw(st.sampled_from(["little", "big"]))
            entries.append(entry | {"data": stored(data), "data_endianness": order})
        return {"m.zt": v0_file(*entries)}
    objects = {name: draw(_ztensor_object(version)) for name in names}
    text = draw(_axes_text({name: tuple(obj["shape"]) for name, obj in objects.items()}))
    attrs = {"licence": "MIT"} | ({} if text is None else {"xckpt.dims": text})
    write: dict[str, Callable[..., bytes]] = {"1.0": v1_file, "1.2": v12_file, "2": v2_file}
    return {"m.zt": write[version](objects, attributes=attrs)}


#: By format.
FILES: dict[str, st.SearchStrategy[Files]] = {
    "burnpack": _burnpack(),
    "gptrs": _gptrs(),
    "mlcp": _mlcp(),
    "primitiv": _primitiv(),
    "safetensors": _safetensors(),
    "ztensor": _ztensor(),
}
