"""The primitiv format module: indexes, without arrays."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import with_peak_memory
from tests.contracts.declared import outcome
from tests.contracts.primitiv import DECLARED
from tests.formats.primitiv_files import (
    MODEL,
    OPTIMIZER,
    PARAMETER,
    SHAPE,
    TENSOR,
    array,
    binary,
    file,
    float32,
    mapping,
    model,
    optimizer,
    parameter,
    shape,
    tensor,
    text,
    uint32,
)
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import FormatError, UnsupportedError
from xckpt.formats.primitiv.models import variable_name
from xckpt.index import Index, Tensor
from xckpt.labels import tree_paths

primitiv = formats.get("primitiv")

HOSTILE = st.text(alphabet="ab.:/%\0 é25EF3A", max_size=5).map(str.encode)
ELEMENTS = HOSTILE | st.binary(max_size=4)
KEYS = st.lists(ELEMENTS, min_size=1, max_size=4)
STATS = st.lists(ELEMENTS, max_size=3)

ZERO = uint32(0)
ONE = tensor(np.array(1, "f4"))
TWO = tensor(np.arange(2, dtype="f4"))
MATRIX = np.arange(6, dtype="f4").reshape(2, 3)


def index_of(data_type: int, content: bytes, **options: Any) -> Index:
    return primitiv.read(CountingSource(file(data_type, content)), **options)


def failure(data_type: int, content: bytes) -> FormatError:
    with pytest.raises(FormatError) as caught:
        index_of(data_type, content)
    return caught.value


def stored(data: bytes, tensor: Tensor) -> np.ndarray:
    part = tensor.parts["data"]
    flat = np.frombuffer(data, "<f4", part.nbytes // 4, part.offset)
    return flat.reshape(tensor.shape, order=tensor.order)


class TestContents:
    def test_a_shape_file(self) -> None:
        index = index_of(SHAPE, shape([2, 1, 3, 1, 1], 7))
        assert not index.tensors
        assert index.attrs == {"data_type": "Shape", "dims": [2, 1, 3], "batch": 7}

    def test_tensor_is_column_major(self) -> None:
        data = file(TENSOR, tensor(MATRIX))
        index = primitiv.read(CountingSource(data))
        assert index.attrs == {"data_type": "Tensor"}
        (only,) = index.tensors.values()
        assert (only.name, only.dtype, only.order, only.dims) == ("value", "float32", "F", None)
        np.testing.assert_array_equal(stored(data, only), MATRIX)

    def test_batch_is_the_last_axis_where_it_is_more_than_one(self) -> None:
        values = np.arange(24, dtype="f4").reshape(2, 3, 4)
        data = file(TENSOR, tensor(values, batched=True))
        (only,) = primitiv.read(CountingSource(data)).tensors.values()
        assert only.dims == (None, None, "batch")
        np.testing.assert_array_equal(stored(data, only), values)
        (scalars,) = index_of(TENSOR, tensor(np.zeros(3), batched=True)).tensors.values()
        assert (scalars.shape, scalars.dims) == ((3,), ("batch",))
        (single,) = index_of(TENSOR, tensor(np.zeros((3, 1)), batched=True)).tensors.values()
        assert (single.shape, single.dims) == ((3,), None)

    @pytest.mark.parametrize(
        ("dims", "expected"), [([2, 3, 1, 1], (2, 3)), ([1, 3], (1, 3)), ([2, 1, 2], (2, 1, 2))]
    )
    def test_only_trailing_ones_are_dropped(
        self, dims: list[int], expected: tuple[int, ...]
    ) -> None:
        content = shape(dims) + binary(bytes(4 * math.prod(dims)))
        assert index_of(TENSOR, content).tensors["value"].shape == expected

    def test_eight_dims_of_one_are_a_scalar(self) -> None:
        content = shape([1] * 8) + binary(bytes(4))
        assert index_of(TENSOR, content).tensors["value"].shape == ()

    def test_parameter(self) -> None:
        stats = ("Adam.m2", tensor(MATRIX)), ("other", tensor(np.zeros((5, 2)), batched=True))
        index = index_of(PARAMETER, parameter(tensor(MATRIX), *stats))
        assert index.attrs == {"data_type": "Parameter"}
        assert list(index.tensors) == ["value", "value:Adam.m2", "value:other"]
        statistic = index.tensors["value:other"]
        assert statistic.attrs == {"stat": "other"}
        assert (statistic.shape, statistic.dims) == ((5, 2), (None, "batch"))
        assert statistic.path == ("value:other",)
        assert not index.warnings

    def test_model(self) -> None:
        value = parameter(tensor(MATRIX), ("Adam.m1", ONE))
        index = index_of(MODEL, model((["rnn", "w"], value), (["b"], parameter(TWO))))
        assert index.attrs == {"data_type": "Model"}
        assert list(index.tensors) == ["rnn.w", "rnn.w:Adam.m1", "b"]
        weight, moment, bias = index.tensors.values()
        assert (weight.attrs, weight.path) == ({"key": ["rnn", "w"]}, ("rnn", "w"))
        assert moment.attrs == {"key": ["rnn", "w"], "stat": "Adam.m1"}
        assert moment.path == ("rnn", "w:Adam.m1")
        assert (bias.attrs, bias.shape) == ({"key": ["b"]}, (2,))

    def test_empty_model(self) -> None:
        assert file(MODEL, model()) == bytes.fromhex("ce00000000ce00000001ce00000300ce00000000")
        assert not index_of(MODEL, model()).tensors

    @pytest.mark.parametrize("data_type", [PARAMETER, MODEL])
    def test_without_statistics(self, data_type: int) -> None:
        content = parameter(ONE, ("Adam.m1", ONE), ("Adam.m2", ONE))
        if data_type == MODEL:
            content = model((["w"], content), (["w2"], content))
        index = index_of(data_type, content, with_stats=False)
        assert list(index.tensors) == (["value"] if data_type == PARAMETER else ["w", "w2"])

    def test_optimizer(self) -> None:
        floats = [("Adam.eps", 1e-8), ("Adam.beta1", math.nan), ("x", -math.inf)]
        index = index_of(OPTIMIZER, optimizer([("Optimizer.epoch", 5), ("x", 2**32 - 1)], floats))
        assert not index.tensors
        configs = index.attrs["float_configs"]
        assert list(configs) == ["Adam.eps", "Adam.beta1", "x"]
        assert configs["Adam.eps"] == np.float32(1e-8)
        assert math.isnan(configs["Adam.beta1"])
        assert configs["x"] == -math.inf
        assert index.attrs["uint_configs"] == {"Optimizer.epoch": 5, "x": 2**32 - 1}
        assert index.attrs["optimizer"] == "Adam"

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            ([], None),
            (["Optimizer.epoch"], None),
            (["Trainer.epoch", "SGD.eta"], "SGD"),
            (["MomentumSGD.eta", "mine.warmup"], "MomentumSGD"),
            (["SGD.eta", "Adam.eps"], None),
            (["Mine.a.b", "Mine.c", "bare"], "Mine"),
            (["Mine.a", "Yours.c"], None),
        ],
    )
    def test_optimizer_is_inferred_from_unambiguous_settings(
        self, names: list[str], expected: str | None
    ) -> None:
        index = index_of(OPTIMIZER, optimizer([], [(name, 1.0) for name in names]))
        assert index.attrs.get("optimizer") == expected
        assert ("optimizer" in index.attrs) == (expected is not None)

    @pytest.mark.parametrize("form", ["", "H", "I"])
    def test_lengths_in_any_form(self, form: str) -> None:
        value = shape([2], form=form) + binary(bytes(8), form) + uint32(0)
        written = uint32(1) + array(text("a", form), text("b", form), form=form) + value
        assert index_of(MODEL, written).tensors["a.b"].shape == (2,)
        configs = mapping((text("a", form), uint32(1)), form=form) + mapping(form=form)
        assert index_of(OPTIMIZER, configs).attrs["uint_configs"] == {"a": 1}

    @pytest.mark.parametrize("length", [31, 32, 255, 256, 65535, 65536])
    def test_names_of_any_length(self, length: int) -> None:
        index = index_of(MODEL, model((["k" * length, "w"], parameter(TWO)), (["z"], TWO + ZERO)))
        assert [len(name) for name in index.tensors] == [length + 2, 1]
        assert index.nbytes - index.tensors["z"].parts["data"].offset == 8 + 5


class TestDetection:
    @pytest.mark.parametrize("data_type", [SHAPE, TENSOR, PARAMETER, MODEL, OPTIMIZER])
    def test_by_content(self, data_type: int) -> None:
        head = file(data_type, b"")
        assert primitiv.detect(head, len(head), "whatever.bin")
        assert primitiv.detect(head + bytes(497), 4096, "whatever.bin")

    @pytest.mark.parametrize(
        "head",
        [
            b"",
            file(SHAPE, b"")[:14],
            file(0x500, b""),
            file(0x10300, b""),
            file(0x301, b""),
            file(MODEL, b"", version=(0, 2)),
            file(MODEL, b"", version=(1, 1)),
        ],
    )
    def test_other_files_are_not_detected(self, head: bytes) -> None:
        assert not primitiv.detect(head, 4096, "m.primitiv")


class TestNames:
    def test_examples(self) -> None:
        names = {
            ("a", "b"): "a.b",
            ("a.b",): "a%2Eb",
            ("a/b",): "a/b",
            ("a", ""): "a.",
            ("", "a"): ".a",
            ("", "a", "", "b"): ".a..b",
            ("a.",): "a%2E",
            ("",): "%",
            ("", ""): ".",
            ("%",): "%25",
            ("w:Adam.m1",): "w%3AAdam%2Em1",
            ("caf\udce9",): "caf%E9",
            ("café",): "café",
        }
        for key, name in names.items():
            assert variable_name(key) == name
        assert len(set(names.values())) == len(names)
        assert variable_name(["w"], "Adam.m1") == "w:Adam.m1"
        assert variable_name(["w"], "") == "w:"
        assert variable_name(["w"], "50%\udcff:.") == "w:50%25%FF:."

    @given(st.data())
    def test_a_name_contains_its_key(self, data: st.DataObject) -> None:
        key, stat = data.draw(st.tuples(KEYS, st.none() | ELEMENTS))
        name = variable_name([as_text(element) for element in key], as_text(stat))
        name.encode()  # printable
        joined, colon, escaped = name.partition(":")
        assert [unescaped(element) for element in joined.split(".")] == key
        assert (unescaped(escaped) if colon else None) == stat

    @given(st.lists(st.tuples(KEYS, STATS), max_size=8))
    def test_every_tensor_has_its_own_name_and_place(
        self, parameters: list[tuple[list[bytes], list[bytes]]]
    ) -> None:
        written = {tuple(key): set(stats) for key, stats in parameters}
        content = model(
            *((key, parameter(TWO, *((s, ONE) for s in stats))) for key, stats in written.items())
        )
        index = index_of(MODEL, content)
        expected = [(key, stat) for key, stats in written.items() for stat in (None, *stats)]
        assert len(index.tensors) == len(expected)
        for actual, (key, stat) in zip(index.tensors.values(), expected, strict=True):
            assert tuple(as_bytes(element) for element in actual.attrs["key"]) == key
            assert actual.shape == ((2,) if stat is None else ())
            assert ("stat" in actual.attrs) == (stat is not None)
        placed = tree_paths({name: tensor.path for name, tensor in index.tensors.items()})
        assert len(set(placed.values())) == len(expected)
        for path, leaf in placed.values():
            f"{path}/{leaf}".encode()  # printable

    def test_a_tree_has_the_modules_of_the_file(self) -> None:
        keys = [["a.b", "w"], ["a", "b", "w"], ["a%2Eb", "w"], ["a:b", "w:s"], ["a:b", "w"]]
        index = index_of(MODEL, model(*((key, parameter(ONE, ("s", ONE))) for key in keys)))
        placed = tree_paths({name: tensor.path for name, tensor in index.tensors.items()})
        assert list(placed.values())[::2] == [
            ("/a.b", "w"),
            ("/a/b", "w"),
            ("/a%252Eb", "w"),
            ("/a:b", "w%253As"),
            ("/a:b", "w"),
        ]
        assert placed["a%3Ab.w:s"] == ("/a:b", "w:s")

    def test_a_key_of_many_elements_makes_no_deep_tree(self) -> None:
        keys = [[""] * 20_000, [""] * 20_001, ["a"] * 64, ["a"] * 65]
        index = index_of(MODEL, model(*((key, parameter(ONE, ("s", ONE))) for key in keys)))
        placed = tree_paths({name: tensor.path for name, tensor in index.tensors.items()})
        assert len(set(placed.values())) == len(index.tensors) == 8
        assert max(path.count("/") for path, _ in placed.values()) == 64
        assert [len(tensor.attrs["key"]) for tensor in index.tensors.values()][::2] == [
            len(key) for key in keys
        ]


def as_text(data: bytes | None) -> Any:
    return None if data is None else data.decode("utf-8", "surrogateescape")


def as_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def unescaped(name: str) -> bytes:
    """Undo the escapes of a variable's name, as its documentation describes them."""
    if name == "%":
        return b""
    first, *escapes = name.encode().split(b"%")
    return first + b"".join(bytes([int(piece[:2], 16)]) + piece[2:] for piece in escapes)


