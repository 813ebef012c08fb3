"""Compare a pair, and check every claim against the truth."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

import xckpt
from torture.explaining.storing import write
from torture.trial import place

if TYPE_CHECKING:
    from pathlib import Path

    from torture.explaining.pairs import Pair

EXPLAINED = "explained"


@dataclass
class Verdict:
    """The false claims of a comparison, and the tensors that it did not explain."""

    #: Claims about damaged tensors: that they are explained, or nothing at all.
    false: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    #: The first sentence, if it begins with "all" though something is damaged.
    all_right: str = ""
    #: An error of the comparison.
    error: str = ""
    #: Undamaged tensors that are not explained, in layouts that are searched, and in others.
    open: list[str] = field(default_factory=list)
    open_unsearched: list[str] = field(default_factory=list)
    #: Explained tensors whose `rel_l2` is not that of the elements that belong together.
    mismeasured: list[str] = field(default_factory=list)
    seconds: float = 0.0
    #: How long it took without explanations; 0 if that was not measured.
    plain: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Return whether a claim is false or the comparison failed."""
        return bool(self.false or self.unnamed or self.all_right or self.error)

    def lines(self) -> list[str]:
        """Describe what is wrong in a line each."""
        lines = [f"explained: {name}" for name in self.false[:3]]
        lines += [f"unnamed: {name}" for name in self.unnamed[:3]]
        lines += [f"mismeasured: {name}" for name in self.mismeasured[:3]]
        lines += [f"says {self.all_right!r}"] if self.all_right else []
        return lines + ([f"error: {self.error}"] if self.error else [])


def judge(pair: Pair, folder: Path, *, is_timed: bool = False) -> Verdict:
    """Compare a pair, and check the outcomes against the known damage."""
    verdict = Verdict()
    a: Any = pair.model.tensors
    options: dict[str, Any] = {"cache": False, "progress": False}
    if pair.adapter:
        options["adapter"] = _write_adapter(pair, folder)
    b = write(pair.tensors, pair.converter.architecture, folder)
    if pair.is_reversed:
        a, b = b, a
    if is_timed:
        with suppress(Exception):
            start = time.perf_counter()
            xckpt.compare(a, b, names=_names(pair), **options)
            verdict.plain = time.perf_counter() - start
    start = time.perf_counter()
    try:
        comparison = xckpt.compare(a, b, explain=True, **options)
        table = xckpt.table(comparison)
    except Exception as error:  # noqa: BLE001  any is what is looked for
        verdict.error = f"{type(error).__name__} at {place(error)[1:][-1:]}: {error}"[:300]
        return verdict
    verdict.seconds = time.perf_counter() - start
    outcomes = table["outcome"].to_dict()
    mapped_names = {
        name: {part for part in str(names).split(", ") if part}
        for name, names in table["other_names"].to_dict().items()
    }
    _check_damage(pair, outcomes, mapped_names, verdict)
    sentence = str(comparison.attrs["explanation"])
    if pair.damaged and sentence.lower().startswith("all"):
        verdict.all_right = sentence[:160]
    verdict.mismeasured = _mismeasured(pair, outcomes, table["rel_l2"].to_dict())
    verdict.open = sorted(n for n in pair.searched if outcomes.get(n) != EXPLAINED)
    verdict.open_unsearched = sorted(n for n in pair.unsearched if outcomes.get(n) != EXPLAINED)
    return verdict


def _names(pair: Pair) -> dict[str, str]:
    """Return the true names in the second side by those in the first, of unjoined tensors."""
    names = {tensor.target.origins[0]: tensor.target.name for tensor in pair.tensors
             if len(tensor.target.origins) == 1}  # fmt: skip
    return {new: old for old, new in names.items()} if pair.is_reversed else names


def _check_damage(
    pair: Pair, outcomes: dict[str, str], mapped_names: dict[str, set[str]], verdict: Verdict
) -> None:
    a = pair.model.tensors
    stored_names = {tensor.target.name for tensor in pair.tensors}
    for name in sorted(pair.damaged):
        if name in stored_names and outcomes.get(name) == EXPLAINED:
            verdict.false.append(name)
        rows = {name, *pair.origins.get(name, ())}
        if all(outcomes.get(row) in {None, EXPLAINED} for row in rows):
            verdict.unnamed.append(name)
    for name in sorted(pair.hurt - pair.damaged):
        if outcomes.get(name) == EXPLAINED and not _is_elsewhere(
            pair, name, mapped_names.get(name, set())
        ):
            verdict.false.append(f"{name} (in a)")
    lost = sorted(pair.damaged - stored_names)
    verdict.unnamed = [n for n in verdict.unnamed if n not in lost
                       or not all(_has_copy(a, o) for o in pair.origins.get(n, ()))]  # fmt: skip


def _mismeasured(pair: Pair, outcomes: dict[str, str], measures: dict[str, float]) -> list[str]:
    """Return undamaged tensors whose error was measured between elements of other places."""
    names = []
    for tensor in pair.tensors:
        name, origins = tensor.target.name, tensor.target.origins
        is_plain = len(origins) == 1 and name in pair.searched and not pair.is_reversed
        if not is_plain or outcomes.get(name) != EXPLAINED:
            continue
        before = pair.model.tensors[origins[0]].astype(np.float64)
        intended = tensor.target.values.astype(np.float64)
        norm = float(np.sqrt(np.square(before).sum()))
        if before.size != intended.size or not np.isclose(np.linalg.norm(intended), norm, 1e-6):
            continue
        error = float(np.linalg.norm(tensor.numbers.astype(np.float64) - intended))
        measured = [measures[row] for row in (origins[0], name) if row in measures]
        if not any(np.isclose(m, error / norm if norm else 0, 0.01, 1e-9) for m in measured):
            names.append(name)
    return names


def _has_copy(tensors: dict[str, Any], name: str) -> bool:
    """Return whether a tensor has a copy or is constant."""
    values = tensors[name]
    return np.ptp(values.astype(np.float32)) == 0 or any(
        name_of_copy != name and np.array_equal(values, copy)
        for name_of_copy, copy in tensors.items()
    )


def _is_elsewhere(pair: Pair, name: str, claimed: set[str]) -> bool:
    """Return whether undamaged tensors with the same numbers justify an explanation."""
    return not claimed & pair.damaged and _has_copy(pair.model.tensors, name)


def _write_adapter(pair: Pair, folder: Path) -> Path:
    path = folder / "adapter"
    path.mkdir(exist_ok=True)
    save_file(pair.adapter, path / "adapter_model.safetensors")
    rank = min(next(iter(pair.adapter.values())).shape)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": []}
    (path / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return path
