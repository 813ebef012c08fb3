"""Test suites for formats, also of other packages; they need pytest and hypothesis.

Describe the files of a format by a subclass of `Samples`, and subclass the suites::

    class TestGoodFiles(xckpt.testing.GoodFiles):
        tested = [MySamples(name="my-format")]

Formats that write need only ``Samples(name=...)`` for `Damage`, `Facts` and `Opening`. The page
docs/adding-a-format.md has a complete example.
"""

import pytest

pytest.register_assert_rewrite("xckpt.testing.samples", "xckpt.testing.suites")

from xckpt.testing.samples import Bad, CountingSource, Expected, Samples, Want  # noqa: E402  after the line above
from xckpt.testing.suites import BadFiles, Damage, Facts, GoodFiles, Opening, Suite  # noqa: E402

__all__ = [
    "Bad",
    "BadFiles",
    "CountingSource",
    "Damage",
    "Expected",
    "Facts",
    "GoodFiles",
    "Opening",
    "Samples",
    "Suite",
    "Want",
]
