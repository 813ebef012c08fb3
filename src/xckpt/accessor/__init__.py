"""``ds.ckpt`` and ``dt.ckpt``: what a checkpoint adds to the xarray objects it was opened as."""

from __future__ import annotations

import re
from itertools import islice
from operator import is_
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

import xarray as xr

import xckpt
from xckpt import formats
from xckpt.accessor.forwarding import Forwarded
from xckpt.identity import base_id_text, stable_id
from xckpt.interrupts import uninterrupted

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import pandas as pd

    from xckpt.datasets.tensors import DtypeFilter, OpenTensors
    from xckpt.labels import TensorFilter
    from xckpt.labels.renaming import Renaming
    from xckpt.notebook.summary import ModuleTree, Summary, TensorFinding
    from xckpt.plots import Plots
    from xckpt.progress import ProgressOption
    from xckpt.statistics.channels import Reduced
    from xckpt.statistics.entries import Describable
    from xckpt.typing import DataArray, Dataset

__all__ = ["CheckpointAccessor"]

_RESULT = "ds.ckpt.table() is a DataFrame with one row for each tensor"
_MOST_TRIED = 8
# Names that people try, by the attribute that does the work.
_INSTEAD = {
    "summary()": "info show print inspect header describe ls",
    "tree()": "children structure",
    "modules()": "layers blocks experts",
    "find": "filter select search grep match query tensors",
    "stats()": "statistics mean std min max describe_all",
    "findings()": "health check check_health anomalies problems",
    "compare": "diff difference equals allclose",
    "spectrum()": "svd rank singular_values",
    "explore()": "browse view widget show_all",
    "plot.histogram": "hist distribution",
    "save": "write dump export to_file to_safetensors convert",
    "plain().to_netcdf": "to_netcdf to_zarr",
    "report": "html to_html markdown",
    "manifest()": "hash digest checksum sha256 fingerprint",
}
#: What it is an attribute of: of a tree, parts are trees.
Obj = TypeVar("Obj", bound=xr.Dataset | xr.DataTree)

_SIZE_NAME = re.compile(r"d\d+(_\d+)?")


