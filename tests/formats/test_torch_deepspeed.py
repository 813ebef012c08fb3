"""Folders of DeepSpeed open as the model that `zero_to_fp32` would write, and its moments."""

from __future__ import annotations

import io
import time
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.formats import torch_files
from tests.formats.deepspeed_files import MODEL_STATES, Run, listed, ordered, size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray


def numbers(*shape: int, start: int = 1) -> NDArray[Any]:
    return (np.arange(int(np.prod(shape))) + start).reshape(shape).astype("f4")


def a_run(stage: int = 2, world: int = 2, **options: Any) -> Run:
    return Run(
        [
            {"emb.weight": numbers(11, 5), "conv.weight": numbers(2, 3, 1, 3, start=200)},
            {"emb.bias": numbers(7, start=300), "scale": np.array(2, "f4"), "b": numbers(5)},
        ],
        stage,
        world,
        {"seen": np.array(4, "i8"), "table": numbers(2, 3)},
        {"frozen.weight": numbers(3, 7).astype("f2")},
        {"head.weight": "emb.weight"},
        **options,
    )


LAYOUTS = [(1, 2), (2, 1), (2, 2), (2, 3), (2, 5), (3, 1), (3, 2), (3, 3), (3, 4)]


@pytest.mark.parametrize(("stage", "world"), LAYOUTS)
def test_the_folder_of_a_step_is_one_model(stage: int, world: int, tmp_path: Path) -> None:
    run = a_run(stage, world)
    ds = xr.open_dataset(run.write(tmp_path / "global_step10"))
    assert ds.encoding["format"] == "torch"
    assert set(ds.variables) == set(run.expected)
    for name, values in run.expected.items():
        assert ds[name].encoding["stored_dtype"] == values.dtype.name
        np.testing.assert_array_equal(ds[name].values, values)
    np.testing.assert_array_equal(ds["emb.weight"][3:9, 1], run.expected["emb.weight"][3:9, 1])
    assert ds["head.weight"].encoding["shares"] == "emb.weight"
    assert ds.attrs == {"global_steps": 10, "mp_world_size": 1}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_opens_at_its_newest_step(stage: int, tmp_path: Path) -> None:
    for step in (5, 10):
        a_run(stage).write(tmp_path / f"global_step{step}")
    (tmp_path / "latest").write_text("global_step5\n")
    # Files that the Trainer of Hugging Face writes next to a step.
    for name in ("scheduler.pt", "training_args.bin"):
        (tmp_path / name).write_bytes(torch_files.checkpoint({"w": np.ones(2, "f4")}))
    ds = xr.open_dataset(tmp_path)
    assert ds.encoding["source"] == str(tmp_path / "global_step5")
    assert xr.open_dataset(tmp_path, engine="torch").identical(ds)
    np.testing.assert_array_equal(ds["b"], numbers(5))
    steps = xckpt.open_steps(tmp_path)
    assert steps["step"].values.tolist() == [5, 10]
    assert steps["emb.weight"].shape == (2, 11, 5)


def test_the_model_next_to_the_name_of_a_step_is_preferred(tmp_path: Path) -> None:
    a_run().write(tmp_path / "global_step10")
    (tmp_path / "latest").write_text("global_step10")
    (tmp_path / "config.json").write_text("{}")
    xckpt.save(xr.Dataset({"w": ("x", np.ones(2))}), tmp_path / "model.safetensors")
    with pytest.warns(xckpt.CheckpointWarning, match="'global_step10', the latest step, is not op"):
        assert list(xckpt.open(tmp_path).variables) == ["w"]


@pytest.mark.parametrize("prefix", ["bf16_zero", "fp16_zero"])
@pytest.mark.parametrize("stage", [2, 3])
def test_prefixes_of_the_states_of_the_optimizer(prefix: str, stage: int, tmp_path: Path) -> None:
    ds = xckpt.open(a_run(stage, prefix=prefix).write(tmp_path))
    np.testing.assert_array_equal(ds["b"], numbers(5))


@pytest.mark.parametrize("options", [{"gaps": [[1, 2], [3, 0, 0]]}, {"is_elastic": True}])
def test_gaps_and_padding(options: dict[str, Any], tmp_path: Path) -> None:
    run = a_run(1, **options)
    ds = xckpt.open(run.write(tmp_path))
    for name, values in run.expected.items():
        np.testing.assert_array_equal(ds[name].values, values)


