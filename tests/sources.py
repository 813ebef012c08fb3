"""Sources for tests."""

from xckpt.testing import CountingSource

__all__ = ["CountingSource"]
