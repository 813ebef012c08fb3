"""`compare(explain=True)` names the cause of each difference, and only true causes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.sources import CountingSource
from tests.stats.burn import llama
from tests.stats.causes import BF16, Made, made, outcome_of, rope
from tests.stats.checkpoints import model, write
from tests.stats.oracle import is_so, random_pair
from xckpt import formats
from xckpt.comparison.relations.quantisers import REPEATED
from xckpt.datasets.making import make_dataset
from xckpt.datasets.options import OpenOptions

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, np.dtype[Any]]


def dataset(tensors: dict[str, Array], chunk: int | None = None) -> xr.Dataset:
    variables = {}
    for name, values in tensors.items():
        array: Any = values if chunk is None else da.from_array(values, chunks=chunk)
        variables[name] = ([f"{name} {axis}" for axis in range(values.ndim)], array)
    return xr.Dataset(variables)


def explained(a: Any, b: Any, **options: Any) -> pd.DataFrame:
    return xckpt.table(xckpt.compare(a, b, explain=True, cache=False, **options))


@pytest.fixture(scope="module")
def models() -> list[Made]:
    return [made(64, 96, 0), made(48, 32, 1), made(32, 64, 2)]


@pytest.fixture(scope="module")
def both(models: list[Made], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write one checkpoint of more than 200 tensors, and what was made of it."""
    folder = tmp_path_factory.mktemp("causes")
    ours = {f"{n}/{name}": x for n, case in enumerate(models) for name, x in case.a.items()}
    theirs = {f"{n}/{name}": x for n, case in enumerate(models) for name, x in case.b.items()}
    assert len(ours) >= 200, len(ours)
    return write(folder / "a.safetensors", ours), write(folder / "b.safetensors", theirs)


@pytest.fixture(scope="module")
def table(both: tuple[Path, Path]) -> pd.DataFrame:
    return explained(*both)


class TestCause:
    def test_is_the_only_one_named(self, models: list[Made], table: pd.DataFrame) -> None:
        expected = {f"{n}/{k}": v for n, case in enumerate(models) for k, v in case.causes.items()}
        assert table["cause"].to_dict() == expected

    def test_decides_the_outcome(self, table: pd.DataFrame) -> None:
        expected = {name: outcome_of(name, cause) for name, cause in table["cause"].items()}
        assert table["outcome"].to_dict() == expected
        assert table["verified"].equals(table["outcome"] == "explained")

    def test_has_its_own_parameters_only(self, models: list[Made], table: pd.DataFrame) -> None:
        for number, case in enumerate(models):
            for name, parameters in case.parameters.items():
                row = table.loc[f"{number}/{name}"]
                for column, value in parameters.items():
                    if column == "other_names":
                        names = {f"{number}/{n}" for n in value.split(", ")}
                        assert set(row[column].split(", ")) == names, name
                    else:
                        assert row[column] == value, name
                absent = {"offset", "scale", "rank", "heads"} - set(parameters)
                present = [c for c in absent if row[c] == row[c]]
                assert present == (["scale"] if "scaled" in row["cause"] and present else []), name

    def test_has_a_sentence_with_numbers(self, table: pd.DataFrame) -> None:
        sentences = table["explanation"].str.replace(r"\d/", "", regex=True)
        assert sentences["0/rounded.bfloat16"] == "b is a rounded to bfloat16"
        assert sentences["0/rounded.float16.back"] == "a is b rounded to float16"
        assert sentences["0/offset"] == "b is a + 1"
        assert sentences["0/padded"] == "equal after adding 5 rows of zeros"
        assert sentences["0/pruned"].startswith("b is a where b is not 0, which ")
        assert sentences["0/transposed.rounded"] == "b is a rounded to bfloat16, after transposing"
        assert sentences["0/rope.4.q_proj"] == (
            "equal after permuting rows as for rotary embeddings (4 heads, halves interleaved)"
        )
        assert sentences["0/fused.whole"] == (
            "'fused.0', 'fused.1', 'fused.2' of a, one after the other along the rows"
        )
        assert sentences["0/renamed_.a"] == "equal to 'renamed_.b' of b"


