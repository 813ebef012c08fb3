"""The command ``xckpt``: what is in checkpoints, from the shell."""

from __future__ import annotations

from xckpt.cli.application import main

__all__ = ["main"]
