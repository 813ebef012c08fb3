"""Facts that formats hand over are plain values, and users correct what follows from them."""

from __future__ import annotations

from tests.contracts.every import DECLARED
from xckpt.testing import Facts


class TestFacts(Facts):
    tested = DECLARED
