"""``ds.ckpt`` and ``dt.ckpt``: what a checkpoint adds to the xarray objects it was opened as."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

import xarray as xr

from xckpt import formats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.notebook.summary import Summary

__all__ = ["CheckpointAccessor"]

_SIZE_NAME = re.compile(r"d\d+(_\d+)?")


@xr.register_dataset_accessor("ckpt")
@xr.register_datatree_accessor("ckpt")
class CheckpointAccessor:
    """What xckpt knows of a Dataset or DataTree that one of its engines opened.

    Its ``repr`` is the folded summary of the tensors in it: repeated modules as one line each,
    with counts, shapes, element types and sizes. It reads no data.

    Parameters
    ----------
    obj : xarray.Dataset or xarray.DataTree
        The object that it is an attribute of.

    Examples
    --------
    >>> ds = xr.open_dataset("m.zt", engine="ztensor")  # doctest: +SKIP
    >>> ds.ckpt  # doctest: +SKIP
    <Checkpoint m.zt>  ztensor 1.0 · 111 tensors · 150.2 M params · 300.1 MiB · lazy
      ...
    """

    def __init__(self, obj: xr.Dataset | xr.DataTree) -> None:
        self._obj = obj

    def __repr__(self) -> str:
        from xckpt.notebook.text import render

        if self.format is None:
            return _not_ours(self._obj)
        return render(self._summary())

    @property
    def format(self) -> str | None:
        """Name of the format that the object was opened from, None for other objects."""
        name = self._encoding.get("format")
        return name if name in formats.names() else None

    @property
    def _encoding(self) -> dict[Any, Any]:
        root = self._obj.root if isinstance(self._obj, xr.DataTree) else self._obj
        return root.encoding

    def _summary(self) -> Summary:
        from xckpt.notebook.folding import Row
        from xckpt.notebook.summary import new_summary

        rows = []
        dims: dict[str, int] = {}
        for name, variable in self._variables():
            encoding = variable.encoding
            shape = variable.shape
            dtype = str(encoding.get("dtype", variable.dtype))
            nbytes = encoding.get("nbytes", variable.nbytes)
            rows.append(Row(name, dtype, shape, nbytes, prod(shape), _storage(encoding)))
            dims.update(zip(map(str, variable.dims), shape, strict=True))
        return new_summary(
            rows,
            title=str(self._encoding.get("source", "")),
            format=str(self.format),
            version=str(self._encoding.get("format_version", "")),
            attrs=self._obj.attrs,
            dims={dim: size for dim, size in dims.items() if not _SIZE_NAME.fullmatch(dim)},
        )

    def _variables(self) -> Iterator[tuple[str, xr.Variable]]:
        """Walk all variables, with their flat names.

        By ``variables`` of each node: ``ds[name]`` takes time in proportion to the number of
        variables, so a loop over it would be quadratic.
        """
        nodes = self._obj.subtree if isinstance(self._obj, xr.DataTree) else [self._obj]
        for node in nodes:
            for name, variable in node.variables.items():
                encoding = variable.encoding
                flat = encoding.get("tensor", str(name))
                part = encoding.get("part")
                yield (flat if part is None else f"{flat}:{part}"), variable


def _storage(encoding: dict[Any, Any]) -> str:
    """Name how a variable is stored, as the summary shows it."""
    from xckpt.notebook.summary import storage_words

    if "part" in encoding:
        return storage_words("dense", [encoding.get("compression")])
    parts = encoding.get("parts", {"data": encoding}).values()
    return storage_words(encoding.get("layout", "dense"), [p.get("compression") for p in parts])


def _not_ours(obj: xr.Dataset | xr.DataTree) -> str:
    engines = ", ".join(repr(name) for name in formats.names())
    return (
        f"<Checkpoint: none>  this {type(obj).__name__} was not opened from a checkpoint by "
        f"xr.open_dataset(..., engine=...) with one of the engines {engines}, or an operation "
        "made a new one of it"
    )