@xr.register_dataset_accessor("ckpt")
@xr.register_datatree_accessor("ckpt")
@xr.register_dataarray_accessor("ckpt")
class CheckpointAccessor(Generic[Obj]):
    """What xckpt knows of a Dataset, DataTree or DataArray that one of its engines opened.

    Its ``repr`` is the folded summary of the tensors in it: repeated modules as one line each,
    with counts, shapes, element types and sizes, and what `stats` found wrong, once they were
    computed. It reads no data. That of statistics, a comparison or a histogram says what they are
    and shows the first rows of their table. A DataArray is what a Dataset of it alone is.

    Parameters
    ----------
    obj : xarray.Dataset, xarray.DataTree or xarray.DataArray
        The object that it is an attribute of.

    Examples
    --------
    >>> ds = xr.open_dataset("m.zt", engine="ztensor")  # doctest: +SKIP
    >>> ds.ckpt  # doctest: +SKIP
    <Checkpoint m.zt>  ztensor 1.0 · 111 tensors · 150.2 M params · 300.1 MiB · lazy
      ...
    """

    @overload
    def __init__(self: CheckpointAccessor[Dataset], obj: xr.DataArray) -> None: ...

    @overload
    def __init__(self, obj: Obj) -> None: ...

    def __init__(self, obj: Any) -> None:
        self._given: xr.Dataset | xr.DataTree | xr.DataArray = obj
        if isinstance(obj, xr.DataArray):
            from xckpt.datasets.mappings import as_dataset_of_one

            obj = as_dataset_of_one(obj)
        self._obj: Obj = obj
        self._names: frozenset[str] = frozenset()
        self._tensors: OpenTensors | None = None
        self._stats: xr.Dataset | None = None
        self._findings: tuple[TensorFinding, ...] | None = None
        self._described: list[Any] = []  # the arrays that the statistics are of

    if not TYPE_CHECKING:  # a type checker would take any name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            from xckpt.labels.filters import suggest_word

            known = [public for public in vars(CheckpointAccessor) if not public.startswith("_")]
            meant = suggest_word(name, _INSTEAD, known)
            hint = f"did you mean .ckpt.{meant}?" if meant else f"it has {', '.join(known)}"
            raise AttributeError(f".ckpt has no attribute {name!r}; {hint}")

    def __repr__(self) -> str:
        from xckpt.notebook.text import render

        result = self._result()
        if result is not None:
            return result
        return render(self._summary()) if self._has_summary else _not_ours(self._given)

    def _repr_html_(self) -> str:
        from html import escape

        result = self._result()
        if result is not None:
            return f"<pre style='line-height:1.4'>{escape(result)}</pre>"
        if not self._has_summary:
            return f"<p>{escape(_not_ours(self._given))}</p>"
        return self._html(self._summary())

    # What `xckpt.notebook.extension` shows in place of xarray's view of very many variables; None
    # for the objects of others.
    def _repr_large_(self, note: str) -> dict[str, str] | None:
        from html import escape

        from xckpt.notebook.text import render

        if not self._is_ours:
            return None
        if self._is_result:
            text = f"{self._obj!r}\n{_RESULT}\n{note}"
            return {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}
        summary = self._summary(notes=[note])
        return {"text/plain": render(summary), "text/html": self._html(summary)}

    def _html(self, summary: Summary) -> str:
        from xckpt.notebook.html import render

        obj = self._called
        calls = [f"{obj}.ckpt.explore()", f"{obj}.ckpt.stats()"]
        # Where modules are listed, they are followed by the call that chooses some.
        if summary.choose and not summary.modules:
            calls.append(summary.choose)
        return render(summary, calls)

    @property
    def format(self) -> str | None:
        """Name of the format that the object was opened from, None for other objects."""
        name = self._encoding.get("format")
        return name if name in formats.names() else None

    def summary(self, by: Literal["pattern", "dtype", "layer", "role"] = "pattern") -> pd.DataFrame:
        """Sum the tensors up in a table, largest first. Nothing is read.

        Parameters
        ----------
        by : {"pattern", "dtype", "layer", "role"}
            One row for each pattern of names, each stored element type, each numbered module, or
            each role: weights, moments of an optimizer, ...

        Returns
        -------
        pandas.DataFrame
            With the columns ``tensors``, ``parameters`` (trainable elements), ``nbytes`` and
            ``share``; patterns have ``shape``, ``dtype`` and ``storage`` as well. Tied tensors
            count once.

        Raises
        ------
        ValueError
            If `by` is none of these.

        Examples
        --------
        >>> ds.ckpt.summary("dtype")["nbytes"]  # doctest: +SKIP
        """
        from xckpt.datasets.tensors import OpenTensors
        from xckpt.notebook.summary import sizes_table

        return sizes_table(OpenTensors(self._obj).rows, by)

    def tree(self, depth: int = 3) -> ModuleTree:
        """Show the modules, numbered ones folded, with how many tensors and bytes are in them.

        Parameters
        ----------
        depth : int, default 3
            How many levels of the names.

        Returns
        -------
        ModuleTree
            Shows itself in a notebook or a terminal.

        Examples
        --------
        >>> ds.ckpt.tree(4)  # doctest: +SKIP
        """
        from xckpt.datasets.tensors import OpenTensors
        from xckpt.notebook.summary import ModuleTree

        return ModuleTree(OpenTensors(self._obj).rows, depth)

    def modules(self) -> pd.DataFrame:
        """Say which numbers each module has, and which tensors have them. Nothing is read.

        It tells why stacking makes both ``layers`` and ``layers_2``: their tensors have different
        numbers.

        Returns
        -------
        pandas.DataFrame
            One row for each set of numbers: ``module``, ``numbers`` (``"{0..60}"``), how many
            these are, ``dim`` (the dimension that has them, empty where they are not stacked), and
            ``variables``, the names of the tensors without their numbers.

        Examples
        --------
        >>> ds = xr.open_dataset("moe.zt", engine="ztensor", stack=True)  # doctest: +SKIP
        >>> ds.ckpt.modules()  # doctest: +SKIP
        """
        import pandas as pd

        from xckpt.datasets.stacking import number_sets
        from xckpt.notebook.folding import indices_text

        rows = [
            (s.module, indices_text(map(str, s.numbers)), len(s.numbers), s.dim or "", s.variables)
            for s in number_sets(self._obj)
        ]
        return pd.DataFrame(rows, columns=["module", "numbers", "count", "dim", "variables"])

    def stack(
        self,
        modules: Literal[True] | str | Collection[str] = True,  # noqa: FBT002  one of three kinds
        join: Literal["exact", "outer"] = "exact",
    ) -> Obj:
        """Make numbered modules dimensions, as ``open_dataset(..., stack=...)`` does.

        ``layers.0.mlp.w``, ``layers.1.mlp.w``, ... of one shape and element type become the
        variable ``layers.mlp.w`` with a dimension ``layers``, whose coordinate has the numbers.
        Nothing is read.

        Parameters
        ----------
        modules : True, str, or list of str, default True
            The modules whose numbers become dimensions, by default all.
        join : {"exact", "outer"}, default "exact"
            What becomes of modules of which some tensors have only some numbers. "exact": other
            numbers are another dimension (``layers_1``). "outer": one dimension has them all, and
            members that are absent are NaN; variables whose type has no NaN, as integers, are
            stacked as for "exact".

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            As the object is. A tensor whose name differs from no other by numbers alone, or that
            has another shape or type, stays as it is.

        Raises
        ------
        TypeError
            If `modules` is none of these.
        ValueError
            If `join` is neither.

        Examples
        --------
        >>> ds = xr.open_dataset("m.zt", engine="ztensor")  # doctest: +SKIP
        >>> ds.ckpt.stack()["layers.mlp.w"].sel(layers=5)  # doctest: +SKIP
        """
        from xckpt.datasets.stacking import stack_modules

        return stack_modules(self._obj, modules, join)

    def unstack(self) -> Obj:
        """Return every stacked tensor a variable of its own again, the inverse of `stack`.

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            As the object is, with its tensors in the order of the file. A selection gives the
            tensors that it has; what was computed from stacked variables stays as it is.

        Raises
        ------
        ValueError
            If a stacked dimension was renamed or lost its coordinate, so that it cannot be told
            which tensors are there.

        Examples
        --------
        >>> ds = xr.open_dataset("m.zt", engine="ztensor", stack=True)  # doctest: +SKIP
        >>> ds.sel(layers=[0, 1]).ckpt.unstack()  # doctest: +SKIP
        """
        from xckpt.datasets.stacking import unstack_modules

        return unstack_modules(self._obj)

    def __getitem__(self, name: str) -> DataArray:
        """Return a tensor by the name that the file has for it, stacked or in a tree too.

        Parameters
        ----------
        name : str
            ``"layers.17.mlp.w"``, or the name of a variable.

        Returns
        -------
        xarray.DataArray
            Lazy if the object is.

        Raises
        ------
        KeyError
            If there is no such tensor; the message has similar names.

        Examples
        --------
        >>> ds = xr.open_dataset("m.zt", engine="ztensor", stack=True)  # doctest: +SKIP
        >>> ds.ckpt["layers.17.mlp.w"].std().compute()  # doctest: +SKIP
        """
        from xckpt.datasets.tensors import OpenTensors

        key: object = name
        if isinstance(key, list | slice):
            text = (
                "ds.ckpt[...] takes the name of one tensor: ds.ckpt.find takes several, or a glob"
            )
            raise TypeError(text)
        # Kept, as callers ask for many; made anew when the object was changed in place.
        if self._tensors is None or not self._tensors.holds(name):
            self._tensors = OpenTensors(self._obj)
        return cast("DataArray", self._tensors[name])

    def _ipython_key_completions_(self) -> list[str]:
        from xckpt.datasets.tensors import OpenTensors

        return [row.name for row in OpenTensors(self._obj).rows]

    def sel(self, **modules: int | Sequence[int] | slice) -> Obj:
        """Choose the tensors that are in certain modules, by their numbers, stacked or not.

        Unlike xarray's own ``sel`` it goes by the name of the module, across all dimensions that
        stacking made of it (``layers``, ``layers_2``), and leaves out what is in none of these
        modules.

        Parameters
        ----------
        **modules : int, list of int, or slice
            ``layers=17``, ``layers=[0, 23]`` or ``layers=slice(4, 8)``, whose end is included.

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            As the object is. A single number of a stacked module drops its dimension.

        Raises
        ------
        KeyError
            If there is no such module, or no such number of it.
        TypeError
            If an indexer is none of these.

        Examples
        --------
        >>> ds = xr.open_dataset("moe.zt", engine="ztensor", stack=True)  # doctest: +SKIP
        >>> ds.ckpt.sel(layers=17, experts=3)  # doctest: +SKIP
        """
        from xckpt.datasets.stacking import select_modules

        return select_modules(self._obj, modules)

    def isel(self, **modules: int | Sequence[int] | slice) -> Obj:
        """Choose tensors as `sel` does, by positions among the numbers that a module has.

        Parameters
        ----------
        **modules : int, list of int, or slice
            ``layers=-1`` is the last layer.

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            As the object is.

        Raises
        ------
        KeyError
            If there is no such module.
        IndexError
            If it has no such position.

        Examples
        --------
        >>> ds = xr.open_dataset("moe.zt", engine="ztensor", stack=True)  # doctest: +SKIP
        >>> ds.ckpt.isel(layers=-1)  # doctest: +SKIP
        """
        from xckpt.datasets.stacking import select_modules

        return select_modules(self._obj, modules, by_position=True)

    def find(
        self,
        names: TensorFilter | None = None,
        *,
        dtype: DtypeFilter | None = None,
        min_bytes: int | str = 0,
    ) -> Obj:
        """Choose variables by name, element type and size.

        Parameters
        ----------
        names : str, iterable of str, re.Pattern or callable, optional
            A glob of whole names, several globs, a regular expression that is searched for, or a
            function from a name to a bool. In a tree names are those of the file, with dots.
        dtype : str or dtype, or a list of these, optional
            Element type as it is stored: ``"bfloat16"`` or ``"bf16"``, ``numpy.float32``.
        min_bytes : int or str, default 0
            Least stored size, in bytes or as ``"10 MiB"``.

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            As the object is, with the attributes of the file; empty if nothing matches.

        Raises
        ------
        TypeError
            If an argument is none of these.
        ValueError
            If `min_bytes` is a text that is no size.

        Warns
        -----
        CheckpointWarning
            If nothing matches; the warning suggests a filter or similar names.

        Examples
        --------
        >>> ds = xr.open_dataset("m.zt", engine="ztensor")  # doctest: +SKIP
        >>> ds.ckpt.find("*.q_proj.*", dtype="bfloat16", min_bytes="1 MiB")  # doctest: +SKIP
        """
        from xckpt.datasets.tensors import find

        return find(self._obj, names, dtype=dtype, min_bytes=min_bytes)

    def _keep(
        self, result: xr.Dataset, *, compute: bool = True, dim: object = None, **_: Any
    ) -> None:
        """Keep statistics of whole tensors, for the summary and for pictures."""
        if compute and dim is None:
            self._stats, self._findings = result, None
            self._described = self._arrays()

    stats = Forwarded(lambda: xckpt.stats, without="storage_options", after=_keep)
    histogram = Forwarded(lambda: xckpt.histogram, without="storage_options")
    spectrum = Forwarded(lambda: xckpt.spectrum)
    table = Forwarded(lambda: xckpt.table)
    save = Forwarded(lambda: xckpt.save)
    manifest = Forwarded(lambda: xckpt.manifest, without="engine storage_options")

    def findings(
        self,
        stats: xr.Dataset | None = None,
        *,
        ignore: str | Iterable[str] | None = None,
        progress: ProgressOption = None,
        cache: bool = True,
    ) -> pd.DataFrame:
        """List what looks wrong with tensors: NaN, dead channels, copied layers, ...

        From then on the summary shows it.

        Parameters
        ----------
        stats : xarray.Dataset, optional
            Statistics of this object: list what follows from them alone, and read nothing. By
            default the object itself if it is statistics; else tensors are read in one pass, unless
            what was found is in the cache.
        ignore : str or iterable of str, optional
            Rules not to list, such as ``"constant"``, perhaps for some tensors only:
            ``"dead_rows:*.delta"``.
        progress : bool or callable, optional
            As for `xckpt.stats`.
        cache : bool, default True
            As for `stats`.

        Returns
        -------
        pandas.DataFrame
            With the columns ``tensor, rule, value, severity, explanation``; see `xckpt.findings`.

        Examples
        --------
        >>> ds.ckpt.findings(ignore="constant")  # doctest: +SKIP
        """
        from xckpt.statistics import findings

        if stats is None and isinstance(self._obj, xr.Dataset) and "statistic" in self._obj.dims:
            stats = self._obj
        if stats is not None:
            return findings(stats, ignore=ignore)
        return self._examine(ignore=ignore, progress=progress, cache=cache)[1]

    def _examine(self, **options: Any) -> tuple[xr.Dataset, pd.DataFrame]:
        """Return statistics and findings, and keep both for the summary."""
        from xckpt.statistics import examine

        result, found = examine(self._obj, **options)
        self._keep(result)
        self._findings = _as_findings(found)
        return result, found

    def compare(
        self,
        other: Describable,
        *,
        names: Renaming | Literal["auto"] | None = None,
        tensors: TensorFilter | None = None,
        dim: Reduced | None = None,
        codes: bool = False,
        explain: bool = False,
        progress: ProgressOption = None,
        compute: bool = True,
        cache: bool = True,
        storage_options: dict[str, Any] | None = None,
    ) -> Dataset:
        """Compare with another checkpoint, tensor by tensor: what changed, and how much.

        Parameters
        ----------
        other : path, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
            Of whatever format and element types.
        names : "auto", mapping, callable, or pair of a regular expression and its replacement
            From the name of a tensor here to the name in `other`; ``"auto"`` finds them by content
            and by names that projects are known to give, see `xckpt.compare`.
        tensors : str, iterable of str, re.Pattern or callable, optional
            Compare only these.
        dim : str, int, iterable of these, or mapping of these to int, optional
            Dimensions to reduce, for one value for each channel or block; see `xckpt.compare`.
        codes : bool
            Whether to count the codes of quantised tensors of `other`: ``saturated``, ``unused``.
        explain : bool
            Whether to find out why tensors differ; see `xckpt.compare`.
        progress, compute, cache : optional
            As for `stats`.
        storage_options : dict, optional
            For fsspec, where `other` is a URL.

        Returns
        -------
        xarray.Dataset
            Its ``ckpt.table()`` has what changed most first.

        Examples
        --------
        >>> ds.ckpt.compare("tuned.safetensors").ckpt.table()  # doctest: +SKIP
        """
        from xckpt.statistics import compare

        return compare(
            self._given,
            other,
            names=names,
            tensors=tensors,
            dim=dim,
            codes=codes,
            explain=explain,
            progress=progress,
            compute=compute,
            cache=cache,
            storage_options=storage_options,
        )

    @property
    def names(self) -> dict[str, str]:
        """What the tensors of a comparison are called on its other side, of those on both.

        Examples
        --------
        >>> found = xckpt.compare("hf.safetensors", "model.gguf", names="auto")  # doctest: +SKIP
        >>> Path("names.json").write_text(json.dumps(found.ckpt.names))  # doctest: +SKIP
        >>> xckpt.convert("hf.safetensors", "new.gguf", names=found.ckpt.names)  # doctest: +SKIP
        """
        from xckpt.statistics import matched_names

        if not isinstance(self._obj, xr.Dataset) or "status" not in self._statistics:
            raise TypeError("names are of what ds.ckpt.compare() gives")
        return matched_names(self._obj)

    def explore(self) -> Any:
        """Search, sort and look into all tensors, in one widget for the notebook.

        Statistics are computed in the background, of the tensor that is selected or of all.

        Returns
        -------
        xckpt.notebook.explorer.Explorer
            ``.selected`` is the name of the selected tensor. Where widgets are not installed
            (``pip install 'xckpt[widgets]'``) it is the summary.

        Raises
        ------
        ValueError
            If the object was not opened from a checkpoint.

        Warns
        -----
        CheckpointWarning
            If widgets are not installed.

        Examples
        --------
        >>> explorer = ds.ckpt.explore()  # doctest: +SKIP
        >>> explorer.selected  # doctest: +SKIP
        'lm_head.weight'
        """
        with uninterrupted():  # ipywidgets and what they need
            from xckpt.accessor.exploring import explore
            from xckpt.datasets.tensors import OpenTensors

        if not self._has_summary:
            raise ValueError(_not_ours(self._given))
        tensors = OpenTensors(self._obj)
        return explore(tensors, self._summary(tensors), self._stats, self._known_findings())

    @property
    def plot(self) -> Plots:
        """Pictures: ``layers``, ``histogram``, ``treemap``, ``heatmap``, ``compare``, ``error``.

        Examples
        --------
        >>> ds.ckpt.plot.layers("std", "*.q_proj.weight")  # doctest: +SKIP
        """
        from xckpt.plots import Plots

        if self._stats is None:
            return Plots(self._obj)
        # Not after the object was changed in place.
        is_current = len(now := self._arrays()) == len(self._described)
        is_current = is_current and all(map(is_, now, self._described))
        return Plots(self._obj, self._stats if is_current else None)

    def report(
        self,
        path: str | os.PathLike[str],
        other: Describable | None = None,
        *,
        names: Renaming | Literal["auto"] | None = None,
        explain: bool = True,
        overwrite: bool = False,
        progress: ProgressOption = None,
        cache: bool = True,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        """Write a report to keep or to send: what is here, or what is between this and another.

        Of one checkpoint it has the summary, what looks wrong, and how statistics go along the
        layers. Of two it has what changed, why, how much, and what changed most.

        Parameters
        ----------
        path : str or os.PathLike
            The new file: HTML if it ends in ``.html``, Markdown if it ends in ``.md``. It holds all
            that it shows, and is small, however many tensors there are.
        other : path, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree, optional
            What to compare with.
        names : "auto", mapping, callable, or pair of a regular expression and its replacement
            From the name of a tensor here to the name in `other`; see `compare`.
        explain : bool, default True
            Whether to find out why tensors differ, which takes longer; see `compare`.
        overwrite : bool, default False
            Whether an existing file is replaced.
        progress, cache : optional
            As for `stats`.
        storage_options : dict, optional
            For fsspec, where `other` or `path` is a URL.

        Raises
        ------
        FileExistsError
            If there is such a file and `overwrite` is false.
        ValueError
            If `path` ends in something else.

        Notes
        -----
        Pictures need matplotlib (``pip install 'xckpt[plot]'``); tables have the same numbers.

        Examples
        --------
        >>> ds.ckpt.report("m.html")  # doctest: +SKIP
        >>> ds.ckpt.report("tuned.md", "tuned.safetensors")  # doctest: +SKIP
        """
        from os import fsdecode

        from xckpt.accessor.reporting import describe, document_for, finish, relate
        from xckpt.storage import new_file

        document = document_for(path)
        options: dict[str, Any] = {"progress": progress, "cache": cache}
        sink = new_file(fsdecode(path), overwrite=overwrite, storage_options=storage_options)
        with sink:  # what cannot be written is said before anything is computed
            if other is None:
                stats, _ = self._examine(**options)
                describe(document, self._summary(), stats, self.plot.layers)
            else:
                options |= {"names": names, "explain": explain, "storage_options": storage_options}
                found = self.compare(other, **options)
                both = self._summary(), _summary_of(other, storage_options)
                relate(document, both, found, self.plot.layers)
            sink.write(finish(document), 0)
            sink.commit()

    def plain(self) -> Any:
        """Return the same data with names, attributes and types that netCDF and zarr hold.

        Names that these formats do not allow (``a/b``) are replaced (``a%2Fb``). Attributes that
        are neither text nor numbers become JSON text. Element types that netCDF does not have
        become wider ones, and sparse chunks become dense. Nothing is read or computed.

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            As the object is. Attributes say what was replaced: ``xckpt_name``, ``xckpt_dims`` and
            ``xckpt_dtype`` of a variable, ``xckpt_attrs`` (old names of attributes by the new
            ones) and ``xckpt_json`` (which attributes are JSON text now).

        Warns
        -----
        CheckpointWarning
            If anything was replaced or left out; it says what.

        Examples
        --------
        >>> ds = xr.open_dataset("model.bin", engine="gptrs")  # doctest: +SKIP
        >>> ds.ckpt.plain().to_netcdf("model.nc")  # doctest: +SKIP
        """
        from xckpt.writing.plain import plain

        return plain(self._obj)

    def by_base_id(self, base_id: int | bytes | str) -> DataArray:
        """Find a tensor by the id of its name, whatever its name may be.

        Parameters
        ----------
        base_id : int, bytes or str
            The number, the 16 bytes that a checkpoint stores, or the 32 hexadecimal digits of the
            number, as the attribute ``base_id`` has them.

        Returns
        -------
        xarray.DataArray
            The variable with that attribute.

        Raises
        ------
        KeyError
            If there is none.
        ValueError
            If it is no id: too large a number, or not as many bytes or digits.

        Examples
        --------
        >>> ds = xr.open_dataset("model.bin", engine="gptrs")  # doctest: +SKIP
        >>> ds.ckpt.by_base_id("a962c72e0d59ef7a13ff91bdee235d58").name  # doctest: +SKIP
        'lm_head'
        """
        from xckpt.datasets.tensors import OpenTensors

        wanted = base_id_text(base_id)
        for node in self._nodes():
            for name, variable in node.variables.items():
                if variable.attrs.get("base_id") == wanted:
                    return cast("DataArray", node[name])
        tensors = OpenTensors(self._obj)
        for name in tensors.stacked:
            member = tensors.variable(name)
            if member.attrs.get("base_id") == wanted:
                return cast("DataArray", xr.DataArray(member, name=name))
        raise KeyError(f"no tensor here has the base id {wanted}")

    def param_key(self, name: str) -> int:
        """Return the stable id of a tensor of this opened checkpoint.

        It is what to keep values under that are derived from the tensor: statistics, decoded or
        packed forms. No other checkpoint opened in this process has it, not even the same file
        opened twice; a copy of the Dataset, also a pickled one, has it too.

        Parameters
        ----------
        name : str
            Name of the tensor as the file has it, of a DataTree too.

        Returns
        -------
        int
            Of 128 bits: `xckpt.identity.param_key` of the checkpoint's namespace, which is
            ``encoding["namespace"]``, and of the base id of the name.

        Raises
        ------
        KeyError
            If there is no such tensor; the message has similar names.
        ValueError
            If the object was not opened from a checkpoint.

        Examples
        --------
        >>> kept = {}
        >>> ds = xr.open_dataset("m.zt", engine="ztensor")  # doctest: +SKIP
        >>> kept[ds.ckpt.param_key("lm_head")] = ds["lm_head"].std()  # doctest: +SKIP
        """
        namespace = self._encoding.get("namespace")
        if namespace is None:
            raise ValueError(_not_ours(self._given))
        # Collected once, as callers ask for many; anew where a name is missing.
        if name not in self._names:
            from xckpt.datasets.tensors import OpenTensors, no_tensor

            self._names = OpenTensors(self._obj).names
            if name not in self._names:
                raise KeyError(no_tensor(name, sorted(self._names)))
        return stable_id(namespace, name)

    def _arrays(self) -> list[Any]:
        from xckpt.datasets.tensors import OpenTensors

        variables = OpenTensors(self._obj).variables.values()
        return [variable._data for variable in variables]  # noqa: SLF001  `data` would load it

    def _result(self) -> str | None:
        """Write what the object is, if it is statistics and not tensors."""
        if isinstance(self._obj, xr.DataTree) or not {"statistic", "bin"} & set(self._obj.dims):
            return None
        from xckpt.statistics import result_text

        return result_text(self._obj)

    @property
    def _has_summary(self) -> bool:
        """Whether it has tensors of checkpoints; several Datasets in one have no encoding."""
        if isinstance(self._given, xr.DataArray):
            return self.format is not None or "layout" in self._given.encoding
        variables = (v for node in self._nodes() for v in node.variables.values())
        return self.format is not None or any("layout" in v.encoding for v in variables)

    @property
    def _title(self) -> str:
        """Name of the file, or of the first of several."""
        from xckpt.formatting import base_name, counted

        if "source" in self._encoding:
            return str(self._encoding["source"])
        variables = (v for node in self._nodes() for v in node.variables.values())
        sources = dict.fromkeys(str(v.encoding.get("source") or "") for v in variables)
        first, *others = [base_name(source) for source in sources if source] or [""]
        return f"{first} and {counted(len(others), 'other')}" if others else first

    def _nodes(self) -> Iterator[Any]:
        return iter(self._obj.subtree if isinstance(self._obj, xr.DataTree) else [self._obj])

    @property
    def _is_ours(self) -> bool:
        """Whether the object was opened from a checkpoint, or made of such an object."""
        if self.format is not None or self._is_result:
            return True
        import dask.array as da

        from xckpt.arrays.graph import TensorLayer

        # Some operations drop what says so; then the graphs of arrays still begin with the file.
        variables = (v for node in self._nodes() for v in node.variables.values())
        some = [v._data for v in islice(variables, _MOST_TRIED)]  # noqa: SLF001  `data` would read
        graphs = [getattr(data.dask, "layers", {}) for data in some if isinstance(data, da.Array)]
        return any(isinstance(layer, TensorLayer) for graph in graphs for layer in graph.values())

    @property
    def _is_result(self) -> bool:
        """Whether these are statistics, or a comparison."""
        return bool(self._encoding.get("statistics"))

    @property
    def _statistics(self) -> list[str]:
        """The statistics that the object has, if it is a result."""
        dims = () if isinstance(self._obj, xr.DataTree) else self._obj.dims
        return self._obj["statistic"].to_numpy().tolist() if "statistic" in dims else []

    @property
    def _called(self) -> str:
        """What code that is shown calls the object."""
        return "dt" if isinstance(self._obj, xr.DataTree) else "ds"

    @property
    def _encoding(self) -> dict[Any, Any]:
        root = self._obj.root if isinstance(self._obj, xr.DataTree) else self._obj
        return root.encoding

    def _summary(self, tensors: OpenTensors | None = None, notes: Sequence[str] = ()) -> Summary:
        from xckpt.datasets.tensors import OpenTensors
        from xckpt.index import paused_collector
        from xckpt.notebook.summary import new_summary, shared_notes, unread_errors

        tensors = OpenTensors(self._obj) if tensors is None else tensors
        findings = self._known_findings()
        with paused_collector():
            return new_summary(
                tensors.rows,
                title=self._title,
                format=self.format or "",
                version=str(self._encoding.get("format_version", "")),
                attrs=self._obj.attrs,
                errors=unread_errors(tensors.rows),
                findings=findings,
                dims={dim: n for dim, n in tensors.dims.items() if not _SIZE_NAME.fullmatch(dim)},
                stacked=tensors.stacks,
                obj=self._called,
                notes=[*shared_notes(tensors.shared), *notes],
            )

    def _known_findings(self) -> tuple[TensorFinding, ...] | None:
        """Return what the last statistics found, None where there were none."""
        if self._findings is None and self._stats is not None:
            self._findings = _as_findings(self.findings(self._stats))
        return self._findings


def _as_findings(found: pd.DataFrame) -> tuple[TensorFinding, ...]:
    from xckpt.notebook.summary import TensorFinding

    return tuple([TensorFinding(*row) for row in found.itertuples(index=False)])


def _summary_of(obj: Any, storage_options: dict[str, Any] | None) -> Summary:
    """Sum up what is open, or a file."""
    from xckpt.datasets.mappings import as_dataset

    obj = as_dataset(obj)
    if isinstance(obj, xr.Dataset | xr.DataTree | xr.DataArray):
        return CheckpointAccessor(obj)._summary()  # noqa: SLF001  our own
    from xckpt.index import Index
    from xckpt.notebook.summary import index_summary
    from xckpt.opening import read_index

    if not isinstance(obj, Index):
        obj = read_index(obj, storage_options=storage_options)
    return index_summary(obj)


def _not_ours(obj: xr.Dataset | xr.DataTree | xr.DataArray) -> str:
    engines = ", ".join(repr(name) for name in formats.names())
    return (
        f"<Checkpoint: none>  this {type(obj).__name__} was not opened from a checkpoint by "
        f"xr.open_dataset(..., engine=...) with one of the engines {engines}, or an operation "
        "made a new one of it"
    )
