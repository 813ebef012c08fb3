"""Checkpoints of several files never mix old and new ones."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import dask.array as da
import fsspec
import numpy as np
import pytest
import xarray as xr

from tests.writing.killed import die_at_each_step, kill_at_random_moments
from xckpt import CheckpointWarning, FileChangedError, read_index
from xckpt.opening import open_index
from xckpt.storage.partial import new_aliases
from xckpt.storage.sink import Sink
from xckpt.storage.source import sources_of
from xckpt.writing import convert, save, verify

# Other tests cover writers that run while threads wait.
pytestmark = pytest.mark.usefixtures("in_this_thread")

RANKS = 4
FILES = ["m.metadata.json", *(f"m_shard_{rank}.shard" for rank in range(RANKS))]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def dataset(value: float, *, lazy: bool = False) -> xr.Dataset:
    """Make a tensor for each rank, all of one value."""
    variables: dict[str, Any] = {}
    for rank in range(RANKS):
        array: Any = np.full((40, 50), value, "f4")
        array = da.from_array(array, chunks=(7, 30)) if lazy else array
        variables[f"w{rank}"] = (("o", "i"), array, {"rank": rank})
    return xr.Dataset(variables)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Save a checkpoint of ones."""
    save(dataset(1), tmp_path / FILES[0], "mlcp")
    return tmp_path / FILES[0]


def values(path: Path | str) -> set[float]:
    with xr.open_dataset(path, engine="mlcp") as ds:
        return {
            float(v) for variable in ds.compute().variables.values() for v in np.unique(variable)
        }


@pytest.mark.parametrize("lazy", [False, True])
def test_data_are_in_a_file_for_each_rank(lazy: bool, tmp_path: Path) -> None:
    target = tmp_path / "m.metadata.json"
    save(dataset(1, lazy=lazy), target, "mlcp")
    assert names(tmp_path) == FILES
    index = read_index(target)
    assert {index.tensors[f"w{rank}"].parts["data"].shard for rank in range(RANKS)} == set(
        FILES[1:]
    )
    assert values(target) == {1}
    assert verify(target).ok
    later = save(dataset(2, lazy=lazy), target, "mlcp", compute=False, overwrite=True)
    assert values(target) == {1}
    later.compute()
    assert values(target) == {2}
    assert names(tmp_path) == FILES


def test_the_option_and_the_name_go_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.metadata\.json"):
        save(dataset(1), tmp_path / "m.checkpoint", "mlcp", multi_shard=True)
    save(dataset(1), tmp_path / "one.metadata.json", "mlcp", multi_shard=False)
    assert names(tmp_path) == ["one.metadata.json"]


def test_saving_over_the_opened_files(target: Path) -> None:
    convert(target, target, tensors="w[01]", overwrite=True)
    assert set(read_index(target).tensors) == {"w0", "w1"}
    assert values(target) == {1}


def test_a_companion_is_overwritten_only_on_request(tmp_path: Path) -> None:
    (tmp_path / FILES[2]).write_bytes(b"somebody else's")
    with pytest.raises(FileExistsError, match=FILES[2]):
        save(dataset(1), tmp_path / "m.metadata.json", "mlcp")
    assert names(tmp_path) == [FILES[2]]


def test_saving_to_a_url(tmp_path: Path) -> None:
    target = "memory://several/m.metadata.json"
    memory: Any = fsspec.filesystem("memory")
    for value in (1, 2):
        save(dataset(value), target, "mlcp", overwrite=True)
        assert values(target) == {value}
        paths = memory.ls("/several", detail=False)
        assert sorted(path.rpartition("/")[2] for path in paths) == FILES
    assert names(tmp_path) == []


WRITER = """
import warnings
warnings.simplefilter("ignore")  # of what the one before left

def dataset(value):
    array = np.full((64, 256), value, "f4")
    return xr.Dataset({f"w{r}": (("o", "i"), array, {"rank": r}) for r in range(RANKS)})

def write():
    save(dataset(float(sys.argv[2])), sys.argv[1], "mlcp", overwrite=True)
"""


def complete(path: Path) -> set[float]:
    """Return all values of a checkpoint, which must be complete; warnings are allowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        index = read_index(path)
        assert sorted(tensor.attrs["rank"] for tensor in index.tensors.values()) == [*range(RANKS)]
        return values(path)


def as_upstream(path: Path) -> list[bytes] | None:
    """Return the data of all shards as upstream's MultiShardLoader does, or None if it refuses."""
    prefix = str(path).removesuffix(".metadata.json")
    results = []
    for shard in json.loads(path.read_bytes())["shards"]:
        data = Path(f"{prefix}_shard_{shard['rank']}.shard").read_bytes()
        magic, rank, length = struct.unpack_from("<4sii", data)
        checksum = data[12 : 12 + length].decode()
        count, nbytes = struct.unpack_from("<ii", data, 12 + length)
        assert (magic, rank, count) == (b"RAHS", shard["rank"], len(shard["tensors"]))
        if shard["checksum"] and checksum != shard["checksum"]:
            return None
        results.append(data[20 + length :])
        assert len(results[-1]) == nbytes
    return results


