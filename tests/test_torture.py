"""The runner of `make torture` bounds what it runs, and a failure can be tried again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests import torture_part
from torture import __main__ as torture
from torture.trial import Tally

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("resource", reason="limits are those of POSIX")


def ran(seed: int, kept: Path, **options: Any) -> list[Tally]:
    title, tallies = torture.part("tests.torture_part", seed, 0.2, kept=kept, **options)
    assert title == torture_part.__doc__
    return tallies


def test_everything_random_follows_from_the_seed(tmp_path: Path) -> None:
    assert ran(5, tmp_path) == ran(5, tmp_path) != ran(6, tmp_path)


def test_a_part_that_does_not_end_is_ended(tmp_path: Path) -> None:
    *found, last = ran(torture_part.ENDLESS, tmp_path, grace=0.5)
    assert [tally.what for tally in found] == ["drawn"]
    assert (last.failures, last.said) == (1, "the part did not end in time")


def test_a_part_has_no_more_memory_than_its_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ran(torture_part.GREEDY, tmp_path, memory=1 << 30)[-1].failures == 1
    assert "MemoryError" in capfd.readouterr().err


def test_a_failure_leaves_a_file_and_a_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tallies = ran(torture_part.BROKEN, tmp_path)
    assert tallies[-1].failures == 20
    files = sorted(tmp_path.glob("torture_part/a-promise-*"))
    assert 0 < len(files) < 20
    told = capfd.readouterr().err
    assert all(f"-m torture again torture_part {file}" in told for file in files)
    monkeypatch.setitem(sys.modules, "torture.torture_part", torture_part)
    assert torture.main(["again", "torture_part", str(files[0])]) == 1
    (files[0] / "m.bin").write_bytes(b"mended")
    assert torture.main(["again", "torture_part", str(files[0])]) == 0


def test_tallies_are_a_table_with_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torture, "TOTALS", tmp_path / "totals.json")
    tallies = [Tally("kills", 1000, 0, 0.5, "old or new")]
    torture.added("writing", tallies)
    totals = torture.added("writing", tallies)
    line = "| kills | 1,000 | 0 | 2,000 | 2,000 | old or new |"
    assert torture.table(tallies, totals).splitlines()[-1] == line
