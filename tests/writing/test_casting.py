"""The choice of element types, and the exactness of exact conversions, NaN included."""

from __future__ import annotations

import operator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import xckpt
from xckpt.arrays.converted import cast_block, element_type
from xckpt.arrays.dense import elements
from xckpt.elements import ELEMENT_TYPES, stored_dtype
from xckpt.errors import CheckpointWarning, UnsupportedError
from xckpt.writing import save
from xckpt.writing.fitting import choose_type

if TYPE_CHECKING:
    from collections.abc import Callable

# Of one byte or two: all their values can be tried.
SMALL = [name for name, e in ELEMENT_TYPES.items() if e.bits <= 16]
IEEE = ["float64", "float32", "float16", "bfloat16", "float8_e5m2"]


def all_values(name: str) -> np.ndarray:
    bits = ELEMENT_TYPES[name].bits
    if name == "bool":
        return np.array([False, True])
    return np.arange(2**bits, dtype=f"u{max(bits, 8) // 8}").view(stored_dtype(name))


def codes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


@pytest.mark.parametrize(
    ("name", "writes", "expected"),
    [
        ("float32", ["float64", "float32"], "float32"),
        ("bfloat16", ["float16", "float64", "float32"], "float32"),
        ("float8_e4m3fn", ["float32", "float16", "bfloat16"], "float16"),
        ("float8_e8m0fnu", ["float16", "bfloat16"], "bfloat16"),
        ("int8", ["float16", "int64", "int32"], "int32"),
        ("uint64", ["int64", "uint64"], "uint64"),
        ("uint32", ["int32", "float32", "float64"], "float64"),
        ("int16", ["float32"], "float32"),
        ("bool", ["uint8", "float32"], "uint8"),
        ("complex64", ["complex128", "float64"], "complex128"),
        ("float32", ["complex64"], "complex64"),
    ],
)
def test_the_smallest_type_that_holds_all_values(
    name: str, writes: list[str], expected: str
) -> None:
    assert choose_type(name, writes, "exact", tensor="w") == expected


@pytest.mark.parametrize(
    ("name", "writes", "nearest"),
    [
        ("float64", ["float16", "float32"], "float32"),
        ("int64", ["int32", "float32"], "int32"),
        ("uint64", ["float32"], "float32"),
        ("float16", ["float8_e5m2"], "float8_e5m2"),
    ],
)
def test_the_nearest_type_needs_permission(name: str, writes: list[str], nearest: str) -> None:
    for cast in ("exact", "never"):
        with pytest.raises(UnsupportedError, match=rf"'w': {name} .* \[Dtype\].*cast='allow'"):
            choose_type(name, writes, cast, tensor="w")
    assert choose_type(name, writes, "allow", tensor="w") == nearest


def test_never_refuses_every_cast() -> None:
    with pytest.raises(UnsupportedError, match=r"bfloat16 .*cast='exact' to write it as float32"):
        choose_type("bfloat16", ["float64", "float32"], "never", tensor="w")
    for cast in ("never", "exact", "allow"):
        with pytest.raises(UnsupportedError, match=r"complex64 .*or leave it out"):
            choose_type("complex64", ["float64"], cast, tensor="w")
    wrong: Any = "safe"
    with pytest.raises(ValueError, match="'exact', 'allow' or 'never'"):
        save(xr.Dataset(), "m.zt", cast=wrong)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("wide", ["float32", "float64", "int32", "complex64", "float16"])
def test_chosen_types_hold_and_return_every_value(name: str, wide: str) -> None:
    try:
        chosen = choose_type(name, [wide], "exact", tensor="w")
    except UnsupportedError:
        return
    values = all_values(name)
    back = cast_block(cast_block(values, chosen, "exact"), name, "exact")
    if name in IEEE or values.dtype.kind in "iub":
        assert np.array_equal(codes(back), codes(values))
    else:  # NaN have no payloads to keep
        assert np.array_equal(back.astype("f8"), values.astype("f8"), equal_nan=True)


@pytest.mark.parametrize("name", [n for n in SMALL if ELEMENT_TYPES[n].bits == 8])
def test_decoded_values_are_encoded_to_the_same_bits(name: str) -> None:
    values = all_values(name)
    decoded = elements(values.view(np.uint8).data, name, decode=True)
    assert np.array_equal(codes(cast_block(decoded, name, "exact")), codes(values))


