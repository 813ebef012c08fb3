"""The structure of a model as tables and as blocks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from xckpt.formatting import counted, shape_text
from xckpt.notebook.documents import Block, Field, Sentence, Table
from xckpt.notebook.folding import families_of, united
from xckpt.structure import Role, Structure, TensorInfo
from xckpt.structure.forms import forms_of
from xckpt.tensor_rows import Row

if TYPE_CHECKING:
    import pandas as pd


_SOURCES = {
    "user": "you",
    "file": "the file",
    "model": "the model",
    "family": "the family",
    "convention": "a convention",
    "shape": "the shape",
}


def structure_table(structure: Structure) -> pd.DataFrame:
    """Return a table with a row for each tensor."""
    import pandas as pd

    infos = {name: structure[name] for name in structure}
    columns = {
        "role": [info.role.value for info in infos.values()],
        "component": [info.component for info in infos.values()],
        "layer": [structure.layer(name) for name in infos],
        "module": [info.module for info in infos.values()],
        "module_type": [info.module_type for info in infos.values()],
        "slot": [info.slot for info in infos.values()],
        "param": [info.param for info in infos.values()],
        "axes": [_axes_text(info) for info in infos.values()],
        "owner": [info.owner or "" for info in infos.values()],
        "evidence": [_reason(info) for info in infos.values()],
    }
    return pd.DataFrame(columns, index=pd.Index(list(infos), name="tensor", dtype=object))


def evidence_table(info: TensorInfo) -> pd.DataFrame:
    """Return a table with a row for each reason, strongest source first."""
    import pandas as pd

    rows = [
        (evidence.field, str(evidence.value), evidence.source, evidence.reason, evidence.decided)
        for evidence in info.evidence
    ]
    return pd.DataFrame(rows, columns=["field", "value", "source", "reason", "decided"])


def structure_blocks(structure: Structure) -> list[Block]:
    """Return a row for tensors of one kind whose names differ in numbers or in one word."""
    # A graph has many settings of its operators, which are a single line.
    names = [name for name in structure if not _is_setting(structure, name)]
    settings = len(structure) - len(names)
    infos = [structure[name] for name in names]
    kinds = [(i.role.value, i.module_type, i.slot, i.param, i.axes, _reason(i)) for i in infos]
    lines: list[tuple[str, ...]] = []
    for form in forms_of(names, kinds):
        info = infos[form.places[0]]
        rows = [Row(names[place], "", (), 0) for place in sorted(form.places)]
        (pattern,) = [family.pattern().text for family in united(families_of(rows))]
        count = f"×{len(rows)}" if len(rows) > 1 else ""
        axes = _axes_text(info) or shape_text(structure.described(rows[0].name).shape, "")
        kind = " ".join(filter(None, (info.slot, info.module_type, info.param)))
        lines.append((pattern, count, info.role.value, kind, axes, _reason(info)))
    if settings:
        lines.append((f"settings of the operators ×{settings}", "", "constant", "", "", ""))
    roles = Counter(role.value for role in structure.roles.values()).most_common()
    counts = ", ".join([f"{count:,} {role}" for role, count in roles])
    total = counted(len(structure), "tensor")
    words = [Field(title, "word") for title in ("count", "role", "kind", "axes")]
    fields = [Field("tensors", "pattern"), *words, Field("evidence")]
    return [Sentence("lead", f"{total}: {counts}"), Table(fields, lines)]


def _is_setting(structure: Structure, name: str) -> bool:
    """Return whether a tensor is a constant because of the operators that use it."""
    if structure.roles[name] is not Role.CONSTANT:
        return False
    reasons = [e for e in structure[name].evidence if e.field == "role" and e.decided]
    return any(reason.source == "file" for reason in reasons)


def _axes_text(info: TensorInfo) -> str:
    return ", ".join([axis or "?" for axis in info.axes]) if any(info.axes) else ""


def _reason(info: TensorInfo) -> str:
    """Return the reason for the role."""
    for evidence in info.evidence:
        if evidence.field == "role" and evidence.decided:
            return f"{_SOURCES[evidence.source]}: {evidence.reason}"
    return ""