class TestWarnings:
    @pytest.mark.parametrize(
        ("data_type", "content", "text"),
        [
            (TENSOR, ONE + b"1234567", "7 from byte 27 on"),
            (SHAPE, shape([2]) + b"\0", "1 from byte 26 on"),
            (OPTIMIZER, optimizer([], []) + b"\0\0", "2 from byte 17 on"),
            (PARAMETER, parameter(tensor(np.zeros((2, 3)), batched=True)), "'value': with a batch"),
            (
                MODEL,
                model((["a"], parameter(ONE)), (["a", "b"], parameter(ONE))),
                "'a': both a parameter and a module",
            ),
            (MODEL, model(([b"caf\xe9"], parameter(ONE))), r"'caf\\udce9': not UTF-8"),
            (PARAMETER, parameter(ONE, (b"\xff", ONE)), "not UTF-8"),
            (OPTIMIZER, optimizer([("\udcff", 1)], []), "not UTF-8"),
        ],
    )
    def test_questionable_files_are_read_with_a_warning(
        self, data_type: int, content: bytes, text: str
    ) -> None:
        (warning,) = index_of(data_type, content).warnings
        assert text.replace(r"\\", "\\") in warning

    def test_the_first_of_two_statistics_counts(self) -> None:
        index = index_of(PARAMETER, parameter(ONE, ("a", TWO), ("b", ONE), ("a", ONE)))
        assert list(index.tensors) == ["value", "value:a", "value:b"]
        assert index.tensors["value:a"].shape == (2,)
        assert "'value:a': there twice" in index.warnings[0]

    def test_the_last_of_two_parameters_counts_with_its_statistics(self) -> None:
        first = parameter(ONE, ("old", ONE), ("both", ONE))
        last = parameter(TWO, ("both", TWO))
        index = index_of(MODEL, model((["w"], first), (["w2"], parameter(ONE)), (["w"], last)))
        assert {name: tensor.shape for name, tensor in index.tensors.items()} == {
            "w2": (),
            "w": (2,),
            "w:both": (2,),
        }
        assert "'w': there twice" in index.warnings[0]

    def test_the_first_of_two_settings_counts(self) -> None:
        content = optimizer([("a", 1), ("a", 2)], [("a", 3.0), ("b", 4.0), ("b", 5.0)])
        index = index_of(OPTIMIZER, content)
        assert index.attrs["uint_configs"] == {"a": 1}
        assert index.attrs["float_configs"] == {"a": 3.0, "b": 4.0}
        assert index.warnings == (
            "setting 'a' and 1 more: there twice; the first counts, as for primitiv",
        )

    def test_a_thousand_warnings_are_one_text(self) -> None:
        index = index_of(MODEL, model(*[(["w"], parameter(ONE))] * 1000))
        (warning,) = index.warnings
        assert " and 998 more: there twice" in warning