@pytest.mark.parametrize(("wide", "narrow"), [*product(IEEE[:2], IEEE[2:])])
def test_exact_casts_return_each_bit_or_raise(wide: str, narrow: str) -> None:
    rng = np.random.default_rng(0)
    size = stored_dtype(wide).itemsize
    random = rng.integers(0, 2**63, 2000, np.uint64).astype(f"u{size}").view(wide)
    special = all_values(narrow)[:: 7 if narrow != "float8_e5m2" else 1]
    converted = cast_block(special, wide, "exact")
    for value in [*converted, *random]:
        block = np.array([value], wide)
        try:
            written = cast_block(block, narrow, "exact")
        except UnsupportedError:
            assert codes(block)[0] not in codes(converted)
            continue
        assert codes(cast_block(written, wide, "exact")) == codes(block)


INTEGERS = [f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64)]


@given(st.data(), st.sampled_from(INTEGERS), st.sampled_from([*INTEGERS, "float32", "float64"]))
def test_exact_integers(data: Any, source: str, target: str) -> None:
    value = data.draw(nps.from_dtype(np.dtype(source)))
    block = np.array([value], source)
    try:
        written = cast_block(block, target, "exact")
    except UnsupportedError:
        if target.startswith("float"):
            assert int(np.dtype(target).type(int(value))) != int(value)
        else:
            limits = np.iinfo(target)
            assert not limits.min <= int(value) <= limits.max
    else:
        assert int(written[0]) == int(value)


@given(nps.arrays("f8", 3, elements=st.floats(-1e30, 1e30)), st.sampled_from(INTEGERS))
def test_rounding_to_integers_never_wraps(values: np.ndarray, target: str) -> None:
    try:
        written = cast_block(values, target, "allow")
    except UnsupportedError:
        limits = np.iinfo(target)
        rounded = [round(v) for v in values.tolist()]
        assert not all(limits.min <= v <= limits.max for v in rounded)
    else:
        assert np.array_equal(written.astype("f8"), np.rint(values))


