"""Planned files are read back, for everything that a format can hold."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.every import WRITTEN
from tests.formats.indexes import dense, draft_of, filled, plain
from tests.formats.planned import draft_and_data, materialize
from tests.sources import CountingSource
from xckpt import UnsupportedError, formats
from xckpt.elements import ELEMENT_TYPES

if TYPE_CHECKING:
    from tests.contracts.declared import Declared
    from xckpt.formats.plan import Draft
    from xckpt.index import Index

every_format = pytest.mark.parametrize("declared", WRITTEN, ids=lambda declared: declared.name)
# No tensor is named like a module: formats with modules have no place for both.
NAMES = st.lists(
    st.from_regex("[a-z]{1,4}(\\.[a-z0-9]{1,3}){0,2}", fullmatch=True), unique=True, max_size=5
).filter(lambda names: not any(a.startswith(f"{b}.") for a in names for b in names))


@st.composite
def drafts(draw: st.DrawFn, declared: Declared) -> Draft:
    """Draw dense tensors of the types, orders, compressions and digests that a format has."""
    can = formats.get(declared.name).can
    types = [name for name in can.types if ELEMENT_TYPES[name].bits >= 8]
    tensors = []
    for name in draw(NAMES):
        shape = tuple(draw(st.lists(st.integers(2, 5), min_size=1, max_size=3)))
        options: dict[str, Any] = {"order": draw(st.sampled_from(can.orders))}
        options["compression"] = draw(st.sampled_from([None, *can.compressions]))
        options["algorithm"] = draw(st.sampled_from([None, *can.digests]))
        tensors.append(dense(name, draw(st.sampled_from(types)), shape, **options))
    return draft_of(*tensors)


def copied(declared: Declared, draft: Draft, data: Any) -> tuple[Index, bytes]:
    """Write what is wanted and read it again."""
    file_format = formats.get(declared.name)
    file = materialize(file_format.plan(draft, **declared.plan_options), data)
    return file_format.read(CountingSource(file)), file


@every_format
@given(data=st.data())
def test_planned_files_are_read_back(declared: Declared, data: st.DataObject) -> None:
    draft = data.draw(drafts(declared))
    contents = filled(draft)
    again, file = copied(declared, draft, contents)
    tensors, _ = plain(again)
    for name, tensor in plain(draft)[0].items():
        read_back = tensors.pop(name)
        assert replace(read_back, attrs={}, dims=None, path=None, order=tensor.order) == tensor
        assert read_back.order in {tensor.order, formats.get(declared.name).can.orders[0]}
    assert not tensors
    copy, parts = draft_and_data(again, file)
    assert {name: parts[name] for name in contents} == contents
    # The order of tensors may be the format's own; then nothing changes any more.
    once_more, file = copied(declared, copy, parts)
    assert plain(once_more) == plain(again)
    assert copied(declared, *draft_and_data(once_more, file))[1] == file


@every_format
def test_a_plan_pickles_and_knows_its_extents(declared: Declared) -> None:
    file_format = formats.get(declared.name)
    order = file_format.can.orders[0]
    draft = draft_of(dense("a.w", order=order), dense("a.b", shape=(2,), order=order))
    plan = file_format.plan(draft, **declared.plan_options)
    assert {(planned.tensor, planned.role) for planned in plan.parts} == {
        ("a.w", "data"),
        ("a.b", "data"),
    }
    data = filled(draft)
    assert materialize(pickle.loads(pickle.dumps(plan)), data) == materialize(plan, data)


@every_format
def test_unsupported_contents_are_refused(declared: Declared) -> None:
    file_format = formats.get(declared.name)
    missing = [dtype for dtype in ELEMENT_TYPES if dtype not in file_format.can.types]
    wrong = [dense("w", dtype) for dtype in missing]
    layouts: Any = {"sparse_csr", "quantized", "structural"} - set(file_format.can.layouts)
    wrong += [dense("w", file_format.can.types[0], layout=layout) for layout in layouts]
    for tensor in wrong:
        with pytest.raises(UnsupportedError) as caught:
            file_format.plan(draft_of(tensor), **declared.plan_options)
        assert caught.value.tensor == "w"
        assert caught.value.rule