def test_an_unrelated_copy_is_changed_and_nothing_else(tmp_path: Path) -> None:
    a = write(tmp_path / "a.safetensors", made(64, 96, 0).a)
    rng = np.random.default_rng(5)
    unrelated = {
        n: np.asarray(rng.standard_normal(x.shape)).astype(x.dtype)
        for n, x in made(64, 96, 0).a.items()
    }
    result = xckpt.compare(a, write(tmp_path / "b.safetensors", unrelated), explain=True)
    assert set(xckpt.table(result)["cause"]) == {"unknown"}
    assert not xckpt.table(result)["verified"].any()
    count = len(unrelated)
    assert result.attrs["explanation"].startswith(f"{count} of {count} tensors differ: '")


class TestSingleChangedElement:
    """Makes a cause no fact any more."""

    @pytest.mark.parametrize("at", ["beginning", "middle", "end"])
    def test_is_not_explained_away(self, models: list[Made], at: str) -> None:
        ours, theirs = models[1].a, {}
        # New rows may hold anything, and these pairs are not compared element by element.
        inexact = ("changed", "padded", "low_rank", "quantised")
        for name in models[1].b.keys() & ours.keys():
            if not name.startswith(inexact):
                values = models[1].b[name].copy()
                place = {"beginning": 0, "middle": values.size // 2 + 1, "end": -1}[at]
                values.reshape(-1)[place] += values.dtype.type(3)
                theirs[name] = values
        table = explained(dataset({name: ours[name] for name in theirs}), dataset(theirs))
        facts = table[table["verified"]]
        assert len(table) > 40
        assert facts.empty, facts[["cause", "explanation"]].to_string()

    def test_is_mentioned_with_its_share(self) -> None:
        x = np.random.default_rng(0).standard_normal((50, 40)).astype(np.float32)
        y = x.astype(BF16)
        y[7, 7] = 5
        row = explained(dataset({"w": x}), dataset({"w": y})).loc["w"]
        assert (row["outcome"], row["cause"]) == ("changed", "unknown")
        assert not row["verified"]
        assert row["explanation"] == (
            "looks like: b is a rounded to bfloat16 for 99.95 % of the elements, "
            "and not for 1 of 2,000"
        )


class TestWholeModels:
    def test_equal_models(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m.safetensors", model())
        result = xckpt.compare(path, path, explain=True)
        assert result.attrs["explanation"] == "all 10 tensors are equal"
        assert set(xckpt.table(result)["cause"]) == {"equal"}

    def test_models_equal_after_conversion(self) -> None:
        rng = np.random.default_rng(0)
        a = {f"w{n}": rng.standard_normal((8, 6)).astype(np.float32) for n in range(3)}
        b = {"w0": a["w0"], "w1": a["w1"].T.copy(), "v": a["w2"]}
        result = xckpt.compare(dataset(a), dataset(b), explain=True)
        assert result.attrs["explanation"] == (
            "all 3 tensors are equal after: 1 transposed, 1 renamed, 1 equal as it is"
        )

    def test_tensors_tied_on_one_side(self) -> None:
        weight = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
        almost = weight.copy()
        almost[-1, -1] += 1
        tied = {"embed": weight, "head": weight, "almost": almost, "zeros": np.zeros_like(weight)}
        for ours, theirs, side in (
            (tied, {"embed": weight}, "a"),
            ({"embed": weight}, tied, "b"),
        ):
            result = xckpt.compare(dataset(ours), dataset(theirs), explain=True)
            table = xckpt.table(result).drop("embed")
            assert set(table["cause"]) == {f"only_{side}"}
            explanations = table["explanation"]
            assert explanations.pop("head") == f"its numbers are those of 'embed' of {side}"
            assert explanations.str.startswith("no tensor with these numbers was found").all()

    def test_unrelated_models(self) -> None:
        a = {"w": np.arange(6.0)}
        b = {"v": np.arange(12.0).reshape(3, 4) - 100, "u": np.ones(3)}
        result = xckpt.compare(dataset(a), dataset(b), explain=True)
        assert result.attrs["explanation"] == (
            "a and b share nothing: no name, and no numbers were found, of the 1 tensor of a "
            "and the 2 tensors of b"
        )
        assert xckpt.table(result)["cause"].tolist() == ["only_a", "only_b", "only_b"]

    @pytest.mark.parametrize("sides", [({}, {}), ({}, {"w": np.ones(3)}), ({"w": np.ones(3)}, {})])
    def test_empty_models(self, sides: tuple[dict[str, Array], dict[str, Array]]) -> None:
        result = xckpt.compare(dataset(sides[0]), dataset(sides[1]), explain=True)
        assert result.attrs["explanation"].startswith("a and b share nothing")


class TestResult:
    def test_is_shown_with_the_sentence_first(self, both: tuple[Path, Path]) -> None:
        ds = xr.open_dataset(both[0], engine="safetensors")
        result = ds.ckpt.compare(both[1], explain=True)
        lines = repr(result.ckpt).splitlines()
        assert len(lines) <= 20
        body = " ".join(lines[1:])
        assert body.startswith(result.attrs["explanation"])
        assert " in a" in body.removeprefix(result.attrs["explanation"])
        few = ds.ckpt.compare(both[1], explain=True, tensors="0/rope.scaled.q_proj")
        body = " ".join(repr(few.ckpt).splitlines()[1:])
        assert body.startswith(few.attrs["explanation"])
        assert "cause" in body.removeprefix(few.attrs["explanation"])

    def test_has_lists_along_stacked_dimensions(self, tmp_path: Path) -> None:
        a = write(tmp_path / "a.safetensors", model())
        changed = model() | {"layers.1.w": model()["layers.1.w"] + model()["layers.1.w"]}
        b = write(tmp_path / "b.safetensors", changed)
        ds = xr.open_dataset(a, engine="safetensors", stack=True)
        result = ds.ckpt.compare(b, explain=True)
        assert result["layers.w"].attrs["cause"] == ["equal", "scaled", "equal"]
        assert result["embed"].attrs["cause"] == "equal"
        np.testing.assert_array_equal(result["layers.w"].attrs["scale"], [np.nan, 2, np.nan])
        assert xckpt.table(result).loc["layers.1.w", "scale"] == 2
        # Selected layers no longer have their positions.
        assert xckpt.table(result.isel(layers=[1]))["cause"].tolist().count("") == 2

    def test_has_no_explanation_by_default(self, both: tuple[Path, Path]) -> None:
        result = xckpt.compare(*both)
        assert "explanation" not in result.attrs
        assert "cause" not in xckpt.table(result)

    def test_cannot_be_deferred(self, both: tuple[Path, Path]) -> None:
        with pytest.raises(ValueError, match="leave out dim and compute=False"):
            xckpt.compare(*both, explain=True, compute=False)

    def test_counts_bytes(self, both: tuple[Path, Path]) -> None:
        reports: list[tuple[int, int]] = []
        xckpt.compare(
            *both, explain=True, cache=False, progress=lambda *nbytes: reports.append(nbytes)
        )
        assert reports[-1][0] == reports[-1][1] > 0


@pytest.mark.parametrize("chunk", [15, 64])
def test_dask_arrays(models: list[Made], chunk: int) -> None:
    names = ("rounded.f", "offset", "transposed.r", "rope.2", "padded", "renamed_c", "low", "fused")
    ours = {n: x for n, x in models[1].a.items() if n.startswith(names)}
    theirs = {n: x for n, x in models[1].b.items() if n.startswith(names)}
    table = explained(dataset(ours, chunk), dataset(theirs, chunk))
    expected = {n: models[1].causes[n] for n in {**ours, **theirs}}
    assert table["cause"].to_dict() == expected


def test_a_coarser_computation_type_is_mentioned() -> None:
    x = np.arange(1, 40, dtype=np.int8)
    y = (x + np.float32(0.1)).astype(np.float64)
    row = explained(dataset({"w": x}), dataset({"w": y})).loc["w"]
    assert row["explanation"] == "b is a + 0.1 rounded to float32"


def test_special_numbers() -> None:
    x = np.array([[1, np.nan, -0.0, np.inf], [5, 6, 7, 8]], np.float32)
    y = np.array([[1, np.nan, 0.0, np.inf], [5, 6, 7, 8]], np.float32)
    a = {"w": x, "only": x + 9}
    table = explained(dataset(a), dataset({"w": np.ascontiguousarray(y.T), "other": y + 9}))
    assert table["cause"].to_dict() == {"w": "transposed", "only": "renamed", "other": "renamed"}


def test_names_are_escaped() -> None:
    x = np.arange(12, dtype=np.float32)
    table = explained(dataset({"w": x}), dataset({"\x1b[31m<b>": x}))
    assert "\x1b" not in table.loc["w", "explanation"]


def test_explanations_of_random_pairs_are_true() -> None:
    assert not untrue(np.random.default_rng(7), 400)


def untrue(rng: np.random.Generator, count: int) -> list[Any]:
    """Return what is wrongly stated as a fact of random pairs."""
    pairs = [random_pair(rng) for _ in range(count)]
    a = dataset({f"t{n}": pair[0] for n, pair in enumerate(pairs)})
    b = dataset({f"t{n}": pair[1] for n, pair in enumerate(pairs)})
    table = explained(a, b, progress=False)
    wrong = []
    for n, (x, y) in enumerate(pairs):
        row = table.loc[f"t{n}"]
        partner_name = row["other_names"]
        if not row["verified"] or ", " in partner_name:
            continue
        partner = y if not partner_name else pairs[int(partner_name[1:])][1]
        if not is_so(row, x, partner):
            wrong.append((x, partner, row["cause"], row["explanation"]))
    return wrong


def test_a_cluster_gives_the_same_explanations(models: list[Made], tmp_path: Path) -> None:
    distributed: Any = pytest.importorskip("distributed")
    names = ("rounded.b", "offset", "transposed", "rope.2", "low_rank", "renamed_", "fused.c")
    sides: list[Path] = []
    for side in (models[2].a, models[2].b):
        chosen = {n: x for n, x in side.items() if n.startswith(names)}
        sides.append(write(tmp_path / f"{len(sides)}.safetensors", chosen))
    local = explained(*sides)
    with distributed.Client(n_workers=1, processes=False, dashboard_address=":0"):
        on_cluster = explained(*sides)
    assert len(local) > 30
    assert local.equals(on_cluster)


def test_a_model_converted_for_llama_cpp_is_explained(tmp_path: Path) -> None:
    gguf: Any = pytest.importorskip("gguf")
    layers, width, heads = 2, 64, 4
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (90, width), "lm_head": (90, width), "model.norm": (width,)}
    for layer in range(layers):
        base = f"model.layers.{layer}"
        shapes |= {f"{base}.self_attn.{role}_proj": (width, width) for role in "qkvo"}
        shapes |= {f"{base}.mlp.{role}_proj": (96, width) for role in ("gate", "up")}
        shapes[f"{base}.mlp.down_proj"] = (width, 96)
        shapes |= {f"{base}.{n}_layernorm": (width,) for n in ("input", "post_attention")}
    ours = {f"{n}.weight": rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    name_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    expected = {}
    for name, values in ours.items():
        new = name_map.get_name(name, try_suffixes=(".weight",))
        is_turned = "q_proj" in name or "k_proj" in name
        made_of = rope(values, heads) if is_turned else values
        cause = "renamed" if values.ndim == 1 else "renamed+rounded"
        cause = "renamed+rope_permuted+rounded" if is_turned else cause
        writer.add_tensor(new, made_of if values.ndim == 1 else made_of.astype(np.float16))
        expected[name] = cause, new
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path = write(tmp_path / "hf.safetensors", ours)
    for names in (None, "auto"):
        result = xckpt.compare(path, tmp_path / "m.gguf", names=names, explain=True)
        table = xckpt.table(result).loc[list(ours)]
        assert {n: (row["cause"], row["other_names"]) for n, row in table.iterrows()} == expected
        assert table["verified"].all()
        assert set(table["heads"].dropna()) == {heads}
        assert result.attrs["explanation"].startswith(f"all {len(ours)} tensors are explained")


@pytest.mark.parametrize("names", [None, "auto"])
@pytest.mark.parametrize(("written", "rounded"), [("llama", ""), ("llama-f16", "+rounded")])
def test_a_model_converted_for_burn_is_explained(
    written: str, rounded: str, names: Any, tmp_path: Path
) -> None:
    ours = llama.tensors()
    path = write(tmp_path / "hf.safetensors", ours)
    burn = Path(llama.__file__).with_name(f"{written}.bpk")
    result = xckpt.compare(path, burn, names=names, explain=True)
    table = xckpt.table(result).loc[list(ours)]
    assert table["verified"].all()
    assert result.attrs["explanation"].startswith(f"all {len(ours)} tensors are ")
    expected = {n: f"renamed{rounded}" if "norm" in n else f"transposed{rounded}" for n in ours}
    expected["model.embed_tokens.weight"] = rounded.removeprefix("+") or "equal"
    assert table["cause"].to_dict() == expected
    assert table.loc["model.norm.weight", "other_names"] == "model.norm.gamma"


@pytest.mark.parametrize("update", [0.4, 0.04])
def test_a_merged_and_rounded_adapter(update: float) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((384, 512)).astype(BF16)
    added = rng.standard_normal((384, 16)) @ rng.standard_normal((16, 512)) * (update / 4)
    row = explained(dataset({"w": w}), dataset({"w": (w + added).astype(BF16)})).loc["w"]
    assert (row["cause"], row["rank"]) == ("low_rank+rounded", 16)
    assert float(row["explanation"].rpartition("for ")[2].split()[0]) > 95


def test_exchanged_heads() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((32, 8, 64)).astype(np.float32)
    order = np.r_[1, 0, 2:32]
    row = explained(
        dataset({"w": w[:8].reshape(64, 64)}), dataset({"w": w[order[:8]].reshape(64, 64)})
    )
    assert row.loc["w", "cause"] == "rows_permuted"


def counted(
    folder: Path, *matrices: np.ndarray[Any, Any]
) -> tuple[list[CountingSource], list[xr.Dataset]]:
    """Return sources that count what is read of files of one matrix, and their Datasets."""
    sources = []
    for number, values in enumerate(matrices):
        path = folder / f"{number}.safetensors"
        xckpt.save({"w": values}, path)
        sources.append(CountingSource(path.read_bytes()))
    sides = [
        make_dataset(source, formats.get("safetensors").read(source), OpenOptions())
        for source in sources
    ]
    return sources, sides


def test_a_rounded_tensor_is_verified_in_the_pass_that_measures_it(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((2048, 1024), np.float32)
    sources, sides = counted(tmp_path, w, w.astype(np.float16).astype(np.float32))
    table = explained(*sides)
    assert table.loc["w", "cause"] == "rounded"
    assert max(source.nbytes_read for source in sources) < 1.2 * w.nbytes
    plain = xckpt.compare(*sides, progress=False)
    assert table.loc["w", "rel_l2"] == plain["w"].sel(statistic="rel_l2").item()


def test_a_large_matrix_with_permuted_rows_is_read_few_times(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((8192, 1024), np.float32)
    sources, sides = counted(tmp_path, w, w[rng.permutation(len(w))])
    assert explained(*sides).loc["w", "cause"] == "rows_permuted"
    assert max(source.nbytes_read for source in sources) < 5 * w.nbytes


def test_fused_tensors_do_not_match_parts_of_a_similar_name() -> None:
    pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    gate, up = rng.standard_normal((2, 24, 16)).astype(np.float32)
    a = {"model.layers.0.mlp.gate_proj.weight": gate, "model.layers.0.mlp.up_proj.weight": up}
    b = {"model.layers.0.mlp.gate_up_proj.weight": np.vstack([gate, up])}
    table = explained(dataset(a), dataset(b), names="auto")
    assert set(table["cause"]) == {"fused"}


def test_quantised_numbers_of_any_size_and_type() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = {}, {}
    for quantiser in REPEATED:
        for dtype in (np.float32, np.float16, BF16):
            for scale in (1e-5, 1e-2, 1.0, 300.0):
                name = f"{quantiser.name} {np.dtype(dtype)} {scale}"
                x = (rng.standard_normal((8, 256)) * scale).astype(np.float32)
                ours[name] = x
                theirs[name] = quantiser.round_trip(x.ravel()).reshape(x.shape).astype(dtype)
    table = explained(dataset(ours), dataset(theirs))
    unexplained = table.index[~table["cause"].str.startswith("quantised")]
    assert not len(unexplained), table.loc[unexplained, "explanation"].tolist()


@pytest.mark.parametrize("place", [1, 150_000])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_single_rounded_element(place: int, is_transposed: bool) -> None:
    # Larger numbers of bfloat16 are exact in float16; the sample of the search lacks this one.
    values = np.random.default_rng(0).choice([-0.5, 0.25, 0.75], (300, 700)).astype(BF16)
    values.reshape(-1)[place] = -7.3e-6
    rounded = values.astype("float16")
    row = explained({"w": values}, {"w": rounded.T.copy() if is_transposed else rounded}).loc["w"]
    assert row["outcome"] == "explained"
    assert row["cause"] == ("transposed+rounded" if is_transposed else "rounded")
    pruned = rounded.copy()
    pruned.reshape(-1)[-50_000::7] = 0
    assert explained({"w": values}, {"w": pruned}).loc["w", "outcome"] == "changed"