def test_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "m.metadata.json"
    save(dataset(0), target, "mlcp")
    states: set[float] = set()

    def check(number: int) -> None:
        values_read = complete(target)
        assert len(values_read) == 1, f"a mixture of {values_read}"
        assert values_read <= {float(n) for n in range(number + 1)}
        states.update(values_read)
        data = as_upstream(target)
        assert data is None or len(set(data)) == 1, "a mixture"

    code = WRITER.replace("RANKS", str(RANKS)) + "while True: write()"
    kill_at_random_moments(code, target, rounds=25, seconds=0.2, check=check, states=states)
    save(dataset(0), target, "mlcp", overwrite=True)
    assert names(tmp_path) == FILES


@pytest.mark.slow
def test_writers_at_once_leave_a_checkpoint_of_one_of_them(tmp_path: Path) -> None:
    target = tmp_path / "m.metadata.json"
    imports = "import sys\nimport numpy as np, xarray as xr\nfrom xckpt.writing import save\n"
    code = imports + WRITER.replace("RANKS", str(RANKS)) + "for _ in range(30): write()"
    save(dataset(0), target, "mlcp")
    writers = [
        subprocess.Popen([sys.executable, "-c", code, target, str(number)])  # noqa: S603  our own
        for number in (1, 2)
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    data = as_upstream(target)
    assert data is not None
    assert len(set(data)) == 1
    assert len(values(target)) == 1
    assert names(tmp_path) == FILES


def old_files(target: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint of zeros."""
    save(dataset(0), target, "mlcp")
    return {name: target.with_name(name).read_bytes() for name in FILES}


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("before", ["a checkpoint", "nothing", "raw data"])
def test_interruption_at_any_step(before: str, links: bool, tmp_path: Path) -> None:
    target = tmp_path / "m.metadata.json"
    stale = [name.replace(".shard", ".bin") for name in FILES[1:]] if before == "raw data" else []
    outcomes: list[str] = []

    old = {} if before == "nothing" else old_files(target)
    for name, shard in zip(stale, FILES[1:], strict=False):
        old[name] = old.pop(shard)[20:]

    def begin() -> None:
        for name in names(tmp_path):
            (tmp_path / name).unlink()
        for name, data in old.items():
            (tmp_path / name).write_bytes(data)

    def check(_: int) -> None:
        if target.exists():
            values_read = complete(target)
            assert values_read in ({0.0}, {1.0})
            outcomes.append("old" if values_read == {0.0} else "new")
            if not stale:
                data = as_upstream(target)
                assert data is None or len(set(data)) == 1, "a mixture"
                outcomes[-1] += " refused" if data is None else ""
        else:
            assert before == "nothing"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            save(opened_and_computed(target), target, "mlcp", overwrite=True)
        assert names(tmp_path) == sorted([*FILES, *stale])
        begin()

    def opened_and_computed(path: Path) -> xr.Dataset:
        if not path.exists():
            return dataset(2)
        with xr.open_dataset(path, engine="mlcp") as ds:
            return ds * 1

    no_links = "def no_links(*_): raise OSError(1, 'no hard links')\nos.link = no_links\n"
    value = "sys.argv[2] = '1'\nwrite()\n"
    code = WRITER.replace("RANKS", str(RANKS)) + ("" if links else no_links) + value
    begin()
    steps = die_at_each_step(code, target, check)
    assert steps > 10
    assert outcomes[-1] == "new"
    assert "old" in outcomes or before == "nothing"


def test_only_leftover_files_are_removed(target: Path, tmp_path: Path) -> None:
    mine = new_aliases(str(target), [*FILES[1:], "m_shard_9.shard"])
    of_other_target = new_aliases(str(tmp_path / "n.metadata.json"), FILES[1:])
    unrelated = {"m_shard_0.xckpt-notes.shard", "m_shard_0.xckpt-0123456789abcdef.shard.txt.bak"}
    for name in {*mine.values(), *of_other_target.values(), *unrelated}:
        (tmp_path / name).write_bytes(b"some")
    (tmp_path / ".m.metadata.json.xckpt-lock").write_bytes(b"")
    save(dataset(2), target, "mlcp", overwrite=True)
    assert names(tmp_path) == sorted([*FILES, *of_other_target.values(), *unrelated])


@pytest.fixture
def interrupted(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a checkpoint whose second save was interrupted after the switch."""
    take_name, renamed = Sink.take_name, list[str]()

    def once(sink: Sink) -> None:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(sink.name)
        take_name(sink)

    with monkeypatch.context() as patch:
        patch.setattr(Sink, "take_name", once)
        with pytest.raises(KeyboardInterrupt):
            save(dataset(2), target, "mlcp", overwrite=True)
    assert len(names(tmp_path)) == len(FILES) + RANKS
    return target


def test_an_interrupted_save_warns_and_saving_again_repairs_it(interrupted: Path) -> None:
    with pytest.warns(CheckpointWarning, match=r"it is complete.*Save it again"):
        assert values(interrupted) == {2}
    assert as_upstream(interrupted) is None
    with pytest.warns(CheckpointWarning, match="Save it again"):
        convert(interrupted, interrupted, overwrite=True)
    assert values(interrupted) == {2}
    assert as_upstream(interrupted) is not None
    assert names(interrupted.parent) == FILES


def test_a_single_file_replaces_an_interrupted_set(interrupted: Path) -> None:
    with pytest.warns(CheckpointWarning, match="Save it again"):
        ds = xr.load_dataset(interrupted, engine="mlcp")
    save(ds, interrupted, "mlcp", multi_shard=False, overwrite=True)
    assert values(interrupted) == {2}
    assert names(interrupted.parent) == FILES


def test_an_error_after_the_switch_is_a_warning(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_name, renamed = Sink.take_name, list[str]()

    def failing(sink: Sink) -> None:
        renamed.append(sink.name)
        if len(renamed) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO), sink.name)
        take_name(sink)

    monkeypatch.setattr(Sink, "take_name", failing)
    with pytest.warns(
        CheckpointWarning, match=r"m\.metadata\.json: the new checkpoint is complete"
    ):
        save(dataset(2), target, "mlcp", overwrite=True)
    monkeypatch.undo()
    assert complete(target) == {2}
    save(dataset(3), target, "mlcp", overwrite=True)
    assert values(target) == {3}
    assert names(tmp_path) == FILES


def test_an_error_before_the_switch_leaves_the_old_files_alone(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match=r"m\.metadata\.json") as caught:
        save(dataset(2), target, "mlcp", overwrite=True)
    assert str(caught.value).count("free some space") == 1
    assert values(target) == {1}
    assert names(tmp_path) == FILES
    new = tmp_path / "n.metadata.json"
    link, linked = os.link, list[Any]()

    def failing_for_the_last(*args: Any) -> None:
        linked.append(args)
        if len(linked) > RANKS:
            failing()
        link(*args)

    monkeypatch.setattr(os, "link", failing_for_the_last)
    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match=r"n\.metadata\.json"):
        save(dataset(2), new, "mlcp")
    assert names(tmp_path) == FILES


