"""The torture of writers detects writers that break promises, and passes ours."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dask
import pytest

pytest.importorskip("fcntl", reason="kills and locks are those of POSIX")

from torture import __main__ as torture
from torture import power, writing
from torture.checkpoints import Broken, Case, cases
from torture.trial import Trial
from torture.writing import Trouble
from xckpt.storage.sink import Sink

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

CASE = "save safetensors over"

# Python 3.12 and newer warn if threads exist at a fork; none of them is used here.
# JAX, which other tests may have imported, warns of the same.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning", "ignore:.*fork.*JAX:RuntimeWarning"
)


@pytest.fixture(autouse=True)
def _without_threads() -> Iterator[None]:
    """Compute without threads, which a fork does not have."""
    with dask.config.set(scheduler="sync"):
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torture")


@pytest.fixture(scope="module")
def case(root: Path) -> Case:
    with dask.config.set(scheduler="sync"):
        (matching,) = cases(root, CASE)
    return matching


class InPlace(Sink):
    """A sink that writes to the file itself."""

    def __init__(
        self, target: Any, *, overwrite: bool = False, beside: Iterable[Sink] = ()
    ) -> None:
        self.name = self.target = self.path = os.fspath(target)
        self.overwrite = overwrite
        self.fileno = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def opened(self) -> Any:
        return SimpleNamespace(fileno=self.fileno)

    def is_taken(self) -> bool:
        return False

    def take_name(self) -> None:
        """It has it."""

    def abort(self) -> None:
        if self.fileno >= 0:
            os.close(self.fileno)
        self.fileno = -1


TROUBLES = [
    *(Trouble("killed", CASE, number) for number in (1, 9, 25)),
    Trouble("killed", CASE, 1, "pwrite", "torn"),
    Trouble("fault", CASE, 2, "pwrite", "EIO once"),
    Trouble("fault", CASE, 0, "fsync", "ENOSPC always"),
    Trouble("fault", CASE, 0, "replace", "EIO done"),
    Trouble("full", CASE, 9000),
    Trouble("vanished", CASE, 12, "", "moved"),
    Trouble("vanished", CASE, 3, "", "replaced"),
    Trouble("interrupted", CASE, 11),
]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: " ".join(map(str, trouble)))
def test_trouble_happens_and_breaks_nothing(root: Path, case: Case, trouble: Trouble) -> None:
    assert writing._try(case, root, trouble)


@pytest.mark.parametrize("number", [93, 94, 95])
def test_interrupted_writers_of_shards_leave_no_descriptor(root: Path, number: int) -> None:
    name = "save safetensors with shards over"
    (case,) = cases(root, name)
    assert writing._try(case, root, Trouble("interrupted", name, number))


@pytest.mark.parametrize("trouble", [TROUBLES[0], TROUBLES[4], TROUBLES[7]], ids=lambda e: e.kind)
def test_a_writer_that_overwrites_in_place_is_detected(
    root: Path, case: Case, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.storage.sink.Sink", InPlace)
    with pytest.raises(Broken):
        writing._try(case, root, trouble)


def test_a_failure_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(1, 0.3, tmp_path, tmp_path / "kept", "torture.writing", CASE)
    path = trial.fail("it", {"trouble.json": json.dumps(TROUBLES[4]).encode()}, "a note")
    writing.again(path)
    monkeypatch.setattr("xckpt.storage.sink.Sink", InPlace)
    with pytest.raises(Broken):
        writing.again(path)


def test_data_that_never_reach_the_disk_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failures() -> int:
        trial = Trial(1, 60, tmp_path, tmp_path / "kept", "torture.power", CASE)
        (tally,) = power.run(trial)
        assert tally.cases > 100
        return tally.failures

    assert failures() == 0
    monkeypatch.setattr(Sink, "sync", lambda _: None)
    assert failures() > 0
    (path, *_) = (tmp_path / "kept" / "power").iterdir()
    with pytest.raises(Broken):
        power.again(path)


def test_a_rename_that_never_reaches_the_disk_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fault has to be planted in the code that it is looked for in.
    monkeypatch.setattr("xckpt.storage.sink._sync_folders", lambda *_: None)
    trial = Trial(1, 60, tmp_path, tmp_path / "kept", "torture.power", CASE)
    (tally,) = power.run(trial)
    assert tally.failures > 0, "it returned, and the old one may be back"


@pytest.mark.parametrize(
    ("part", "only"), [("writing", CASE), ("together", "append"), ("changing", "forked")]
)
def test_parts_run(part: str, only: str, tmp_path: Path) -> None:
    _, tallies = torture.part(f"torture.{part}", 1, 1.0, only=only, kept=tmp_path)
    assert tallies
    assert all(tally.cases and not tally.failures for tally in tallies), tallies
