"""The runner of `make torture` bounds its parts, and failures can be repeated."""

from __future__ import annotations

import sys
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests import torture_part
from tests.contracts.every import DECLARED, declared
from torture import __main__ as torture
from torture import explaining
from torture.framing import frames
from torture.mutating import Mutator
from torture.reading import check_index
from torture.trial import Tally, Trial
from torture.ways import Disagreement, check_named, digested, flipped, unlike_others
from xckpt.errors import FormatError

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("resource", reason="limits are those of POSIX")


def ran(seed: int, folder: Path, **options: Any) -> list[Tally]:
    title, tallies = torture.part("tests.torture_part", seed, 0.2, kept=folder, **options)
    assert title == torture_part.__doc__
    return tallies


def test_everything_random_follows_from_the_seed(tmp_path: Path) -> None:
    assert ran(5, tmp_path) == ran(5, tmp_path) != ran(6, tmp_path)


def test_a_part_that_does_not_end_is_ended(tmp_path: Path) -> None:
    *finished, last = ran(torture_part.ENDLESS, tmp_path, grace=0.5)
    assert [tally.what for tally in finished] == ["drawn"]
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
    output = capfd.readouterr().err
    assert all(f"-m torture again torture_part {file}" in output for file in files)
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


def test_a_false_claim_is_a_failure(tmp_path: Path) -> None:
    """Claims about a pair are checked against the truth."""
    pytest.importorskip("gguf")
    pair = next(pair for pair in (explaining.draw_pair([3, n]) for n in range(9)) if pair.damaged)
    verdict = explaining.judge(pair, tmp_path)
    assert not verdict.is_wrong
    assert len(verdict.open) < 0.1 * len(pair.searched)
    pair.damaged, pair.hurt = set(pair.searched), set()
    assert explaining.judge(pair, tmp_path).false


def test_pairs_follow_from_their_seed() -> None:
    """A pair is drawn again from its seed and number, and its damage is real."""
    pytest.importorskip("gguf")
    for number in range(20):
        pair, same = explaining.draw_pair([5, number]), explaining.draw_pair([5, number])
        assert str(pair) == str(same)
        assert pair.damaged == same.damaged
        assert bool(pair.damage) == bool(pair.damaged)
        assert not (pair.searched | pair.unsearched) & (pair.damaged | pair.unclear)


SMALL = {
    f"{declared.name}-{label}": data
    for declared in DECLARED
    for label, data in declared.small_files().items()
}


@pytest.mark.parametrize("data", SMALL.values(), ids=SMALL)
def test_files_are_changed_item_by_item(data: bytes) -> None:
    """Headers of every format are found and put back, and most changes are within them."""
    parsed = frames(data)
    assert parsed
    for frame in parsed:
        stream = frame.grammar.stream(frame.data)
        assert b"".join(stream.tokens) == frame.data
        assert len(stream.tokens) == len(stream.kinds)
        again = frames(frame.put(frame.data))
        assert frame.data in [item.data for item in again]
    assert max(len(frame.grammar.stream(frame.data).tokens) for frame in parsed) > 4
    mutator, same = (Mutator(Random(1)) for _ in range(2))  # noqa: S311
    changed = [mutator.mutated(data) for _ in range(50)]
    assert changed == [same.mutated(data) for _ in range(50)]
    assert len(set(changed)) > 25
    refused = 0
    for variant in changed:
        refused += not check_index({"m": variant})
    assert refused > 0


def test_a_failure_fails_the_part(tmp_path: Path) -> None:
    """A reader that gives a silent wrong value under a digest is found."""
    trial = Trial(1, 5.0, tmp_path, tmp_path / "kept", "torture.reading")
    with pytest.raises(Disagreement, match="no file is named"):
        check_named(FormatError("somewhere"))
    data = declared("npz").small_files()["stored"]
    guarded = digested({"m.npz": data})
    assert guarded is not None
    guarded.check(flipped(guarded, trial.random("x")))
    guarded.values = {name: array + 1 for name, array in guarded.values.items()}
    with pytest.raises(Disagreement, match="its digest says nothing"):
        guarded.check({"m.npz": data})


def test_a_missing_other_implementation_is_not_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ztensor", None)
    for data in SMALL.values():
        unlike_others(data, {})
