"""A part of `make torture` for tests, whose seed selects its behaviour."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torture.trial import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torture.trial import Trial

ENDLESS, GREEDY, BROKEN = 1, 2, 3


def run(trial: Trial) -> Iterator[Tally]:
    yield Tally("drawn", 3, 0, 1.5, str(trial.random("x").random()))
    if trial.seed == ENDLESS:
        time.sleep(600)
    if trial.seed == GREEDY:
        bytearray(1 << 32)
    if trial.seed == BROKEN:
        for n in range(20):
            trial.fail("a promise", {"m.bin": bytes([n])}, "it was broken")
        yield Tally("a promise", 20, trial.failures, 0.0, "")


def again(path: Path) -> None:
    if (path / "m.bin").read_bytes() != b"mended":
        raise ValueError("it is broken")
