"""Try what the package promises: ``python -m torture [PART[:ONLY]...] [--minutes M] [--seed N]``.

``python -m torture again PART PATH`` tries again what a failure left.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measuring import write_section
from torture.trial import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
TOTALS = Path(__file__).parent / "totals.json"
KEPT = ROOT / "torture-failures"

#: The parts, and what share of the time each has.
PARTS = {
    "reading": 6.0,
    "remote": 1.0,
    "changing": 1.0,
    "long": 1.0,
    "writing": 3.0,
    "power": 2.0,
    "together": 0.5,
    "explaining": 1.0,
}

#: Bytes of address space that a part may have: threads reserve much that they do not use.
MEMORY = 8 << 30
# A part is asked to end in time; it is ended when it takes that much longer, and so many seconds.
_PATIENCE, _GRACE = 1.5, 120.0

COMPARED = ("xckpt", "xarray", "dask", "numpy", "safetensors", "ztensor", "gguf", "fsspec")

HEAD = """\
# Reliability

`make torture` wrote this page, and anybody can run it: `make torture MINUTES=5` takes five minutes,
`SEED=` repeats a run, and `PARTS=reading` runs one part. A failure leaves a small file in
`torture-failures` and prints the command that tries it again. "In total" counts all runs whose
figures were committed, including the runs that found a failure.

Every failure that was found has a test. In reading, these were:

- a header of a NumPy file whose digits took unbounded time to parse,
- errors of Python instead of xckpt: for four bytes at the end of an archive, for pickles whose
  calls have arguments that are not tuples, and for names of items that are nested lists,
- errors of MLCP and PyTorch files without a position, and an error about the name of a file without
  the broken rule,
- a damaged Zstandard header under a digest that decoded to an empty array instead of an
  `IntegrityError`,
- a malformed digest that reading refused and `verify` accepted, and a wrong digest of a tensor
  without elements that statistics noticed and reading did not,
- a NumPy array with the same name as a member that is not an array.

In writing, these were:

- an old index next to new shards after a power failure, on file systems that do not keep the order
  of renames,
- a reader that opened an index of shards while it was replaced,
- errors for new files that were already in place, and names of temporary files in errors,
- a temporary file that two writers took for a leftover.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names, or everything, and write it down; 1 if a promise broke."""
    parser = argparse.ArgumentParser(
        "python -m torture", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; or: again PART PATH")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts (10)")
    parser.add_argument("--seed", type=int, help="of everything random (a new one)")
    parser.add_argument("--no-page", action="store_true", help="write no page and no totals")
    given = parser.parse_args(arguments)
    if given.parts[:1] == ["again"]:
        name, *paths = given.parts[1:]
        return max([again(name, Path(path)) for path in paths], default=2)
    names = given.parts or [*PARTS]
    shares = [PARTS.get(name.partition(":")[0]) for name in names]
    unknown = [name for name, share in zip(names, shares, strict=True) if share is None]
    if unknown or given.minutes <= 0:
        parser.error(f"no part {unknown[0]!r}: {', '.join(PARTS)}" if unknown else "no time")
    seed = random.randrange(1 << 32) if given.seed is None else given.seed  # noqa: S311
    print(f"seed {seed}", flush=True)
    failures, seconds = 0, 60 * given.minutes / sum(share or 0 for share in shares)
    for (name, _, only), share in zip([n.partition(":") for n in names], shares, strict=True):
        title, tallies = part(f"torture.{name}", seed, seconds * (share or 0), only=only)
        print(f"\n{title}\n\n{table(tallies)}", flush=True)
        failures += sum(tally.failures for tally in tallies)
        if not (given.no_page or only):
            totals = added(name, tallies)
            lines = table(tallies, totals)
            whole = sum(cases for cases, _, _ in totals.values())
            hours = sum(took for *_, took in totals.values()) / 3600
            ran = f"Seed {seed}, {_machine()}. In total {whole:,} cases in {hours:.1f} hours."
            section = f"## {name.capitalize()}\n\n{title}\n\n{lines}\n\n{ran}\n"
            write_section(PAGE, HEAD, [*PARTS], name, section)
    print(f"\n{failures} failures, seed {seed}")
    return 1 if failures else 0


def part(
    module: str, seed: int, seconds: float, *, memory: int = MEMORY, grace: float = _GRACE,
    kept: Path = KEPT,
    only: str = "",
) -> tuple[str, list[Tally]]:  # fmt: skip
    """Run a part in a process of its own, within limits; return its title and its tallies."""
    title = (import_module(module).__doc__ or module).strip()
    reader, writer = os.pipe()
    own = [module, str(seed), str(seconds), str(memory), str(kept), str(writer), only]
    start = time.monotonic()
    with os.fdopen(reader, encoding="utf-8") as told:
        process = subprocess.Popen(  # noqa: S603  our own
            [sys.executable, "-m", "torture.trial", *own],
            cwd=ROOT,
            pass_fds=[writer],
            start_new_session=True,
        )
        os.close(writer)
        try:
            code = process.wait(_PATIENCE * seconds + grace)
            how = "" if code == 0 else f"the part ended with {code}"
        except subprocess.TimeoutExpired:
            how = "the part did not end in time"
        finally:  # what it started ends with it
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        tallies = [Tally(*json.loads(line)) for line in told if line.endswith("\n")]
    if how:
        tallies.append(Tally("the part itself", 1, 1, time.monotonic() - start, how))
    return title, tallies


def again(name: str, path: Path) -> int:
    """Try again what a failure left: 1, and what is wrong, if it still is."""
    try:
        import_module(f"torture.{name}").again(path)
    except Exception:  # noqa: BLE001  any is what is looked for
        traceback.print_exc()
        return 1
    print(f"{path}: as promised")
    return 0


def added(name: str, tallies: Sequence[Tally]) -> dict[str, list[int]]:
    """Add a run to the totals, and return those: cases, failures and seconds by what was tried."""
    known = json.loads(TOTALS.read_text("utf-8")) if TOTALS.exists() else {}
    totals: dict[str, list[int]] = known.setdefault(name, {})
    for what, cases, failures, seconds, _ in tallies:
        before = totals.get(what, [0, 0, 0])
        now = [before[0] + cases, before[1] + failures, round(before[2] + seconds)]
        totals[what] = now
    TOTALS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")
    return totals


def table(tallies: Sequence[Tally], totals: dict[str, list[int]] | None = None) -> str:
    """Lay tallies out as a Markdown table, with those of all runs."""
    more = ["in total |", "---:|"] if totals is not None else ["", ""]
    lines = [
        f"| tried | cases | failures | per second | {more[0]} |",
        f"|---|---:|---:|---:|{more[1]}---|",
    ]
    for what, cases, failures, seconds, said in tallies:
        rate = f"{cases / seconds:,.0f}" if seconds > 0 and cases >= seconds else ""
        total = f" {totals[what][0]:,} |" if totals is not None else ""
        lines.append(f"| {what} | {cases:,} | {failures:,} | {rate} |{total} {said} |")
    return "\n".join(lines)


def _machine() -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in COMPARED)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    where = f"Python {platform.python_version()} on {platform.machine()} with {cores} cores"
    return f"{where}, {versions}"


if __name__ == "__main__":
    sys.exit(main())
