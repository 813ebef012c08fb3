"""The suites of xckpt, for plain tensors."""

import pytest

from xckpt.testing import Bad, BadFiles, Damage, Opening, Samples


class PlainSamples(Samples):
    def bad(self):
        return [pytest.param(b'PLAIN1\6\0\0\0{"w":1', id="json")]

    def verdict(self, file):
        return Bad(file, "open")


class TestPlain(BadFiles, Damage, Opening):
    tested = [PlainSamples(name="plain")]
