"""Available memory, and reads that would exceed it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dask
import pytest

from xckpt.errors import CheckpointError, TooLargeError, UnsupportedError, locating
from xckpt.storage import limits
from xckpt.storage.limits import UNCHECKED_NBYTES, available_nbytes, require_memory

KIB = 1024


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a machine with 300 KiB of memory and 20 KiB of swap, without control groups."""
    text = "MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable:   300 kB\nSwapFree: 20 kB\nHuge: 0\n"
    (tmp_path / "meminfo").write_text(text, "ascii")
    places = {"proc/meminfo": "meminfo", "proc/self/cgroup": "cgroup", "sys/fs/cgroup": "groups"}
    read_text = Path.read_text

    def redirected(path: Path, *args: Any) -> str:
        for place, name in places.items():
            if path.is_relative_to(f"/{place}"):
                path = tmp_path / name / path.relative_to(f"/{place}")
        return read_text(path, *args)

    monkeypatch.setattr(Path, "read_text", redirected)
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n", "ascii")


@pytest.mark.usefixtures("machine")
def test_memory_of_the_machine() -> None:
    assert available_nbytes() == 320 * KIB


def test_memory_of_this_machine() -> None:
    nbytes = available_nbytes()
    assert nbytes is None or nbytes > 0


def test_without_any_information_memory_is_unknown(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "meminfo").write_text("nothing here")
    monkeypatch.delattr("os.sysconf", raising=False)
    assert available_nbytes() is None
    require_memory(1 << 40)
    with pytest.raises(TooLargeError, match="too many"):
        require_memory(sys.maxsize + 1)


def test_memory_of_the_control_groups_of_a_container(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/outer/inner\n")
    outer, inner = machine / "groups" / "outer", machine / "groups" / "outer" / "inner"
    write(inner, memory__max="max", memory__current=1, memory__stat="inactive_file 0")
    assert available_nbytes() == 320 * KIB
    memory_stat = f"anon 5\ninactive_file {10 * KIB}"
    write(outer, memory__max=100 * KIB, memory__current=30 * KIB, memory__stat=memory_stat)
    assert available_nbytes() == 80 * KIB
    write(inner, memory__max=20 * KIB, memory__current=30 * KIB, memory__stat="")
    assert available_nbytes() == 0


def test_memory_of_a_control_group_of_the_first_version(machine: Path) -> None:
    (machine / "cgroup").write_text("4:cpu,memory:/docker/1\n3:pids:/docker/1\n0::/\n")
    names = ("memory__limit_in_bytes", "memory__usage_in_bytes", "memory__stat")
    # The path is that on the outside; inside, the root is the group.
    group_files = dict(zip(names, (50 * KIB, 20 * KIB, "total_inactive_file 1024"), strict=True))
    write(machine / "groups" / "memory", **group_files)
    assert available_nbytes() == 31 * KIB


def test_a_read_that_fits_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_nbytes", lambda: 1 << 30)
    require_memory(1 << 30)
    with pytest.raises(TooLargeError, match=r"^1073741825 bytes \(1\.00 GiB\).*1\.00 GiB is avail"):
        require_memory((1 << 30) + 1)


def test_small_reads_skip_the_check_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_nbytes", lambda: 0)
    require_memory(1 << 20)
    with pytest.raises(TooLargeError):
        require_memory(1 << 30)


@pytest.mark.parametrize("limit", ["2 MiB", 2 << 20, "2097152"])
def test_the_limit_is_an_option(limit: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_nbytes", lambda: 0)
    with dask.config.set({"xckpt.memory-limit": limit}):
        require_memory(2 << 20)
        with pytest.raises(TooLargeError, match=r"2\.00 MiB is the limit.*do this\..*memory-limit"):
            require_memory((2 << 20) + 1, "do this")
    with dask.config.set({"xckpt.memory-limit": 0}):
        require_memory(UNCHECKED_NBYTES - 1)
        with pytest.raises(TooLargeError):
            require_memory(UNCHECKED_NBYTES)


def test_the_error_is_a_package_error_and_a_memory_error() -> None:
    assert issubclass(TooLargeError, UnsupportedError)
    assert issubclass(TooLargeError, MemoryError)
    error = TooLargeError("too many", path="m.zt", tensor="w")
    assert str(error) == "m.zt: tensor 'w': too many"


def test_a_lack_of_memory_becomes_an_error_that_names_file_and_tensor() -> None:
    with (
        pytest.raises(TooLargeError, match=r"^m\.zt: tensor 'w': memory ran out: x \[Memory\]"),
        locating(path="m.zt", tensor="w"),
    ):
        raise MemoryError("x")
    with (
        pytest.raises(TooLargeError, match=r"^m\.zt: memory ran out \[Memory\]") as caught,
        locating(path="m.zt"),
    ):
        raise MemoryError
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(CheckpointError) as error, locating(path="n.zt", tensor="v"):
        raise CheckpointError("x", path="m.zt")
    assert (error.value.path, error.value.tensor) == ("m.zt", "v")
    with pytest.raises(ZeroDivisionError), locating(path="m.zt"):
        raise ZeroDivisionError
