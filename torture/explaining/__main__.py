"""Compare the pairs of a seed: ``python -m torture.explaining SEED FIRST COUNT [SECONDS]``.

Every pair with a false claim, and every pair with undamaged tensors that are not explained, is a
line that begins with ``seed:number``. Two tables follow, by converter and by damage.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from torture.explaining import Counts, draw_pair, judge

#: One pair in so many is compared without explanations, too.
_TIMED = 4
_COLUMNS = ("pairs", "damaged", "false", "unnamed", "all_right", "errors", "searched", "open",
            "unsearched", "open_unsearched", "mismeasured")  # fmt: skip


def main(seed: int, first: int, count: int, seconds: float = 1e9) -> int:
    """Compare pairs, print failures and tables, and return the number of failures."""
    counts, ratios, slowest, failures = Counts(), [], [], 0
    start = time.monotonic()
    with TemporaryDirectory() as folder:
        for number in range(first, first + count):
            if time.monotonic() - start > seconds:
                break
            try:
                pair = draw_pair([seed, number])
            except Exception:  # noqa: BLE001  a fault of the generator ends no run
                print(f"{seed}:{number} the generator failed\n{traceback.format_exc()}", flush=True)
                continue
            verdict = judge(pair, Path(folder), is_timed=number % _TIMED == 0)
            counts.add(pair, verdict)
            label = f"{seed}:{number} {pair}"
            if verdict.plain:
                ratios.append(verdict.seconds / verdict.plain)
            slowest.append((verdict.seconds, label))
            failures += verdict.is_wrong
            for line in verdict.lines():
                print(f"FALSE {label} | {line}", flush=True)
            missing = len(verdict.open), len(verdict.open_unsearched)
            if any(missing):
                examples = ", ".join([*verdict.open, *verdict.open_unsearched][:2])
                print(
                    f"OPEN {label} | {missing[0]} of {len(pair.searched)} searched, "
                    f"{missing[1]} of {len(pair.unsearched)} others: {examples}",
                    flush=True,
                )
    _print_tables(counts)
    if ratios:
        print(f"\ntime of explain beside compare: median {median(ratios):.1f}, "
              f"largest {max(ratios):.1f}; slowest pairs:")  # fmt: skip
    for took, label in sorted(slowest)[-5:]:
        print(f"  {took:.2f} s {label}")
    return failures


def _print_tables(counts: Counts) -> None:
    print("\n| | pairs | damaged | called explained | unnamed | begins with all | errors "
          "| searched | not explained | others | not explained | rel_l2 wrong |")  # fmt: skip
    print("|---" * 12 + "|")
    for row, c in counts.sorted():
        cells = [c[column] for column in _COLUMNS]
        print(f"| {row} | " + " | ".join(f"{cell:,}" for cell in cells) + " |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *map(float, sys.argv[4:5]))
