"""Common parts of the benchmarks: repeated timing, peak memory of a new process, and results."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import timeit
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["Result", "best_of", "in_fresh_process", "table", "write_section"]


_LONG_ENOUGH = 10.0
# Shorter calls are measured in loops: one call alone finds cold caches after a collection.
_SHORT = 0.01


@dataclass(frozen=True, slots=True)
class Result:
    """One line of a benchmark's table.

    Parameters
    ----------
    what : str
        What was measured.
    value : float
        The figure.
    unit : str
        Its unit; ``"x"`` for a ratio.
    against : str
        What a ratio is taken against, or other context.
    bound : float, optional
        The most it may be.
    """

    what: str
    value: float
    unit: str = "x"
    against: str = ""
    bound: float | None = None

    @property
    def verdict(self) -> str:
        """``"kept"`` or ``"EXCEEDED"``; empty without a bound."""
        if self.bound is None:
            return ""
        return "kept" if self.value <= self.bound else "EXCEEDED"


def best_of(function: Callable[[], Any], repeats: int = 5) -> float:
    """Return the shortest time of a call in seconds, because noise only adds time.

    Long calls are repeated less often. Short calls are repeated in loops of at least 0.2 s, without
    the collector of garbage.
    """
    times: list[float] = []
    while len(times) < repeats and sum(times) < _LONG_ENOUGH:
        gc.collect()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
        if times[-1] < _SHORT:
            timer = timeit.Timer(function)
            calls, _ = timer.autorange()
            return min(timer.repeat(repeats, calls)) / calls
    return min(times)


def in_fresh_process(code: str) -> dict[str, Any]:
    """Run code in a new interpreter and return the JSON object that it prints last.

    The code can call ``peak()``, which returns the peak of resident memory so far and the current
    anonymous memory in bytes, and ``watch()``, which returns a function for the largest growth of
    anonymous memory since then.
    """
    done = subprocess.run(  # noqa: S603  our own code
        [sys.executable, "-c", _PRELUDE + code], check=True, capture_output=True, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


_PRELUDE = """
import json
def peak():
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return {"resident": int(status["VmHWM"].split()[0]) * 1024,
            "anonymous": int(status["RssAnon"].split()[0]) * 1024}
def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
def watch():
    import threading
    before, most, done = peak()["anonymous"], [0], threading.Event()
    def look():
        while not done.wait(0.01):
            most[0] = max(most[0], peak()["anonymous"])
    threading.Thread(target=look, daemon=True).start()
    return lambda: (done.set(), most[0] - before)[1]
"""


def table(results: list[Result], *, bounds: bool = True) -> str:
    """Lay results out as a Markdown table, with or without their bounds."""
    lines = ["| measured | result | against |", "|---|---:|---|"]
    if bounds:
        lines = [f"{lines[0]} bound | |", f"{lines[1]}---:|---|"]
    for r in results:
        shown = f"{r.value:.2f} ×" if r.unit == "x" else f"{r.value:,.0f} {r.unit}"
        bound = "" if r.bound is None else f"≤ {r.bound:,g}"
        line = f"| {r.what} | {shown} | {r.against} |"
        lines.append(f"{line} {bound} | {r.verdict} |" if bounds else line)
    return "\n".join(lines)


def write_section(page: Path, head: str, names: Sequence[str], name: str, section: str) -> None:
    """Write a section under its name into a page, in place of the earlier one."""
    before = page.read_text(encoding="utf-8").split("\n## ")[1:] if page.exists() else []
    sections = {text.partition("\n")[0].lower(): f"## {text.strip()}\n" for text in before}
    sections[name] = section
    page.write_text("\n".join([head, *(sections[n] for n in names if n in sections)]), "utf-8")