@pytest.mark.parametrize("stage", [2, 3])
def test_other_functions_take_a_folder(stage: int, tmp_path: Path) -> None:
    run = a_run(stage)
    folder = run.write(tmp_path / "run")
    joined = xckpt.join_optimizer(folder)
    np.testing.assert_array_equal(joined["b:exp_avg"], -numbers(5))
    xckpt.convert(folder, tmp_path / "m.zt")
    written = xckpt.open(tmp_path / "m.zt")
    for name, values in run.expected.items():
        np.testing.assert_array_equal(written[name].values, values)
    assert xckpt.verify(folder).ok
    assert float(xckpt.stats(folder)["b"].sel(statistic="mean")) == 3


@pytest.mark.parametrize("stage", [2, 3])
def test_a_tensor_of_several_ranks_is_examined(stage: int, tmp_path: Path) -> None:
    tensors = {f"layers.{n}.weight": np.arange(35).reshape(7, 5) + np.float32(n) for n in range(3)}
    tensors["layers.1.weight"][3, 2] = np.nan
    folder = Run([tensors], stage, 2, {}, {}, {}).write(tmp_path / "global_step10")
    frame = xckpt.findings(folder)
    assert {*zip(frame["tensor"], frame["rule"], strict=True)} >= {("layers.1.weight", "nan")}
    assert "layers.0.weight" not in set(frame["tensor"])


def test_a_single_file_is_shown_as_it_is(tmp_path: Path) -> None:
    run = a_run()
    run.write(tmp_path)
    ds = xckpt.open(tmp_path / run.optimizer_name(1))
    assert "optimizer_state_dict.single_partition_of_fp32_groups.0" in ds.variables
    assert "module.emb.weight" in xckpt.open(tmp_path / MODEL_STATES).variables


def test_opening_reads_no_values(tmp_path: Path) -> None:
    """Zeros in place of all storages change nothing but values."""
    run = a_run()
    for name, data in run.files().items():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {n: archive.read(n) for n in archive.namelist()}
        blank = {n: bytes(len(d)) if "/data/" in n else d for n, d in members.items()}
        (tmp_path / name).write_bytes(torch_files.zipped(blank))
    ds = xckpt.open(tmp_path)
    assert set(ds.variables) == set(run.expected)
    assert not ds["emb.weight"].values.any()


# --- folders that are incomplete or inconsistent --------------------------------------------------

OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def refused(folder: Path) -> xckpt.CheckpointError:
    with pytest.raises(xckpt.CheckpointError) as caught:
        xckpt.open(folder)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_rank(missing: int, tmp_path: Path) -> None:
    run = a_run(world=3)
    (run.write(tmp_path) / run.optimizer_name(missing)).unlink()
    error = refused(tmp_path)
    assert isinstance(error, xckpt.MissingShardError)
    assert (run.optimizer_name(missing) in str(error), error.rule) == (True, "Ranks")


def test_missing_states_of_the_model(tmp_path: Path) -> None:
    run = a_run(3)
    (run.write(tmp_path) / run.model_name(1)).unlink()
    assert run.model_name(1) in str(refused(tmp_path))


def test_a_rank_too_many(tmp_path: Path) -> None:
    run = a_run()
    (run.write(tmp_path) / run.optimizer_name(2)).write_bytes(run.optimizer(0))
    error = refused(tmp_path)
    assert (run.optimizer_name(2) in str(error), error.rule) == (True, "Ranks")


