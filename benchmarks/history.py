"""The ratios of each version in a small file, and how they differ from those of the version before.

Only ratios are kept, since times depend on the machine. All of them are better when they are lower.
"""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.measuring import Result

# A figure may worsen by a quarter if the code becomes simpler.
_NOTABLE = 1.25


def record(path: Path, version: str, benchmark: str, results: Sequence[Result]) -> list[str]:
    """Store the ratios of a benchmark under a version; return the notable changes as lines."""
    history: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    ratios = _ratios(results)
    entry = history.setdefault(version, {"ratios": {}})
    entry["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
    entry["machine"] = (
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    )
    entry["ratios"][benchmark] = ratios
    path.write_text(json.dumps(history, indent=1, ensure_ascii=False) + "\n", "utf-8")
    earlier = [name for name in history if name != version]
    if not earlier:
        return []
    before = history[earlier[-1]]["ratios"].get(benchmark, {})
    return _changes(before, ratios, earlier[-1])


def _ratios(results: Sequence[Result]) -> dict[str, float]:
    """Name the ratios; rows called "the same" take the name of the row before and their peer."""
    ratios = {}
    subject = ""
    for result in results:
        name = result.what
        if name.startswith("the same"):
            name = f"{subject}, {name} / {result.against.partition(',')[0]}"
        else:
            subject = name
        if result.unit == "x":
            ratios[name] = round(result.value, 3)
    return ratios


def _changes(before: dict[str, float], after: dict[str, float], version: str) -> list[str]:
    """Describe the ratios that changed by more than a quarter, the worst first."""
    changes = {
        name: value / before[name]
        for name, value in after.items()
        if before.get(name, 0) > 0 and value > 0
    }
    return [
        f"{'worse' if change > 1 else 'better'}: {name}: {after[name]:.2f} ×, "
        f"{before[name]:.2f} × in {version}"
        for name, change in sorted(changes.items(), key=lambda item: -item[1])
        if not 1 / _NOTABLE <= change <= _NOTABLE
    ]
