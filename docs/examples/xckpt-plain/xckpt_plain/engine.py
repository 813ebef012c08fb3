"""The xarray engine."""

from xckpt.backend import CheckpointBackend


class PlainBackend(CheckpointBackend):
    format = "plain"