FLAT = "single_partition_of_fp32_groups"
SHORT = torch_files.view(torch_files.storage("0", 3), 0, (2,), (1,))
TWICE = torch_files.number(2)
CASES: dict[str, tuple[int, Any, str, str | None]] = {
    # stage, changes, rule, tensor
    "another number of ranks": (2, {1: {"partition_count": torch_files.number(3)}}, "Ranks", None),
    "no number of ranks": (2, {"optimizer": {"partition_count": b"N"}}, "Ranks", None),
    "a negative number": (
        2,
        {"optimizer": {"partition_count": b"J\xff\xff\xff\xff"}},
        "Ranks",
        None,
    ),
    "too many ranks": (
        2,
        {"optimizer": {"partition_count": torch_files.number(1 << 40)}},
        "Ranks",
        None,
    ),
    "ranks by group": (
        2,
        {"optimizer": {"partition_count": listed(TWICE, torch_files.number(1))}},
        "Ranks",
        None,
    ),
    "no groups": (2, {0: {FLAT: b"N"}}, "Groups", FLAT),
    "fewer groups": (2, {1: {FLAT: listed(SHORT)}}, "Groups", FLAT),
    "groups of other sizes": (3, {1: {"fp32_flat_groups": listed(SHORT, SHORT)}}, "Groups", None),
    "a short vector": (2, {1: {FLAT: listed(SHORT, SHORT)}}, "Flat", "emb.weight"),
    "a matrix": (
        2,
        {0: {FLAT: listed(torch_files.view(torch_files.storage("0", 2), 0, (2, 1), (1, 1)))}},
        "Flat",
        f"{FLAT}.0",
    ),
    "a text": (2, {0: {FLAT: listed(torch_files.text("x"))}}, "Flat", f"{FLAT}.0"),
    "a parameter that is too long": (
        2,
        {"model": {"param_shapes": listed(ordered({"w": size((1000,))}), ordered({}))}},
        "Flat",
        "w",
    ),
    "a parameter that is too long for ranks": (
        3,
        {"model": {"param_shapes": listed(ordered({"w": size((1000,))}))}},
        "Flat",
        "w",
    ),
    "parameters that are missing": (
        2,
        {"model": {"param_shapes": listed(ordered({"w": size((2,))}), ordered({}))}},
        "Flat",
        "param_shapes",
    ),
    "groups that are missing": (
        2,
        {"model": {"param_shapes": listed(ordered({"w": size((2,))}))}},
        "Groups",
        "param_shapes",
    ),
    "a name twice": (
        3,
        {"model": {"param_shapes": listed(*[ordered({"w": size((2,))})] * 2)}},
        "Name",
        "w",
    ),
    "a negative shape": (
        3,
        {"model": {"param_shapes": listed(ordered({"w": torch_files.sizes(-1)}))}},
        "Shape",
        "w",
    ),
    "a shape too large": (
        3,
        {"model": {"param_shapes": listed(ordered({"w": torch_files.sizes(1 << 40, 1 << 40)}))}},
        "Shape",
        "w",
    ),
    "shapes that are a number": (
        2,
        {"model": {"param_shapes": torch_files.number(1)}},
        "Shape",
        "param_shapes",
    ),
    "a frozen shape": (
        2,
        {"model": {"frozen_param_shapes": ordered({"frozen.weight": size((2, 2))})}},
        "Frozen",
        "frozen.weight",
    ),
    "a frozen piece": (
        3,
        {"model": {"frozen_param_shapes": ordered({"frozen.weight": size((99, 2))})}},
        "Frozen",
        "frozen.weight",
    ),
    "gaps of another number": (
        2,
        {"optimizer": {"param_alignment_paddings": listed(listed(TWICE), listed())}},
        "Alignment",
        None,
    ),
    "gaps beyond the end": (
        2,
        {"optimizer": {"param_alignment_paddings": listed(listed(*[torch_files.number(99)] * 2))}},
        "Flat",
        "conv.weight",
    ),
    "no state": (2, {}, "ZeRO", "optimizer_state_dict"),
}


@pytest.mark.parametrize("case", CASES)
def test_inconsistent_folders(case: str, tmp_path: Path) -> None:
    stage, changes, rule, tensor = CASES[case]
    run = a_run(stage, changes=changes)
    run.write(tmp_path)
    if case == "no state":
        other = torch_files.checkpoint({"w": np.ones(2, "f4")})
        (tmp_path / run.optimizer_name(0)).write_bytes(other)
    error = refused(tmp_path)
    assert error.rule == rule
    assert tensor is None or error.tensor == tensor
    assert "_states.pt" in str(error)


@pytest.mark.filterwarnings("ignore:.*bytes after a storage:xckpt.CheckpointWarning")
def test_a_moment_of_another_layout_is_left_out(tmp_path: Path) -> None:
    moments = torch_files.mapping({"row": SHORT, "note": torch_files.text("x")})
    state = torch_files.mapping({"state": b"}(" + torch_files.number(0) + moments + b"u"})
    run = a_run(changes={"optimizer": {"base_optimizer_state": state}})
    with pytest.warns(xckpt.CheckpointWarning, match="'row'.* layout of the weights"):
        ds = xckpt.open(run.write(tmp_path))
    assert not [name for name in ds.variables if "row" in str(name)]
    assert ds.attrs["optimizer.note"] == "x"


# --- models that cannot be joined -----------------------------------------------------------------


def test_tensor_parallel_ranks_are_shown_part_by_part(tmp_path: Path) -> None:
    run = a_run(changes={"model": {"mp_world_size": torch_files.number(2)}})
    run.write(tmp_path)
    (tmp_path / "mp_rank_01_model_states.pt").write_bytes(run.model(0))
    with pytest.warns(xckpt.CheckpointWarning, match="part by part, because the files do not"):
        ds = xckpt.open(tmp_path)
    for rank in ("00", "01"):
        np.testing.assert_array_equal(ds[f"mp_rank_{rank}.module.table"], numbers(2, 3))
    assert "tensor-parallel" in ds.attrs["parts"]