def test_the_error_names_the_element_and_what_to_do() -> None:
    block = np.array([[1.0, 2.0], [3.5, 1.0000001]], "f4")
    with pytest.raises(UnsupportedError) as caught:
        cast_block(
            block,
            "bfloat16",
            "exact",
            tensor="a\nb",
            position=lambda number: [10 + number // 2, number % 2],
        )
    assert str(caught.value).startswith(r"tensor 'a\nb': element [11, 1] is 1.0000001")
    assert "cast='allow'" in str(caught.value)
    rounded = cast_block(block, "bfloat16", "allow")
    assert rounded.astype("f4").tolist() == [[1, 2], [3.5, 1]]


def test_exact_casts_keep_signs_of_zero_and_imaginary_parts() -> None:
    for values, name in [(np.array([-0.0]), "int8"), (np.array([1 + 1j]), "float64")]:
        with pytest.raises(UnsupportedError, match="element"):
            cast_block(values, name, "exact")
    assert cast_block(np.array([2 + 0j]), "float64", "exact").tolist() == [2]
    assert cast_block(np.array([1 + 1j]), "complex64", "exact").dtype == "<c8"


def test_arrays_of_the_right_type_are_not_copied() -> None:
    values = np.arange(3.0)
    assert cast_block(values, "float64", "exact") is values
    swapped = cast_block(values.astype(">f8"), "float64", "never")
    assert swapped.tolist() == [0, 1, 2]
    assert swapped.dtype == "<f8"
    narrow = values.astype(ml_dtypes.bfloat16)
    assert cast_block(narrow, "bfloat16", "never") is narrow


@pytest.mark.parametrize("name", ["float8_e5m2", "bfloat16", "float16"])
def test_scalar_nan_keep_their_payload(name: str) -> None:
    value = all_values(name)[-3]
    assert np.isnan(value)
    wide = cast_block(np.array(value), "float32", "exact")
    assert wide.shape == ()
    scalar: Any = wide[()]
    assert codes(cast_block(scalar, name, "exact")) == codes(np.array(value))


def test_element_types_of_dtypes() -> None:
    types = {dtype: element_type(np.dtype(dtype)) for dtype in (">f4", "?", "M8[s]", "O", "U3")}
    assert list(types.values()) == ["float32", "bool", None, None, None]
    assert element_type(np.dtype(ml_dtypes.float8_e5m2)) == "float8_e5m2"
    assert element_type(np.dtype([("a", "f4")])) is None


SLICE = (slice(None), slice(0, 1))


class TestTypesOfResults:
    """Arithmetic keeps types where people expect it, and says what it does not keep."""

    COUNTER, IDS = "bn.num_batches_tracked", "embeddings.position_ids"

    @pytest.fixture(autouse=True)
    def _models(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for number in range(3):
            weight = np.full((4, 4), 1 + number / 4, ml_dtypes.bfloat16)
            counter = np.array(100 + number)
            ids = np.arange(5)[None]
            tensors = {"fc.weight": weight, self.COUNTER: counter, self.IDS: ids}
            save(tensors, f"{number}.safetensors")

    def opened(self) -> list[xr.Dataset]:
        return [xckpt.open(f"{number}.safetensors") for number in range(3)]

    def types(self, ds: xr.Dataset, **options: Any) -> tuple[str, str, str]:
        """Save, and return the types of the weight, the counter and the positions."""
        ds.ckpt.save("out.safetensors", overwrite=True, **options)
        tensors = xckpt.read_index("out.safetensors").tensors
        weight, counter, ids = (tensors[n].dtype for n in ("fc.weight", self.COUNTER, self.IDS))
        return weight, counter, ids

    @pytest.mark.parametrize("write", ["arithmetic", "mean", "merge"])
    def test_counters_and_constants_stay_integers(self, write: str) -> None:
        a, b, c = self.opened()
        whole = {
            "arithmetic": (a + c) / 2,
            "mean": xr.concat([a, c], "model").mean("model"),
            "merge": a.ckpt.merge(c - a, scale=0.5),
        }[write]
        weight = "bfloat16" if write == "merge" else "float32"
        assert self.types(whole) == (weight, "int64", "int64")
        assert int(xckpt.open("out.safetensors")[self.COUNTER]) == 101
        half = a.ckpt.merge(b - a, scale=0.5) if write == "merge" else (a + b) / 2
        with pytest.warns(CheckpointWarning, match=r"1 element rounded to int64.*num_batches"):
            assert self.types(half) == (weight, "int64", "int64")
        assert int(xckpt.open("out.safetensors")[self.COUNTER]) == 100
        assert xckpt.open("out.safetensors")[self.IDS].values.tolist() == [[0, 1, 2, 3, 4]]

    @pytest.mark.filterwarnings("ignore:divide by zero", "ignore:.*infinite, unlike the sources")
    def test_infinite_counters_are_an_error_that_helps(self) -> None:
        a, *_ = self.opened()
        hint = r"num_batches_tracked'.* is inf, which int64 cannot hold.*ds\.drop_vars\(name\)"
        with pytest.raises(UnsupportedError, match=hint):
            (a[["fc.weight", self.COUNTER]] / 0).ckpt.save("out.safetensors")
        kept = (a / 0).assign(a[[self.COUNTER, self.IDS]].data_vars)
        assert self.types(kept)[1:] == ("int64", "int64")
        left_out = (a / 0).drop_vars([self.COUNTER, self.IDS])
        left_out.ckpt.save("out.safetensors", overwrite=True)

    @pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u2", "?"])
    def test_means_of_small_integers_do_not_wrap_around(self, dtype: str) -> None:
        largest = 1 if dtype == "?" else np.iinfo(dtype).max
        ids = np.array([[0, largest, largest - 1]]).astype(dtype)
        for name, shift in (("a", 0), ("b", 1)):
            save({self.IDS: np.roll(ids, shift), "m.mask": ids}, f"{name}.safetensors")
        a, b = xckpt.open("a.safetensors"), xckpt.open("b.safetensors")
        same = a.drop_vars(self.IDS)
        for ds in (
            (same + b) / 2,
            0.5 * same + 0.5 * b,
            xr.concat([same, b[["m.mask"]]], "model").mean("model"),
        ):
            ds.ckpt.save("out.safetensors", overwrite=True)
            out = xckpt.open("out.safetensors")
            assert out["m.mask"].dtype == ids.dtype
            assert out["m.mask"].values.tolist() == ids.tolist()
        text = rf"rounded to {ids.dtype.name}"
        with pytest.warns(CheckpointWarning, match=text):
            ((a + b) / 2).ckpt.save("out.safetensors", overwrite=True)
        mean = (a[self.IDS].values.astype("f8") + b[self.IDS].values) / 2
        assert xckpt.open("out.safetensors")[self.IDS].values.tolist() == np.rint(mean).tolist()

    @pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u2", "?"])
    def test_small_integers_are_computed_as_int64(self, dtype: str) -> None:
        largest = 1 if dtype == "?" else np.iinfo(dtype).max
        ids = np.array([[0, largest, largest]]).astype(dtype)
        for name in "ab":
            save({self.IDS: ids}, f"{name}.safetensors")
        a, b = xckpt.open("a.safetensors"), xckpt.open("b.safetensors")
        assert (a + b)[self.IDS].values.tolist() == [[0, 2 * largest, 2 * largest]]
        assert (a - b)[self.IDS].values.tolist() == [[0, 0, 0]]
        assert (-a)[self.IDS].values.tolist() == [[0, -largest, -largest]]
        mean = (a + b) / 2
        for ds in (mean, a + (b - a), a.ckpt.merge(b - a), a + b - a):
            ds.ckpt.save("out.safetensors", overwrite=True)
            out = xckpt.open("out.safetensors")[self.IDS]
            assert out.dtype == ids.dtype
            assert out.values.tolist() == ids.tolist()
        check = xckpt.compare(mean, "out.safetensors").ckpt.table()
        assert check["status"].tolist() == ["same"]

    def test_sums_that_a_small_type_cannot_hold_are_an_error(self) -> None:
        save({self.IDS: np.array([[200]], "u1")}, "a.safetensors")
        ds = xckpt.open("a.safetensors")
        hint = r"position_ids'.* is 400, which uint8 cannot hold.*astype"
        with pytest.raises(UnsupportedError, match=hint):
            (ds + ds).ckpt.save("out.safetensors")
        (ds.astype("int64") + ds).ckpt.save("out.safetensors")
        assert xckpt.open("out.safetensors")[self.IDS].values.tolist() == [[400]]
        (ds + ds).astype("uint8").ckpt.save("wrapped.safetensors")
        assert xckpt.open("wrapped.safetensors")[self.IDS].values.tolist() == [[144]]

    @pytest.mark.parametrize("write", ["arithmetic", "merge"])
    def test_differences_that_truth_values_cannot_hold_are_an_error(self, write: str) -> None:
        for name, mask in (("a", [True, False]), ("b", [True, True])):
            save({"m.mask": np.array(mask)}, f"{name}.safetensors")
        a, b = xckpt.open("a.safetensors"), xckpt.open("b.safetensors")
        result = a.ckpt.merge(2 * (a - b)) if write == "merge" else a - b
        with pytest.raises(UnsupportedError, match=r"'m\.mask'.* is -\d.*, which bool cannot hold"):
            result.ckpt.save("out.safetensors")
        (a - b).astype("bool").ckpt.save("astype.safetensors")
        assert xckpt.open("astype.safetensors")["m.mask"].values.tolist() == [False, True]

    @pytest.mark.parametrize("dtype", ["i4", "u4"])
    def test_sums_of_32_bits_do_not_wrap_around(self, dtype: str) -> None:
        largest = int(np.iinfo(dtype).max)
        save({self.IDS: np.array([[largest, 3]], dtype)}, "x.safetensors")
        x = xckpt.open("x.safetensors")
        assert (x + x)[self.IDS].values.tolist() == [[2 * largest, 6]]
        with pytest.raises(UnsupportedError, match=rf"is {2 * largest}, which u?int32 cannot hold"):
            (x + x).ckpt.save("out.safetensors")
        mean = (x + x + x) / 3
        mean.ckpt.save("mean.safetensors")
        saved = xckpt.open("mean.safetensors")[self.IDS]
        assert saved.dtype == np.dtype(dtype)
        assert saved.values.tolist() == mean[self.IDS].values.tolist() == [[largest, 3]]

    @pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "?"])
    @pytest.mark.parametrize("name", ["iadd", "isub", "imul", "ipow"])
    def test_operators_in_place_compute_what_others_do(self, dtype: str, name: str) -> None:
        in_place = getattr(operator, name)
        largest = 1 if dtype == "?" else np.iinfo(dtype).max
        save({self.IDS: np.array([[largest]], dtype)}, "x.safetensors")
        expected = getattr(operator, name[1:])(xckpt.open("x.safetensors"), 2)[self.IDS]
        whole, element, array = (xckpt.open("x.safetensors") for _ in range(3))
        whole = in_place(whole, 2)
        element[self.IDS] = in_place(element[self.IDS], 2)
        in_place(array[self.IDS], 2)
        for ds in (whole, element, array):
            assert ds[self.IDS].dtype == expected.dtype
            assert ds[self.IDS].values.tolist() == expected.values.tolist()

    ASSIGNED: ClassVar[dict[str, Callable[[Any], None]]] = {
        "in place": lambda ids: operator.setitem(ids, SLICE, ids[SLICE].__iadd__(200)),
        "product": lambda ids: operator.setitem(ids, SLICE, ids[SLICE] * 3),
        "number": lambda ids: operator.setitem(ids, SLICE, 300),
        "array": lambda ids: operator.setitem(ids, SLICE, np.array([[300]])),
        "by name": lambda ids: operator.setitem(ids, {ids.dims[1]: 0}, ids[0, 0] + 200),
    }

    @pytest.mark.parametrize("from_file", [True, False], ids=["file", "mapping"])
    @pytest.mark.parametrize("assign", ASSIGNED.values(), ids=ASSIGNED)
    def test_assigned_integers_do_not_wrap_around(
        self, assign: Callable[[Any], None], from_file: bool
    ) -> None:
        values = {self.IDS: np.array([[100, 2]], "i1")}
        save(values, "x.safetensors")
        ds = xckpt.open("x.safetensors") if from_file else xckpt.open(values)
        assign(ds[self.IDS])
        assert ds[self.IDS].values.tolist() == [[300, 2]]
        with pytest.raises(UnsupportedError, match="is 300, which int8 cannot hold"):
            ds.ckpt.save("out.safetensors")
        ds[self.IDS][0, :1] = ds[self.IDS][0, :1] - 299
        ds.ckpt.save("out.safetensors")
        saved = xckpt.open("out.safetensors")[self.IDS]
        assert saved.dtype == np.int8
        assert saved.values.tolist() == [[1, 2]]

    def test_assigned_integers_that_fit_keep_the_type_and_the_memory(self) -> None:
        array = np.array([[100, 2]], "i1")
        ds = xckpt.open({self.IDS: array})
        ds[self.IDS][0, 0] = 3
        assert ds[self.IDS].dtype == np.int8
        assert array.tolist() == [[3, 2]]
        save({self.IDS: array}, "x.safetensors")
        ds = xckpt.open("x.safetensors")
        ds[self.IDS][0, 0] = 4
        assert ds[self.IDS].dtype == np.int8
        assert ds[self.IDS].values.tolist() == [[4, 2]]

    def test_arithmetic_of_mappings_has_the_types_of_that_of_files(self) -> None:
        weight = np.array([[1, 3e4], [1 / 3, 2]], "f4")
        state = {
            "fc.weight": weight.astype(ml_dtypes.bfloat16),
            "half.weight": np.full((2, 2), 6e4, "f2"),
            self.COUNTER: np.array(101),
            self.IDS: np.array([[200, 1]], "u1"),
            "m.mask": np.array([True, False]),
        }
        save(state, "state.safetensors")
        opened, file = xckpt.open(state), xckpt.open("state.safetensors")
        assert opened["fc.weight"].dtype == ml_dtypes.bfloat16
        opened.ckpt.save("same.safetensors")
        assert (xckpt.compare(state, "same.safetensors").ckpt.table()["status"] == "same").all()
        results: list[Callable[[Any], Any]] = [
            lambda x: (x + x) / 2,
            lambda x: 0.5 * x + 0.5 * x,
            lambda x: x + x - x,
            lambda x: x - 0 * file,
        ]
        for compute in results:
            of_state, of_file = compute(opened), compute(file)
            of_state.ckpt.save("state-out.safetensors", overwrite=True)
            of_file.ckpt.save("file-out.safetensors", overwrite=True)
            a, b = (xckpt.open(f"{name}-out.safetensors") for name in ("state", "file"))
            for name in state:
                assert a[name].dtype == b[name].dtype
                np.testing.assert_array_equal(a[name], b[name])
                np.testing.assert_array_equal(of_state[name], of_file[name])
        assert np.isfinite((opened + opened)["half.weight"]).all()
        with pytest.raises(UnsupportedError, match="is 400, which uint8 cannot hold"):
            (opened + opened).ckpt.save("wrapped.safetensors")
        with pytest.raises(UnsupportedError, match="is -1, which bool cannot hold"):
            (opened - 1)[["m.mask"]].ckpt.save("wrapped.safetensors")
        with pytest.warns(CheckpointWarning, match=r"float\(factor\).*: 'fc\.weight'"):
            (opened * np.float64(0.5))[["fc.weight"]].ckpt.save("wide.safetensors")
        with pytest.warns(CheckpointWarning, match=r"1 element rounded to int64.*num_batches"):
            (opened / 2)[[self.COUNTER]].ckpt.save("half.safetensors")
        changed = xckpt.open(state)
        changed[self.IDS] += 100
        assert changed[self.IDS].values.tolist() == [[300, 101]]
        assert state[self.IDS].tolist() == [[200, 1]]

    def test_computed_nan_is_counted_and_named(self) -> None:
        a, b, c = self.opened()
        for result in (a.where(a > 1.2), b.where(b > 2), xr.concat([a, c], "n").shift(n=1)):
            text = r"16 computed elements NaN, unlike the sources: 'fc\.weight'"
            with pytest.warns(CheckpointWarning, match=text):
                result[["fc.weight"]].ckpt.save("out.safetensors", overwrite=True)
            options: Any = {"overwrite": True, "compute": False}
            later = result[["fc.weight"]].ckpt.save("out.safetensors", **options)
            with pytest.warns(CheckpointWarning, match=text):
                later.compute()
        save({"fc.weight": np.array([1, np.nan], "f4")}, "stored.safetensors")
        (2 * xckpt.open("stored.safetensors")).ckpt.save("out.safetensors", overwrite=True)

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda ds: 1 / ds, "1 computed element infinite"),
            (lambda ds: ds * np.float32(1e39), "3 computed elements NaN or infinite"),
            (lambda ds: np.exp(ds * 1e5), "2 computed elements infinite"),
        ],
        ids=["inverse", "factor", "exponential"],
    )
    @pytest.mark.filterwarnings("ignore:overflow", "ignore:divide", "ignore:invalid")
    def test_computed_infinities_are_counted_and_named(self, make: Any, text: str) -> None:
        save({"fc.weight": np.array([0, 1, 2], "f4")}, "finite.safetensors")
        with pytest.warns(CheckpointWarning, match=rf"{text}, unlike the sources: 'fc\.weight'"):
            make(xckpt.open("finite.safetensors")).ckpt.save("out.safetensors")
        save({"fc.weight": np.array([0, np.inf, -np.inf], "f4")}, "mask.safetensors")
        mask = xckpt.open("mask.safetensors")
        (2 * mask).ckpt.save("out.safetensors", overwrite=True)
        with pytest.warns(CheckpointWarning, match="2 computed elements NaN, unlike the sources"):
            (mask - mask).ckpt.save("out.safetensors", overwrite=True)

    @pytest.mark.filterwarnings("ignore:.*scales is missing")
    def test_codes_become_floats(self) -> None:
        save({"fc.qweight": np.arange(4, dtype="i4")}, "codes.safetensors")
        (xckpt.open("codes.safetensors") / 2).ckpt.save("out.safetensors")
        assert xckpt.open("out.safetensors")["fc.qweight"].values.tolist() == [0, 0.5, 1, 1.5]

    def test_dtype_is_the_type_of_floats(self) -> None:
        a, _, c = self.opened()
        for ds in (a, (a + c) / 2):
            types = self.types(ds, dtype="float16", cast="allow")
            assert types == ("float16", "int64", "int64")
        xckpt.convert("0.safetensors", "new.safetensors", dtype="float32")
        assert xckpt.read_index("new.safetensors")[self.COUNTER].dtype == "int64"
        every = {"*": {"dtype": "float32"}}
        assert self.types(a, encoding=every) == ("float32",) * 3

    def test_a_cast_of_decoded_values_is_written(self) -> None:
        a = self.opened()[0]
        assert self.types(a)[0] == "bfloat16"
        assert self.types(a.astype("float32"))[0] == "float32"
        assert self.types(a.drop_encoding())[0] == "float32"
        assert self.types(a.astype("bfloat16"))[0] == "bfloat16"

    def test_numpy_scalars_make_float64_with_a_warning(self) -> None:
        a, _, c = self.opened()
        weights = np.array([0.5, 0.5])
        mixed = weights[0] * a + weights[1] * c
        with pytest.warns(CheckpointWarning, match=r"float\(factor\).*: 'fc\.weight'$"):
            assert self.types(mixed)[0] == "float64"
        assert self.types(mixed, dtype="float32", cast="allow")[0] == "float32"
        assert self.types((a + c).astype("float64"))[0] == "float64"

    def test_vectors_of_float64_make_float64_with_a_warning(self) -> None:
        Path("run").mkdir()
        for n in (1, 2):
            tensors = {f"layers.{k}.fc.weight": np.full((4, 4), n, "f4") for k in range(2)}
            save(tensors, f"run/step-{n}.safetensors")
        stack, run = xckpt.open("run/step-1.safetensors", stack=True), xckpt.open_steps("run")
        of_layers = xr.DataArray(np.array([0.5, 1]), dims="layers")
        of_steps = of_layers.rename(layers="step")
        wide: dict[str, Any] = {
            "layers": lambda dtype: stack.assign((stack * of_layers.astype(dtype)).data_vars),
            "sum": lambda dtype: (run * of_steps.astype(dtype)).sum("step"),
            "dot": lambda dtype: run.map(xr.dot, args=(of_steps.astype(dtype),), dim="step"),
        }
        for make in wide.values():
            text = r"vectors of float64.*: 'layers\.0\.fc\.weight', 'layers\.1\.fc\.weight'$"
            with pytest.warns(CheckpointWarning, match=text):
                make("f8").ckpt.save("out.safetensors", overwrite=True)
            make("f4").ckpt.save("out.safetensors", overwrite=True)
        for chosen in (run.astype("f8").sum("step"), (run * 2).quantile(0.5, "step")):
            chosen.ckpt.save("out.safetensors", overwrite=True)

    @pytest.mark.parametrize("dtype", ["?", "u1", "i1", "i2"])
    @pytest.mark.parametrize("stored", ["bfloat16", "float32"])
    def test_masks_keep_the_type_of_floats(self, dtype: str, stored: str) -> None:
        weight = np.array([[0.5, -1, 2]])
        mask = np.array([[1, 0, 1]]).astype(dtype)
        save({"fc.weight": weight.astype(stored)}, "w.safetensors")
        save({"fc.weight": mask}, "mask.safetensors")
        w, m = xckpt.open("w.safetensors"), xckpt.open("mask.safetensors")
        values = xckpt.open({"fc.weight": weight.astype(stored)})
        in_place = xckpt.open("w.safetensors")
        in_place *= m
        for ds in (
            w * m,
            m * w,
            w * (abs(w) != 1),
            values * m,
            w * xckpt.open({"fc.weight": mask}),
            in_place,
        ):
            assert ds["fc.weight"].dtype == np.float32
            ds.ckpt.save("out.safetensors", overwrite=True)
            saved = xckpt.open("out.safetensors")["fc.weight"]
            assert saved.encoding["stored_dtype"] == np.float32
            assert saved.values.tolist() == [[0.5, 0, 2]]
        third = xckpt.open({"fc.weight": np.full((1, 3), 1 / 3, "f4")})
        chain = (w * third) * m * third + w
        chain.ckpt.save("out.safetensors", overwrite=True)
        check = xckpt.compare(chain, "out.safetensors").ckpt.table()
        assert check["status"].tolist() == ["same"]
        for ds in (m + m, m * (m + m)):
            assert ds["fc.weight"].dtype == np.int64

    def test_tensors_of_torch_are_no_operands(self) -> None:
        torch = pytest.importorskip("torch")
        save({"fc.weight": np.ones((2, 2), "f4")}, "w.safetensors")
        ds: Any = xckpt.open("w.safetensors")
        factor = torch.tensor(0.5)
        state: Any = {"fc.weight": torch.ones(2, 2)}
        for operand in (factor, state):
            with pytest.raises(TypeError, match=r"xckpt\.open\(state_dict\).*float\(tensor\)"):
                operator.add(ds, operand)
        with pytest.raises(TypeError, match=r"xckpt\.open\(state_dict\)"):
            operator.mul(factor, ds)
        result = xckpt.open(state) + ds * 0.5
        assert result["fc.weight"].values.tolist() == [[1.5, 1.5], [1.5, 1.5]]

    def test_merged_sums_are_rounded_once(self) -> None:
        a, _, c = self.opened()
        merged = a.ckpt.merge((c - a).ckpt.find("fc.*") / 3)
        exact = np.float32(1) + np.float32(0.5) / np.float32(3)
        assert self.types(merged, dtype="float32")[0] == "float32"
        assert float(xckpt.open("out.safetensors")["fc.weight"][0, 0]) == float(exact)
        assert self.types(merged)[0] == "bfloat16"
        rounded = float(exact.astype(ml_dtypes.bfloat16))
        assert float(merged["fc.weight"][0, 0]) == rounded
        assert float(xckpt.open("out.safetensors")["fc.weight"][0, 0]) == rounded

    def test_merged_sums_in_stacks_are_rounded_once(self) -> None:
        names = [f"layers.{n}.fc.weight" for n in range(2)]
        xckpt.save(dict.fromkeys(names, np.ones((2, 2), ml_dtypes.bfloat16)), "m.safetensors")
        change = np.full((2, 2), 0.5 / 3, "f4")
        merged = xckpt.open("m.safetensors", stack=True).ckpt.merge({names[1]: change})
        assert merged["layers.fc.weight"].dims[0] == "layers"
        for obj in (merged, merged.ckpt.unstack()):
            obj.ckpt.save("o.safetensors", dtype="float32", overwrite=True)
            saved = xckpt.open("o.safetensors")
            np.testing.assert_array_equal(saved[names[1]], 1 + change)
            np.testing.assert_array_equal(saved[names[0]], 1)
            obj.ckpt.save("o.safetensors", overwrite=True)
            assert xckpt.open("o.safetensors")[names[1]].encoding["stored_dtype"] == "bfloat16"

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_a_chain_of_merges_is_not_rounded_before_another_type(self, dtype: str) -> None:
        a, _, c = self.opened()
        change = (c - a).ckpt.find("fc.*") * 0.001
        merged, exact = a, np.float32(1)
        sequence = np.ones((), ml_dtypes.bfloat16)
        for _ in range(8):
            merged = merged.ckpt.merge(change)
            exact += np.float32(0.5) * np.float32(0.001)
            sequence = (np.float32(sequence) + np.float32(0.0005)).astype(ml_dtypes.bfloat16)
        assert self.types(merged, dtype=dtype)[0] == dtype
        assert float(xckpt.open("out.safetensors")["fc.weight"][0, 0]) == float(exact)
        assert self.types(merged)[0] == "bfloat16"
        assert float(xckpt.open("out.safetensors")["fc.weight"][0, 0]) == float(sequence)
        rounded = merged.assign({"fc.weight": merged["fc.weight"] + 0}).ckpt.merge(change)
        assert self.types(rounded, dtype=dtype)[0] == dtype  # what was changed is no sum of merges
        assert float(xckpt.open("out.safetensors")["fc.weight"][0, 0]) == np.float32(1.0005)

    WRITERS: ClassVar[dict[str, Any]] = {
        "convert": lambda _, **how: xckpt.convert("large.safetensors", "o.safetensors", **how),
        "save": lambda ds, **how: (ds * 1).ckpt.save("o.safetensors", **how),
        "delayed": lambda ds, **how: (
            (ds * 1).ckpt.save("o.safetensors", compute=False, **how).compute()
        ),
        "loaded": lambda ds, **how: ds.load().ckpt.save("o.safetensors", **how),
        "sharded": lambda ds, **how: (ds * 1).ckpt.save("o.safetensors", max_shard_size=10, **how),
    }

    @pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
    @pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
    def test_values_that_become_infinite_are_counted(self, dtype: str, write: Any) -> None:
        w = np.array([1e5, 1, np.inf, np.nan, -7e4, 0], "f4")
        save({"w": w, "v": np.full((3, 3), 3e38, "f4"), "fine": w[1:2]}, "large.safetensors")
        text = f"11 elements too large for {dtype} written as infinity or NaN: '[vw]', '[vw]';"
        with pytest.warns(CheckpointWarning, match=text):
            write(xckpt.open("large.safetensors"), dtype=dtype, cast="allow")

    @pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
    @pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
    def test_tensors_of_which_most_values_become_zero_are_named(
        self, dtype: str, write: Any
    ) -> None:
        w = np.array([1e-12, 1, -0.0, np.nan, -1e-9, 1e-12, 0], "f4")
        half = np.array([1e-12, 1], "f4")
        save({"w": w, "v": np.full((3, 3), 1e-30, "f4"), "half": half}, "large.safetensors")
        text = f"most values of 2 tensors are too small for {dtype} .* zero: '[vw]', '[vw]'$"
        with pytest.warns(CheckpointWarning, match=text):
            write(xckpt.open("large.safetensors"), dtype=dtype, cast="allow")

    @pytest.mark.parametrize("dtype", ["f4", "f8", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
    def test_infinities_of_the_source_are_no_loss(self, dtype: Any) -> None:
        save({"w": np.array([np.inf, np.nan, 1], dtype)}, "large.safetensors")
        xckpt.convert("large.safetensors", "out.safetensors", dtype="float16", cast="allow")

    def test_nothing_in_common_is_an_error(self) -> None:
        save(xr.Dataset({"other": ("x", np.ones(3))}, attrs={"config": "x"}), "o.safetensors")
        with pytest.raises(ValueError, match="no tensors: arithmetic keeps only those"):
            (xckpt.open("o.safetensors") + self.opened()[0]).ckpt.save("out.safetensors")