class TestErrors:
    @pytest.mark.parametrize(
        ("content", "offset", "rule"),
        [
            (shape([2] * 9) + binary(bytes(2048)), 15, "ShapeDepth"),
            (b"\xdd\xff\xff\xff\xff", 15, "ShapeDepth"),
            (shape([2, 0]) + binary(b""), 15, "ShapeSize"),
            (shape([2], 0) + binary(b""), 15, "ShapeSize"),
            (shape([65536, 65536]) + binary(b""), 15, "ShapeSize"),
            (shape([2**31 + 1, 2]) + binary(bytes(8)), 15, "ShapeSize"),
            (shape([2], 2**31 + 1) + binary(bytes(8)), 15, "ShapeSize"),
            (shape([2, 3]) + binary(bytes(20)), 31, "DataLength"),
            (shape([2]) + binary(bytes(7)), 26, "DataLength"),
            (shape([]) + binary(b""), 21, "DataLength"),
            (shape([2]) + b"\xc6\0\0\0\x08", 31, "EndOfFile"),
            (shape([2]) + text(bytes(8)), 26, "Type"),
            (array(b"\2", b"\3") + b"\1" + binary(bytes(24)), 16, "Type"),
            (array(uint32(2), b"\xcd\0\3") + uint32(1), 21, "Type"),
        ],
    )
    def test_tensor_files(self, content: bytes, offset: int, rule: str) -> None:
        error = failure(TENSOR, content)
        assert (error.offset, error.rule, error.tensor) == (offset, rule, "value")

    def test_shape_files_have_the_same_limits(self) -> None:
        assert index_of(SHAPE, shape([2**32 - 1])).attrs["dims"] == [2**32 - 1]
        assert failure(SHAPE, shape([2**16, 2**16])).rule == "ShapeSize"
        assert failure(SHAPE, shape([1] * 9)).rule == "ShapeDepth"

    @pytest.mark.parametrize(
        ("data_type", "content", "offset"),
        [
            (MODEL, uint32(1) + text("foo") + parameter(ONE), 20),
            (MODEL, uint32(1) + array(uint32(7)) + parameter(ONE), 21),
            (PARAMETER, ONE + b"\0", 26 + 1),
            (OPTIMIZER, array() + mapping(), 15),
            (OPTIMIZER, mapping((text("a"), b"\5")) + mapping(), 18),
            (OPTIMIZER, mapping() + mapping((text("a"), b"\xcb" + bytes(8))), 19),
            (OPTIMIZER, mapping((binary(b"a"), uint32(1))) + mapping(), 16),
            (OPTIMIZER, mapping((text("a"), float32(1))) + mapping(), 18),
        ],
    )
    def test_errors_of_types_contain_the_byte(
        self, data_type: int, content: bytes, offset: int
    ) -> None:
        error = failure(data_type, content)
        actual = file(data_type, content)[offset]
        assert (error.rule, error.offset) == ("Type", offset)
        assert f"type byte 0x{actual:02x}, expected" in str(error)

    def test_errors_of_a_header(self) -> None:
        assert failure(0x500, b"").rule == "DataType"
        assert "the file is empty" in str(raised(b""))
        assert "0x93" in str(raised(b"\x93NUMPY" + bytes(100)))
        with pytest.raises(UnsupportedError, match=r"version 0\.2 .* only 0\.1"):
            primitiv.read(CountingSource(file(TENSOR, ONE, version=(0, 2))))

    def test_an_empty_key(self) -> None:
        error = failure(MODEL, model(([], parameter(ONE))))
        assert (error.rule, error.offset) == ("Key", 20)

    def test_a_statistic_is_named(self) -> None:
        content = model((["a", "w"], parameter(ONE, ("m", ONE[:-1]))))
        assert failure(MODEL, content).tensor == "a.w:m"
        assert failure(MODEL, content[: -len(ONE)]).tensor == "a.w"

    def test_damaged_line_ends_are_reported(self) -> None:
        def damaged(content: bytes) -> FormatError:
            return failure(TENSOR, content.replace(b"\n", b"\r\n"))

        assert "0d 0a" in str(damaged(tensor(np.zeros(10))))  # in dims
        assert "0d 0a" in str(damaged(tensor(np.zeros(2560 // 4))))  # in the length of data
        assert "0d 0a" not in str(failure(TENSOR, tensor(np.zeros(10))[:-1]))

    @pytest.mark.parametrize("stats", [[b"same"] * 20, [b"%d" % i for i in range(20)]])
    def test_long_names_are_not_repeated_without_end(self, stats: list[bytes]) -> None:
        long = b"k" * (1 << 16)
        content = model(([long], parameter(ONE, *((stat, ONE) for stat in stats))))
        with pytest.raises(UnsupportedError, match="more than 17 statistics"):
            index_of(MODEL, content)
        moments = parameter(ONE, ("Adam.m1", ONE), ("Adam.m2", ONE))
        assert len(index_of(MODEL, model(([long], moments))).tensors) == 3

    def test_a_name_too_long_to_be_one(self) -> None:
        with pytest.raises(UnsupportedError, match="16777217 bytes") as caught:
            index_of(MODEL, model(([bytes(2**24 + 1)], parameter(ONE))))
        assert caught.value.offset == 26


def raised(data: bytes) -> FormatError:
    with pytest.raises(FormatError) as caught:
        primitiv.read(CountingSource(data))
    return caught.value


class TestSkipScan:
    def test_forty_large_tensors_take_forty_one_small_reads(self) -> None:
        source = SparseModel(40, 256 << 20)
        index = primitiv.read(source)
        assert len(index.tensors) == 40
        assert source.size > 10e9
        assert len(source.reads) == 41
        assert all(nbytes <= 4096 for _, nbytes in source.reads)
        last = index.tensors["w39"].parts["data"]
        assert last.offset + last.nbytes == source.size - 5

    def test_many_small_tensors_share_reads(self) -> None:
        content = model(*(([f"p{i}"], parameter(TWO)) for i in range(1000)))
        source = CountingSource(file(MODEL, content))
        assert len(primitiv.read(source).tensors) == 1000
        assert source.nbytes_read < 1.05 * source.size
        assert len(source.reads) <= source.size // 4000 + 2

    @pytest.mark.parametrize("length", range(3990, 4100))
    def test_headers_on_the_edge_of_the_window(self, length: int) -> None:
        padded = parameter(TWO, ("pad", tensor(np.zeros((length - 60) // 4))))
        content = model((["a" * (length % 4 + 1)], padded), (["é" * 9, "b"], parameter(TWO)))
        index = index_of(MODEL, content)
        assert [tensor.shape for tensor in index.tensors.values()][::2] == [(2,), (2,)]
        assert list(index.tensors)[2] == "é" * 9 + ".b"

    @pytest.mark.parametrize(
        "content",
        [
            uint32(2**32 - 1),
            uint32(1) + b"\xdd\xff\xff\xff\xff",
            uint32(1) + b"\x91\xdb\xff\xff\xff\xff" + bytes(100),
            uint32(1) + array(text("w")) + shape([2**30 - 1]) + b"\xc6\xff\xff\xff\xfc",
            uint32(1) + array(text("w")) + ONE + uint32(2**32 - 1),
        ],
    )
    def test_nothing_is_allocated_by_a_claimed_size(self, content: bytes) -> None:
        source = CountingSource(file(MODEL, content))

        def refused() -> None:
            with pytest.raises(FormatError):
                primitiv.read(source)

        _, peak = with_peak_memory(refused)
        assert peak < 1 << 18


class SparseModel(CountingSource):
    """A model file that is large without being there: its data are holes."""

    def __init__(self, count: int, nbytes: int) -> None:
        super().__init__(b"")
        self.pieces = [(0, file(MODEL, uint32(count)))]
        at = 20
        for number in range(count):
            value = shape([1024, nbytes // 4096]) + b"\xc6" + nbytes.to_bytes(4, "big")
            head = array(text(f"w{number}")) + value
            self.pieces.append((at, head))
            at += len(head) + nbytes
            self.pieces.append((at, uint32(0)))
            at += 5
        self.size = at

    def read(self, offset: int, nbytes: int) -> memoryview:
        assert 0 <= offset <= offset + nbytes <= self.size
        self.reads.append((offset, nbytes))
        actual = bytearray(nbytes)
        for start, data in self.pieces:
            first, last = max(start, offset), min(start + len(data), offset + nbytes)
            if first < last:
                actual[first - offset : last - offset] = data[first - start : last - start]
        return memoryview(bytes(actual))


@pytest.mark.parametrize("kind", ["shape", "tensor", "parameter", "model", "optimizer"])
def test_no_flipped_bit_beside_the_data_goes_unseen(kind: str) -> None:
    data = DECLARED.small_files()[kind]
    right = primitiv.read(CountingSource(data))
    parts = [tensor.parts["data"] for tensor in right.tensors.values()]
    payload = [range(part.offset, part.offset + part.nbytes) for part in parts]
    for at in set(range(len(data))).difference(*payload):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            result = outcome(DECLARED, bytes(flipped))
            if isinstance(result, Index):
                # Another type of data, name or number, which this format does not check.
                assert at >= 13
                assert result.attrs["data_type"] == right.attrs["data_type"] or result.warnings
                assert result != right
                assert_apart(result)


def assert_apart(index: Index) -> None:
    end = 0
    for actual in sorted(index.tensors.values(), key=lambda tensor: tensor.parts["data"].offset):
        part = actual.parts["data"]
        assert part.offset >= end
        assert part.nbytes == 4 * actual.size
        end = part.offset + part.nbytes


ARRAYS = st.lists(st.integers(1, 3), max_size=4).map(lambda dims: np.ones(dims, "f4"))


@given(st.lists(st.tuples(KEYS, ARRAYS, st.lists(st.tuples(ELEMENTS, ARRAYS), max_size=2))))
def test_msgpack_reads_the_same(parameters: list[Any]) -> None:
    """The objects of a file as another implementation of MessagePack decodes them."""
    content = model(
        *(
            (key, parameter(tensor(value), *((name, tensor(stat)) for name, stat in stats)))
            for key, value, stats in parameters
        )
    )
    data = file(MODEL, content)
    unpacker = msgpack.Unpacker(unicode_errors="surrogateescape", max_buffer_size=len(data))
    unpacker.feed(data)
    objects = iter(unpacker)
    assert [next(objects) for _ in range(4)] == [0, 1, MODEL, len(parameters)]
    decoded_by_key: dict[Any, Any] = {}
    for _ in parameters:
        key = tuple(next(objects))
        values_by_stat = {None: _decoded(objects)}
        for _ in range(next(objects)):
            stat = next(objects)
            values_by_stat.setdefault(stat, _decoded(objects))
        decoded_by_key.pop(key, None)
        decoded_by_key[key] = values_by_stat
    assert next(objects, None) is None
    index = primitiv.read(CountingSource(data))
    expected = [
        (list(key), stat, *decoded)
        for key, values_by_stat in decoded_by_key.items()
        for stat, decoded in values_by_stat.items()
    ]
    assert len(index.tensors) == len(expected)
    for actual, (key, stat, dims, payload) in zip(index.tensors.values(), expected, strict=True):
        assert actual.attrs["key"] == key
        assert actual.name == variable_name(key, stat)
        assert list(actual.shape) == trimmed(dims)
        assert stored(data, actual).tobytes(order="F") == payload


def _decoded(objects: Any) -> tuple[list[int], bytes]:
    dims, batch, payload = next(objects), next(objects), next(objects)
    assert batch == 1
    return dims, payload


def trimmed(dims: list[int]) -> list[int]:
    while dims and dims[-1] == 1:
        dims = dims[:-1]
    return dims
