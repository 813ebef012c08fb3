"""From the records of all shards to tensors: names of variables, places in a tree, problems.

A name is unique in its shard only: the ranks of a run have copies, or slices, of the same
parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from xckpt.formats.mlcp.records import size_error
from xckpt.index import Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.errors import CheckpointError
    from xckpt.formats.mlcp.metadata import ShardMetadata
    from xckpt.formats.mlcp.records import Record

__all__ = ["ListedShard", "make_tensors", "variable_name"]

_SUFFIX = re.compile(r"@rank_-?[0-9]+\Z")
# A tree splits names at so many dots; its root is the rank here.
_DEEPEST = 63


class ListedShard(NamedTuple):
    """The tensors of a shard, and where their data are.

    Parameters
    ----------
    rank : int
        Unique in the checkpoint.
    records : sequence of Record
        The tensors.
    said : ShardMetadata or None
        What metadata say of the shard.
    offsets : sequence of int
        Where the data of each begin in their file; empty where there is a problem.
    file : str or None
        The file that has them; None is the one that has the metadata.
    problem : CheckpointError or None
        Why there are no data.
    """

    rank: int
    records: Sequence[Record]
    said: ShardMetadata | None = None
    offsets: Sequence[int] = ()
    file: str | None = None
    problem: CheckpointError | None = None


def variable_name(name: str, rank: int, *, repeated: bool) -> str:
    """Name the variable of a tensor, so that no two tensors of a checkpoint get one name."""
    return f"{name}@rank_{rank}" if repeated or _SUFFIX.search(name) else name


def make_tensors(shards: Sequence[ListedShard]) -> dict[str, Tensor]:
    """Make the tensors of a checkpoint."""
    times = Counter(record.name for shard in shards for record in shard.records)
    in_groups = len(times) < times.total()
    tensors = {}
    for shard in shards:
        attrs = {"rank": shard.rank}
        for number, record in enumerate(shard.records):
            name = record.name
            variable = variable_name(name, shard.rank, repeated=times[name] > 1)
            problem: CheckpointError | None = None if record.fits else size_error(record)
            if record.nbytes or problem:
                problem = shard.problem or problem
            tensors[variable] = Tensor(
                variable,
                record.dtype,
                record.shape,
                {} if problem else {"data": _part(shard, number)},
                attrs=attrs if variable == name else {**attrs, "name": name},
                problem=problem,
                path=_path(shard.rank, name) if in_groups else None,
            )
    return tensors


def _path(rank: int, name: str) -> tuple[str, ...]:
    return (f"rank_{rank}", *name.split(".", _DEEPEST))


def _part(shard: ListedShard, number: int) -> Part:
    _, dtype, shape, nbytes = shard.records[number]
    if shard.problem is not None:  # nothing is read of a tensor without elements
        return Part(dtype, shape, 0, nbytes)
    return Part(dtype, shape, shard.offsets[number], nbytes, shard=shard.file)
