"""Damaged files give values or an error of the package, never anything else."""

from __future__ import annotations

from tests.contracts.every import DECLARED
from xckpt.testing import Damage


class TestDamage(Damage):
    tested = DECLARED
