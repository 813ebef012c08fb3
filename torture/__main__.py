"""Try the promises of the package: ``python -m torture [PART[:ONLY]...] [--minutes M] [--seed N]``.

``python -m torture again PART PATH`` repeats a recorded failure.
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

#: Parts with their shares of the time.
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

#: Address space of a part in bytes; threads reserve much more than they use.
MEMORY = 8 << 30
# A part is killed after its time multiplied by the first number, plus the second in seconds.
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
    """Run the named parts, or all, and write the page; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        "python -m torture", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; or: again PART PATH")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts (10)")
    parser.add_argument("--seed", type=int, help="of everything random (a new one)")
    parser.add_argument("--no-page", action="store_true", help="write no page and no totals")
    options = parser.parse_args(arguments)
    if options.parts[:1] == ["again"]:
        name, *paths = options.parts[1:]
        return max([again(name, Path(path)) for path in paths], default=2)
    names = options.parts or [*PARTS]
    shares = [PARTS.get(name.partition(":")[0]) for name in names]
    unknown = [name for name, share in zip(names, shares, strict=True) if share is None]
    if unknown or options.minutes <= 0:
        parser.error(f"no part {unknown[0]!r}: {', '.join(PARTS)}" if unknown else "no time")
    seed = random.randrange(1 << 32) if options.seed is None else options.seed  # noqa: S311
    print(f"seed {seed}", flush=True)
    failures, seconds = 0, 60 * options.minutes / sum(share or 0 for share in shares)
    for (name, _, only), share in zip([n.partition(":") for n in names], shares, strict=True):
        title, tallies = part(f"torture.{name}", seed, seconds * (share or 0), only=only)
        print(f"\n{title}\n\n{table(tallies)}", flush=True)
        failures += sum(tally.failures for tally in tallies)
        if not (options.no_page or only):
            totals = added(name, tallies)
            lines = table(tallies, totals)
            total_cases = sum(cases for cases, _, _ in totals.values())
            hours = sum(took for *_, took in totals.values()) / 3600
            origin_ = (
                f"Seed {seed}, {_machine()}. In total {total_cases:,} cases in {hours:.1f} hours."
            )
            section = f"## {name.capitalize()}\n\n{title}\n\n{lines}\n\n{origin_}\n"
            write_section(PAGE, HEAD, [*PARTS], name, section)
    print(f"\n{failures} failures, seed {seed}")
    return 1 if failures else 0


def part(
    module: str, seed: int, seconds: float, *, memory: int = MEMORY, grace: float = _GRACE,
    kept: Path = KEPT,
    only: str = "",
) -> tuple[str, list[Tally]]:  # fmt: skip
    """Run a part in a separate process, within limits; return its title and tallies."""
    title = (import_module(module).__doc__ or module).strip()
    reader, writer = os.pipe()
    arguments = [module, str(seed), str(seconds), str(memory), str(kept), str(writer), only]
    start = time.monotonic()
    with os.fdopen(reader, encoding="utf-8") as output:
        process = subprocess.Popen(  # noqa: S603  our own
            [sys.executable, "-m", "torture.trial", *arguments],
            cwd=ROOT,
            pass_fds=[writer],
            start_new_session=True,
        )
        os.close(writer)
        try:
            code = process.wait(_PATIENCE * seconds + grace)
            problem = "" if code == 0 else f"the part ended with {code}"
        except subprocess.TimeoutExpired:
            problem = "the part did not end in time"
        finally:  # end its child processes, too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        tallies = [Tally(*json.loads(line)) for line in output if line.endswith("\n")]
    if problem:
        tallies.append(Tally("the part itself", 1, 1, time.monotonic() - start, problem))
    return title, tallies


def again(name: str, path: Path) -> int:
    """Repeat a recorded failure; print the error and return 1 if it still fails."""
    try:
        import_module(f"torture.{name}").again(path)
    except Exception:  # noqa: BLE001  any is what is looked for
        traceback.print_exc()
        return 1
    print(f"{path}: as promised")
    return 0


def added(name: str, tallies: Sequence[Tally]) -> dict[str, list[int]]:
    """Add a run to the totals; return cases, failures and seconds in total by row."""
    totals_by_part = json.loads(TOTALS.read_text("utf-8")) if TOTALS.exists() else {}
    totals: dict[str, list[int]] = totals_by_part.setdefault(name, {})
    for row, cases, failures, seconds, _ in tallies:
        previous = totals.get(row, [0, 0, 0])
        current = [previous[0] + cases, previous[1] + failures, round(previous[2] + seconds)]
        totals[row] = current
    TOTALS.write_text(json.dumps(totals_by_part, indent=1, sort_keys=True) + "\n", "utf-8")
    return totals


def table(tallies: Sequence[Tally], totals: dict[str, list[int]] | None = None) -> str:
    """Return the tallies as a Markdown table, with the totals of all runs if given."""
    extra = ["in total |", "---:|"] if totals is not None else ["", ""]
    lines = [
        f"| tried | cases | failures | per second | {extra[0]} |",
        f"|---|---:|---:|---:|{extra[1]}---|",
    ]
    for row, cases, failures, seconds, summary in tallies:
        rate = f"{cases / seconds:,.0f}" if seconds > 0 and cases >= seconds else ""
        total = f" {totals[row][0]:,} |" if totals is not None else ""
        lines.append(f"| {row} | {cases:,} | {failures:,} | {rate} |{total} {summary} |")
    return "\n".join(lines)


def _machine() -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in COMPARED)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    interpreter = f"Python {platform.python_version()} on {platform.machine()} with {cores} cores"
    return f"{interpreter}, {versions}"


if __name__ == "__main__":
    sys.exit(main())
