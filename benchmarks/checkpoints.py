"""Checkpoints of real sizes for benchmarks; their data are holes, so they take no disk."""

from __future__ import annotations

import json
import struct
from math import prod
from typing import TYPE_CHECKING
from zlib import crc32

import blake3
import cbor2
import msgpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

__all__ = ["FAMILIES", "WRITERS", "gpt", "mixture_of_experts", "resnet", "write_ztensor"]

Shapes = dict[str, list[int]]


def mixture_of_experts(layers: int = 61, experts: int = 256) -> Iterator[tuple[str, list[int]]]:
    """Return the names and shapes of tensors of a model like DeepSeek-V3.

    The first three layers are dense, the others mixtures of experts; weights are 8-bit floats
    with a scale for each block of 128 x 128.
    """
    hidden, dense, moe = 7168, 18432, 2048
    yield "model.embed_tokens.weight", [129280, hidden]
    for layer in range(layers):
        base = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{base}.{norm}.weight", [hidden]
        attention = {
            "q_a_proj": [1536, hidden],
            "q_b_proj": [24576, 1536],
            "kv_a_proj_with_mqa": [576, hidden],
            "kv_b_proj": [32768, 512],
            "o_proj": [hidden, 16384],
        }
        for name, shape in attention.items():
            yield from _scaled(f"{base}.self_attn.{name}", shape)
        yield f"{base}.self_attn.q_a_layernorm.weight", [1536]
        yield f"{base}.self_attn.kv_a_layernorm.weight", [512]
        if layer < 3:
            yield from _mlp(f"{base}.mlp", hidden, dense)
            continue
        yield f"{base}.mlp.gate.weight", [experts, hidden]
        yield f"{base}.mlp.gate.e_score_correction_bias", [experts]
        for expert in range(experts):
            yield from _mlp(f"{base}.mlp.experts.{expert}", hidden, moe)
        yield from _mlp(f"{base}.mlp.shared_experts", hidden, moe)
    yield "model.norm.weight", [hidden]
    yield "lm_head.weight", [129280, hidden]


def gpt(layers: int = 48, width: int = 1600) -> Iterator[tuple[str, list[int]]]:
    """Return the names and shapes of tensors of a model like GPT-2, whose layers are equal."""
    yield "wte.weight", [50257, width]
    yield "wpe.weight", [1024, width]
    for layer in range(layers):
        for name, shape in {
            "ln_1": [width],
            "attn.c_attn": [width, 3 * width],
            "attn.c_proj": [width, width],
            "ln_2": [width],
            "mlp.c_fc": [width, 4 * width],
            "mlp.c_proj": [4 * width, width],
        }.items():
            yield f"h.{layer}.{name}.weight", shape
            yield f"h.{layer}.{name}.bias", shape[-1:]
    yield "ln_f.weight", [width]
    yield "ln_f.bias", [width]


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3)) -> Iterator[tuple[str, list[int]]]:
    """Return the names and shapes of tensors of a model like ResNet-50.

    The first block of each stage differs from the others.
    """
    yield "conv1.weight", [64, 3, 7, 7]
    yield from _batch_norm("bn1", 64)
    channels = 64
    for stage, count in enumerate(blocks, 1):
        width = 32 * 2**stage
        for block in range(count):
            base = f"layer{stage}.{block}"
            for name, shape in {
                "conv1": [width, channels, 1, 1],
                "conv2": [width, width, 3, 3],
                "conv3": [4 * width, width, 1, 1],
            }.items():
                yield f"{base}.{name}.weight", shape
                yield from _batch_norm(f"{base}.bn{name[-1]}", shape[0])
            if block == 0:
                yield f"{base}.downsample.0.weight", [4 * width, channels, 1, 1]
                yield from _batch_norm(f"{base}.downsample.1", 4 * width)
            channels = 4 * width
    yield "fc.weight", [1000, channels]
    yield "fc.bias", [1000]


def _batch_norm(base: str, channels: int) -> Iterator[tuple[str, list[int]]]:
    for name in ("weight", "bias", "running_mean", "running_var"):
        yield f"{base}.{name}", [channels]


def _mlp(base: str, hidden: int, inner: int) -> Iterator[tuple[str, list[int]]]:
    for name, shape in {
        "gate_proj": [inner, hidden],
        "up_proj": [inner, hidden],
        "down_proj": [hidden, inner],
    }.items():
        yield from _scaled(f"{base}.{name}", shape)


