"""Parts of tensors: what is checked of them, and what errors say."""

from __future__ import annotations

import pytest

from xckpt.arrays.parts import PartReader
from xckpt.errors import FormatError, IntegrityError
from xckpt.index import Part
from xckpt.storage import open_source


@pytest.mark.parametrize(
    ("digest", "error"), [("crc32:00000000", IntegrityError), ("crc32:0", FormatError)]
)
def test_a_wrong_digest_is_told_with_its_place(
    digest: str, error: type[FormatError | IntegrityError]
) -> None:
    part = Part("uint8", (4,), offset=8, nbytes=4, digest=digest)
    reader = PartReader(open_source(b"\0" * 8 + b"data"), part, verify=True)
    with pytest.raises(error) as info:
        reader.check(4)
    assert info.value.offset == 8


def test_the_digest_of_a_raw_part_is_compared_where_wanted() -> None:
    part = Part("uint8", (4,), offset=8, nbytes=4, digest="crc32:00000000")
    reader = PartReader(open_source(b"\0" * 8 + b"data"), part)
    assert b"".join(reader.blocks(4, 3)) == b"data"
    with pytest.raises(IntegrityError) as info:
        list(reader.blocks(4, 3, compare=True))
    assert info.value.offset == 8
