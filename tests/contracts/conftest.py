"""What the contracts share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dask
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def in_this_thread() -> Iterator[None]:
    """Compute thousands of small arrays without waking a thread for each of them."""
    with dask.config.set(scheduler="sync"):
        yield