@pytest.mark.parametrize(
    ("entries", "reason"),
    [({"num_experts": listed(TWICE)}, "experts"), ({"module": b"N"}, "pipeline")],
)
def test_other_models_are_shown_part_by_part(
    entries: dict[str, bytes], reason: str, tmp_path: Path
) -> None:
    with pytest.warns(xckpt.CheckpointWarning, match=reason):
        ds = xckpt.open(a_run(changes={"model": entries}).write(tmp_path))
    assert reason in ds.attrs["parts"]


def test_without_zero_the_file_has_the_whole_model(tmp_path: Path) -> None:
    run = a_run(changes={"model": {"param_shapes": b"N"}})
    (tmp_path / MODEL_STATES).write_bytes(run.model(0))
    assert "module.emb.weight" in xckpt.open(tmp_path).variables


def test_a_sharded_tensor_is_shown_part_by_part(tmp_path: Path) -> None:
    kind = torch_files.name("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
    shard = torch_files.mapping({"tensor": torch_files.whole("0", numbers(2, 3))})
    state = torch_files.several(listed(shard)) + b"b"
    made = torch_files.called(torch_files.name("torch._utils", "_rebuild_wrapper_subclass"), kind)
    for number, value in enumerate((kind + b")\x81" + state, made + state)):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(
            torch_files.archive(torch_files.mapping({"w": value}), {"0": numbers(2, 3).tobytes()})
        )
        with pytest.warns(xckpt.CheckpointWarning, match="'w': shown part by part, because"):
            ds = xckpt.open(path)
        np.testing.assert_array_equal(ds["w.0.0.tensor"], numbers(2, 3))


# --- hostile files --------------------------------------------------------------------------------


def damaged(data: bytes) -> Iterator[bytes]:
    yield from (data[:length] for length in range(0, len(data), 211))
    for at in range(0, len(data), 83):
        yield data[:at] + bytes((data[at] ^ (1 << at % 8),)) + data[at + 1 :]


@pytest.mark.parametrize(
    ("stage", "which"), [(2, "model"), (2, "optimizer"), (3, "model"), (3, "optimizer")]
)
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_damaged_files_raise_an_error_or_open(stage: int, which: str, tmp_path: Path) -> None:
    run = Run([{"w": numbers(3, 5)}], stage, frozen={"f": numbers(3)})
    run.write(tmp_path)
    path = tmp_path / (run.model_name(0) if which == "model" else run.optimizer_name(1))
    for data in damaged(path.read_bytes()):
        path.write_bytes(data)
        try:
            xckpt.open(tmp_path).load()
        except xckpt.CheckpointError as error:
            assert str(tmp_path) in str(error)  # noqa: PT017


def test_functions_in_the_files_are_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = torch_files.called(torch_files.name("os", "system"), torch_files.text("touch PWNED"))
    changes = {
        "optimizer": {"loss_scaler": evil, "clip_grad": evil},
        "model": {"lr_scheduler": evil, "mp_world_size": evil},
    }
    ds = xckpt.open(a_run(changes=changes).write(tmp_path / "run"))
    np.testing.assert_array_equal(ds["b"], numbers(5))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_many_references_to_one_value_take_no_time(tmp_path: Path) -> None:
    """The memo can refer to one mapping of names, or to one vector, many times."""
    names = ordered({f"w{n}": size(()) for n in range(2000)}) + b"q\1"
    changes = {"model": {"param_shapes": b"](" + names + b"h\1" * 20_000 + b"e"}}
    error = refused(a_run(3, changes=changes).write(tmp_path / "names"))
    assert error.rule == "Name"
    fields = torch_files.mapping({f"f{n}": b"N" for n in range(2000)})
    state = b"}(" + torch_files.number(0) + fields + b"u"
    vectors = b"](" + SHORT + b"q\1" + b"h\1" * 20_000 + b"e"
    base = torch_files.mapping({"state": state})
    changes = {"optimizer": {"base_optimizer_state": base, FLAT: vectors}}
    error = refused(a_run(changes=changes).write(tmp_path / "vectors"))
    assert error.rule == "Groups"
    fields = torch_files.mapping({f"f{n}": b"N" for n in range(20_000)}) + b"q\1"
    base = b"](" + fields + b"h\1" * 20_000 + b"e"
    run = a_run(changes={"optimizer": {"base_optimizer_state": base}})
    before = time.process_time()
    with pytest.warns(xckpt.CheckpointWarning, match="lacks the layout"):
        xckpt.open(run.write(tmp_path / "states"))
    assert time.process_time() - before < 10
