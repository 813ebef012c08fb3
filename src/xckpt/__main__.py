"""``python -m xckpt``."""

from __future__ import annotations

import sys

from xckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