def test_concurrent_readers_get_one_version(target: Path) -> None:
    source, index = open_index(target)
    save(dataset(2), target, "mlcp", overwrite=True)
    with pytest.raises(FileChangedError):
        sources_of(source, index.shards)


@pytest.mark.parametrize("failing", range(8))
def test_an_upload_that_fails_leaves_a_whole_checkpoint(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"memory://failing-{failing}/m.metadata.json"
    folder = f"/failing-{failing}"
    memory: Any = fsspec.filesystem("memory")
    save(dataset(1), target, "mlcp")
    done: list[Any] = []

    def counted(call: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            done.append(args)
            if len(done) == failing + 1:
                raise OSError(errno.EIO, "the network is down")
            return call(*args, **options)

        return called

    with monkeypatch.context() as patch:
        for name in ("put_file", "cp_file"):
            patch.setattr(memory, name, counted(getattr(memory, name)))
        if failing <= RANKS:
            with pytest.raises(OSError, match="network is down"):
                save(dataset(2), target, "mlcp", overwrite=True)
        else:
            with pytest.warns(CheckpointWarning, match="new checkpoint is complete"):
                save(dataset(2), target, "mlcp", overwrite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        values_read = values(target)
    assert values_read == ({1} if failing <= RANKS else {2})
    save(dataset(3), target, "mlcp", overwrite=True)
    if failing < RANKS:  # else the server may have taken what it has not confirmed
        assert sorted(path.rpartition("/")[2] for path in memory.ls(folder, detail=False)) == FILES
    memory.rm(folder, recursive=True)


def test_a_disk_that_fails_leaves_the_old_files(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync
    calls: list[int] = []

    def failing(fileno: int) -> None:
        calls.append(fileno)
        if len(calls) == len(FILES):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fileno)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        save(dataset(2), target, "mlcp", overwrite=True)
    assert values(target) == {1}
    assert names(tmp_path) == FILES