def _scaled(base: str, shape: list[int]) -> Iterator[tuple[str, list[int]]]:
    yield f"{base}.weight", shape
    yield f"{base}.weight_scale_inv", [-(-n // 128) for n in shape]


def write_ztensor(path: Path, tensors: Shapes, dtype: str = "bfloat16") -> bytes:
    """Write a zTensor v1.0 file whose data are holes; return its manifest."""
    itemsize = {"bfloat16": 2, "float32": 4}[dtype]
    offset, described = 64, {}
    for name, shape in tensors.items():
        length = prod(shape) * itemsize
        described[name] = {
            "dtype": dtype,
            "shape": shape,
            "format": "dense",
            "components": {"data": {"offset": offset, "length": length}},
        }
        offset += -(-length // 64) * 64
    root = {"version": "1.0", "generator": "benchmark", "attributes": {}, "tensors": described}
    manifest: bytes = cbor2.dumps(root)
    with path.open("wb") as file:
        file.write(b"ZTEN1000")
        file.seek(offset)
        file.write(manifest + struct.pack("<Q", len(manifest)))
    return manifest


def _write_burnpack(path: Path, tensors: Shapes) -> None:
    """Write a Burnpack file as Burn 0.21 does: names in the order of bytes, all aligned."""
    end, described = 0, {}
    for at, name in enumerate(sorted(tensors)):
        start = -(-end // 256) * 256
        end = start + _nbytes(tensors[name])
        described[name] = {
            "dtype": "F32",
            "shape": tensors[name],
            "data_offsets": [start, end],
            "param_id": (at + 1) * 0x9E3779B97F4A7C15 % 2**64,
        }
    metadata = cbor2.dumps({"tensors": described})
    head = b"NRUB" + struct.pack("<HI", 1, len(metadata)) + metadata
    _write_with_hole(path, head + bytes(-len(head) % 256), end)


def _write_gptrs(path: Path, tensors: Shapes) -> None:
    """Write a gpt.rs checkpoint of version 2, with the ids of its names."""
    config = json.dumps({"kind": "benchmark", "config": {}}).encode()
    records = sum(45 + len(name.encode()) + 8 * len(shape) for name, shape in tensors.items())
    offset = 16 + len(config) + 8 + records
    index = struct.pack("<I", len(tensors))
    for name, shape in sorted(tensors.items()):
        encoded, nbytes = name.encode(), _nbytes(shape)
        index += struct.pack("<I", len(encoded)) + encoded + blake3.blake3(encoded).digest(16)
        index += struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        index += struct.pack("<IBQQ", 0, 0, offset, nbytes)
        offset += nbytes
    head = b"GPTRSCHK" + struct.pack("<II", 2, len(config)) + config
    _write_with_hole(path, head + struct.pack("<I", len(index)) + index, _total(tensors))


def _write_mlcp(path: Path, tensors: Shapes) -> None:
    """Write an MLCP file of one shard, with the data after the records."""
    offset, described, records = 0, [], []
    for name, shape in tensors.items():
        nbytes, encoded = _nbytes(shape), name.encode()
        described.append(
            {"name": name, "shape": shape, "dataType": 1, "offset": offset, "size": nbytes}
        )
        records.append(
            struct.pack("<i", len(encoded))
            + encoded
            + b"\x07Float32"
            + struct.pack(f"<i{len(shape)}qq", len(shape), *shape, nbytes)
        )
        offset += nbytes
    shard = {"rank": 0, "filePath": path.name, "fileSize": offset, "tensors": described}
    metadata = json.dumps({"version": "1.0.0", "worldSize": 1, "shards": [shard]}).encode()
    head = struct.pack("<i", 0x4D4C4350) + b"\x051.0.0" + struct.pack("<i", len(metadata))
    body = struct.pack("<i", len(tensors)) + b"".join(records)
    _write_with_hole(path, head + metadata + body, offset)


def _write_primitiv(path: Path, tensors: Shapes) -> None:
    """Write a primitiv model without statistics."""
    with path.open("wb") as file:
        file.write(_uints(0, 1, 0x300, len(tensors)))
        for name, shape in tensors.items():
            nbytes = _nbytes(shape)
            file.write(msgpack.packb(name.split(".")))
            file.write(msgpack.Packer().pack_array_header(len(shape)) + _uints(*shape, 1))
            file.write(b"\xc6" + struct.pack(">I", nbytes))
            file.seek(nbytes, 1)
            file.write(_uints(0))


def _uints(*numbers: int) -> bytes:
    """Pack integers as primitiv does, always in 32 bits."""
    return b"".join(struct.pack(">BI", 0xCE, number) for number in numbers)


def _write_safetensors(path: Path, tensors: Shapes) -> None:
    end, described = 0, {}
    for name, shape in tensors.items():
        begin, end = end, end + _nbytes(shape)
        described[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    _write_with_hole(path, struct.pack("<Q", len(header)) + header, end)


def _torch_pickle(tensors: Shapes) -> bytes:
    """Write a state dict as torch.save does: a record of 32 opcodes for each tensor."""
    memo: dict[bytes, int] = {}

    def coded(letters: bytes, at: int) -> bytes:
        return letters[:1] + bytes((at,)) if at < 256 else letters[1:] + at.to_bytes(4, "little")

    def fresh(data: bytes, key: bytes | None = None) -> bytes:
        at = len(memo)
        memo[b"%d" % at if key is None else key] = at
        return data + coded(b"qr", at)

    def once(data: bytes) -> bytes:
        return coded(b"hj", memo[data]) if data in memo else fresh(data, data)

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def whole(value: int) -> bytes:
        return b"K%c" % value if value < 256 else b"J" + value.to_bytes(4, "little")

    def numbers(values: list[int]) -> bytes:
        end = {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(values), b"t")
        return fresh((b"(" if end == b"t" else b"") + b"".join(map(whole, values)) + end)

    items = []
    for key, (name, shape) in enumerate(tensors.items()):
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        record = fresh(text(name)) + once(b"ctorch._utils\n_rebuild_tensor_v2\n") + b"(("
        record += once(text("storage")) + once(b"ctorch\nFloatStorage\n") + fresh(text(f"{key}"))
        record += once(text("cpu")) + whole(prod(shape)) + fresh(b"t") + b"QK\0"
        record += numbers(shape) + numbers(strides) + b"\x89"
        record += once(b"ccollections\nOrderedDict\n") + fresh(b")R") + fresh(b"t") + fresh(b"R")
        items.append(record)
    return b"\x80\x02" + fresh(b"}") + b"(" + b"".join(items) + b"u."


def _write_torch(path: Path, tensors: Shapes) -> None:
    members: dict[str, bytes | int] = {"m/data.pkl": _torch_pickle(tensors)}
    members["m/byteorder"] = b"little"
    members |= {f"m/data/{key}": _nbytes(shape) for key, shape in enumerate(tensors.values())}
    members["m/version"] = b"3\n"
    directory = b""
    with path.open("wb") as file:
        for name, data in members.items():
            at, nbytes = file.tell(), data if isinstance(data, int) else len(data)
            pad = -(at + 34 + len(name)) % 64
            crc = 0 if isinstance(data, int) else crc32(data)
            sizes = struct.pack("<3I2H", crc, nbytes, nbytes, len(name), pad + 4)
            head = struct.pack("<4s5H", b"PK\3\4", 0, 0x800, 0, 0, 0)
            file.write(head + sizes + name.encode() + struct.pack("<2H", 0x4246, pad) + b"Z" * pad)
            file.seek(nbytes, 1) if isinstance(data, int) else file.write(data)
            directory += struct.pack("<4s6H", b"PK\1\2", 0, 0, 0x800, 0, 0, 0) + sizes[:14]
            directory += struct.pack("<4HII", 0, 0, 0, 0, 0, at) + name.encode()
        begin, count = file.tell(), len(members)
        end = struct.pack("<4H2IH", 0, 0, count, count, len(directory), begin, 0)
        file.write(directory + b"PK\5\6" + end)


def _write_ztensor(path: Path, tensors: Shapes) -> None:
    write_ztensor(path, tensors, "float32")


def _nbytes(shape: list[int]) -> int:
    return 4 * prod(shape)


def _total(tensors: Shapes) -> int:
    return sum(map(_nbytes, tensors.values()))


def _write_with_hole(path: Path, head: bytes, nbytes: int) -> None:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + nbytes)


#: For each format, what writes a file of float32 tensors that are all zeros.
WRITERS: Mapping[str, Callable[[Path, Shapes], None]] = {
    "burnpack": _write_burnpack,
    "gptrs": _write_gptrs,
    "mlcp": _write_mlcp,
    "primitiv": _write_primitiv,
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "ztensor": _write_ztensor,
}

#: Models of each kind that people have, by name.
FAMILIES: Mapping[str, Callable[[], Iterator[tuple[str, list[int]]]]] = {
    "GPT-2 XL": gpt,
    "ResNet-50": resnet,
    "mixture of experts": mixture_of_experts,
}
