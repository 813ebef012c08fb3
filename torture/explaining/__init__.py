"""Pairs of a model and its conversion, explained with the truth known.

A pair has one of some eighty conversions, drawn uniformly: to GGUF, Flax, Keras, ONNX, MLX, Burn
and other projects' names, fused, split, stacked, sharded, rounded or quantised. Three pairs of four
are damaged in one of some eighty ways. A damaged tensor that is called explained, damage that is
not named, a first sentence that begins with "all", and an error are failures; so is less than 98 %
of the undamaged tensors explained, in layouts that the documentation says are searched.
`python -m torture.explaining SEED FIRST COUNT` prints every failure as ``seed:number`` and tables.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from torture.explaining.judging import Verdict, judge
from torture.explaining.pairs import Pair, draw_pair
from torture.trial import Tally, read_evidence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torture.trial import Trial

__all__ = ["Counts", "again", "draw_pair", "judge", "run"]

#: The least share of undamaged tensors that are explained.
ENOUGH = 0.98


class Counts:
    """Numbers of pairs and tensors, by converter, by damage, and in total."""

    def __init__(self) -> None:
        self.rows: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, pair: Pair, verdict: Verdict) -> None:
        """Count a pair."""
        for row in ("all", f"from {pair.converter.name}", f"damage: {pair.kind}"):
            self.rows[row].update(
                pairs=1,
                damaged=bool(pair.damaged),
                false=bool(verdict.false),
                unnamed=bool(verdict.unnamed),
                all_right=bool(verdict.all_right),
                errors=bool(verdict.error),
                wrong=verdict.is_wrong,
                searched=len(pair.searched),
                open=len(verdict.open),
                unsearched=len(pair.unsearched),
                mismeasured=len(verdict.mismeasured),
                open_unsearched=len(verdict.open_unsearched),
            )

    def share(self, row: str) -> float:
        """Return the share of undamaged tensors in searched layouts that are explained."""
        count = self.rows[row]
        return 1 - count["open"] / max(1, count["searched"])

    def sorted(self) -> list[tuple[str, Counter[str]]]:
        """Return the rows, the total first."""
        return sorted(self.rows.items(), key=lambda item: (item[0] != "all", item[0]))


def run(trial: Trial) -> Iterator[Tally]:
    """Compare random pairs until the time is over."""
    counts, start, number = Counts(), time.monotonic(), 0
    while trial.remaining > 0:
        seed = [trial.seed % (1 << 32), number]
        pair = draw_pair(seed)
        verdict = judge(pair, trial.folder)
        counts.add(pair, verdict)
        if verdict.is_wrong:
            case = json.dumps({"seed": seed, "pair": str(pair)}).encode()
            lines = "; ".join(verdict.lines())
            trial.fail("a false claim", {"pair.json": case}, f"{number}: {pair}: {lines}")
        number += 1
    seconds = time.monotonic() - start
    for row, count in counts.sorted():
        share = f"{100 * counts.share(row):.2f} %"
        summary = f"{share} of {count['searched']:,} undamaged tensors explained"
        if count["unsearched"]:
            explained = count["unsearched"] - count["open_unsearched"]
            summary += f"; of other layouts {explained:,} of {count['apart']:,}"
        is_short = row == "all" and count["pairs"] >= 100 and counts.share(row) < ENOUGH
        yield Tally(row, count["pairs"], count["wrong"] + is_short,
                    seconds if row == "all" else 0.0, summary)  # fmt: skip


def again(path: Path) -> None:
    """Compare the pair of a recorded failure again, and raise if a claim is still false."""
    case = json.loads(read_evidence(path)["pair.json"])
    pair = draw_pair(case["seed"])
    with TemporaryDirectory() as folder:
        verdict = judge(pair, Path(folder))
    if verdict.is_wrong:
        raise AssertionError(f"{pair}: {'; '.join(verdict.lines())}")
