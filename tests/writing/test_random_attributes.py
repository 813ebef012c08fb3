"""Random attributes in every format come back, or the warning names them."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from tests.writing.attributes import missing
from tests.writing.saved import ENGINES, OPTIONS
from tests.writing.test_attributes import index_of, warning_of
from xckpt import CheckpointError, formats, read_index
from xckpt.writing import convert, save

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False).filter(lambda x: math.copysign(1, x) == 1 or x),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)


def attributes(engine: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draw attributes with names that the format knows, or that it has never heard of."""
    can = formats.get(engine).can
    known = [*can.stated_attrs, *(can.tensor_attrs or ())]
    known += can.file_attrs if isinstance(can.file_attrs, tuple) else []
    names = st.text("abcxyz._é ", min_size=1, max_size=8)
    return st.dictionaries(st.sampled_from(known) | names if known else names, VALUES, max_size=4)


@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.data())
def test_attributes_come_back_or_are_named(engine: str, data: st.DataObject) -> None:
    of_file, of_tensor = data.draw(attributes(engine)), data.draw(attributes(engine))
    w = xr.Variable(("o", "i"), np.ones((2, 3), "f4"), of_tensor)
    ds = xr.Dataset({"a.w": w, "b": ("i", np.ones(3, "f4"))}, attrs=of_file)
    options = OPTIONS.get(engine, {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m"
        try:
            text = warning_of(save, ds, path, engine, **options)
        except (CheckpointError, TypeError, ValueError):
            return  # refused before anything is written
        index = read_index(path)
        assert missing(index_of(ds), index, text) == []
        # The file has no more to lose.
        assert warning_of(convert, path, Path(folder) / "again", engine, **options) == ""
        assert missing(index, read_index(Path(folder) / "again"), "") == []
