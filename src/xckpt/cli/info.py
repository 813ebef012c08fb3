"""``xckpt info``: what a file holds."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from xckpt.cli.files import Reading, json_option, reading_options
from xckpt.cli.output import print_document, print_text
from xckpt.errors import CheckpointWarning

if TYPE_CHECKING:
    from xckpt.index import Index, Part, Tensor

__all__ = ["info"]


@click.command
@click.argument("file")
@reading_options
@json_option
def info(file: str, reading: Reading, *, as_json: bool) -> int:
    """Show what FILE holds."""
    with warnings.catch_warnings():
        # Both outputs state them.
        warnings.simplefilter("ignore", CheckpointWarning)
        index = reading.index(file)
    if as_json:
        print_document(_document(index))
        return 0
    # Of some tensors it is no news that they are not all of the file.
    print_text(repr(replace(index, nbytes=0) if reading.tensors else index))
    return 0


def _document(index: Index) -> dict[str, Any]:
    return {
        "format": index.format,
        "version": index.version,
        "source": index.source,
        "nbytes": index.nbytes,
        "attrs": index.attrs,
        "warnings": list(index.warnings),
        "shards": {
            name: {"size": shard.size, "digest": shard.digest}
            for name, shard in index.shards.items()
        },
        "tensors": [_tensor(tensor) for tensor in index.tensors.values()],
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    # What is nearly always the same is left out where it is.
    unusual = {
        "dims": None if tensor.dims is None else list(tensor.dims),
        "problem": None if tensor.problem is None else tensor.problem.reason,
        "attrs": tensor.attrs or None,
    }
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "layout": tensor.layout,
        "order": tensor.order,
        "nbytes": tensor.nbytes,
        "offset": min([p.offset for p in tensor.parts.values() if p.shard is None], default=None),
        "parts": {role: _part(part) for role, part in tensor.parts.items()},
        **{key: value for key, value in unusual.items() if value is not None},
    }


def _part(part: Part) -> dict[str, Any]:
    unusual = {
        "encoding": part.encoding,
        "decoded_nbytes": part.decoded_nbytes,
        "digest": part.digest,
        "shard": part.shard,
    }
    return {
        "dtype": part.dtype,
        "shape": None if part.shape is None else list(part.shape),
        "offset": part.offset,
        "nbytes": part.nbytes,
        **{key: value for key, value in unusual.items() if value is not None},
    }
