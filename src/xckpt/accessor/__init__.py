"""The accessor ``ds.ckpt`` of Datasets, DataTrees and DataArrays.

Each method calls one function of the package with the open object, and has its signature and
documentation: `Forwarded` of `xckpt.options` makes it. `describing` and `selecting` have the
functions that no other room has. This room also keeps results for views, the widget of `explore`,
and reports. It may import every room except `cli`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from operator import is_
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

import xarray as xr

import xckpt
from xckpt import formats
from xckpt.identity import stable_id
from xckpt.imports import LazyModule
from xckpt.options import Forwarded, Selecting
from xckpt.upstream import xarray_variables  # which may be loading xarray now

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    import pandas as pd

    from xckpt import comparison
    from xckpt.accessor import describing, selecting
    from xckpt.datasets.losses import Loss
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.labels import TensorFilter
    from xckpt.notebook.documents import Block
    from xckpt.notebook.summary import Summary, TensorFinding
    from xckpt.plots import Plots
    from xckpt.scan.entries import Describable
    from xckpt.typing import DataArray, Dataset
    from xckpt.writing import plain as conversion
else:
    describing = LazyModule("xckpt.accessor.describing")
    selecting = LazyModule("xckpt.accessor.selecting")
    comparison = LazyModule("xckpt.comparison")
    conversion = LazyModule("xckpt.writing.plain")

_RESULT = "ds.ckpt.table() is a DataFrame with one row for each tensor"
_MOST_TRIED = 8
# Names that people try, by the attribute that does the work.
_INSTEAD = {
    "summary()": "info show print inspect header describe ls",
    "adapters()": "lora loras peft",
    "merge": "add apply merge_adapter merge_lora merge_and_unload combine",
    "footprint()": "size memory weigh nbytes count_parameters num_parameters",
    "tree()": "children",
    "structure()": "roles role kinds architecture",
    "modules()": "layers blocks experts",
    "find": "filter select search grep match query tensors",
    "stats()": "statistics mean std min max describe_all",
    "findings()": "health check check_health anomalies problems",
    "compare": "diff difference equals allclose",
    "spectrum()": "svd rank singular_values",
    "explore()": "browse view widget show_all",
    "table(sort='std', limit=10)": "sort sort_values top head tail nlargest to_dataframe rows",
    "plot.histogram": "hist distribution",
    "save": "write dump export to_file to_safetensors convert",
    "plain().to_netcdf": "to_netcdf to_zarr",
    "report": "html to_html markdown",
    "manifest()": "hash digest checksum sha256 fingerprint",
}
_OF_DATASETS = {
    "{name: v.values for name, v in ds.items()}": "to_numpy numpy arrays to_dict state_dict",
    "{name: torch.from_numpy(v.values) for name, v in ds.items()}": "to_torch torch",
}
#: Type of the object: selections of a tree are trees.
Obj = TypeVar("Obj", bound=xr.Dataset | xr.DataTree)

_SIZE_NAME = re.compile(r"d\d+(_\d+)?")


@xr.register_dataset_accessor("ckpt")
@xr.register_datatree_accessor("ckpt")
@xr.register_dataarray_accessor("ckpt")
class CheckpointAccessor(Generic[Obj]):
    """Methods of xckpt for a Dataset, DataTree or DataArray that one of its engines opened.

    The ``repr`` is a folded summary of the tensors: one line for repeated modules, with counts,
    shapes, element types and sizes, and the findings of the last `stats`. It reads no data. For
    statistics, a comparison or a histogram it shows the first rows of their table. A DataArray is
    treated as a Dataset with one variable.

    Parameters
    ----------
    obj : xarray.Dataset, xarray.DataTree or xarray.DataArray
        Object to which the accessor belongs.

    Examples
    --------
    >>> ds = xr.open_dataset("m.zt", engine="ztensor")
    >>> ds.ckpt
    <Checkpoint m.zt>  names as in llama, 297.0 K parameters, bfloat16, ... (6 layers, 48 wide)
      ztensor 1.0 · 65 tensors · 421.9 KiB · lazy
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
        self._described: list[Any] = []  # the arrays with these statistics

    if not TYPE_CHECKING:  # or a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            from xckpt.labels.filters import suggest_word

            public = [name for name in vars(CheckpointAccessor) if not name.startswith("_")]
            suggestion = suggest_word(name, _INSTEAD, public)
            hint = f"it has {', '.join(public)}"
            if call := suggest_word(name, _OF_DATASETS):
                hint = f"{call} has the arrays"
            if suggestion:
                hint = f"did you mean .ckpt.{suggestion}?"
            raise AttributeError(f".ckpt has no attribute {name!r}; {hint}")

    def _blocks(self, *, calls: bool = False) -> list[Block]:
        result = self._result()
        if result is not None:
            return result
        if not self._has_summary:
            from xckpt.notebook.documents import Heading

            return [Heading("", "Checkpoint: none", [_without_tensors(self._given)])]
        return self._summary_blocks(self._summary(), calls=calls)

    # Not a `Shown`: importing this module loads no other room.
    def __repr__(self) -> str:
        from xckpt.notebook.text import to_text

        return to_text(self._blocks())

    def _repr_html_(self) -> str:
        from xckpt.notebook.html import to_html

        return to_html(self._blocks(calls=True))

    # `xckpt.notebook.extension` shows this instead of xarray's view of very many variables; None
    # means that the object is not from xckpt.
    def _repr_large_(self, note: str) -> dict[str, str] | None:
        from xckpt.notebook.documents import Sentence
        from xckpt.notebook.html import to_html
        from xckpt.notebook.text import to_text

        if not self._is_ours:
            return None
        if self._is_result:
            text = f"{self._obj!r}\n{_RESULT}\n{note}"
            html = to_html([Sentence("code", line) for line in text.split("\n")])
            return {"text/plain": text, "text/html": html}
        summary = self._summary(notes=[note])
        html = to_html(self._summary_blocks(summary, calls=True))
        return {"text/plain": to_text(self._summary_blocks(summary)), "text/html": html}

    def _summary_blocks(self, summary: Summary, *, calls: bool = False) -> list[Block]:
        from xckpt.notebook.views import summary_blocks

        if not calls:
            return summary_blocks(summary)
        obj = self._called
        names = [f"{obj}.ckpt.explore()", f"{obj}.ckpt.stats()"]
        # The list of modules already ends with the call that selects some.
        if summary.choose and not summary.modules:
            names.append(summary.choose)
        return summary_blocks(summary, names)

    @property
    def format(self) -> str | None:
        """Name of the format of the file, None for objects that no engine of xckpt opened."""
        name = self._encoding.get("format")
        return name if name in formats.names() else None

    def __getitem__(self, name: str) -> DataArray:
        """Return a tensor by its name in the file, also if it is stacked or in a tree.

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
            If no tensor has this name; the message suggests similar names.

        Examples
        --------
        >>> ds = xr.open_dataset("m.zt", engine="ztensor", stack=True)
        >>> ds.ckpt["model.layers.3.mlp.up_proj.weight"].std().compute()
        """
        from xckpt.datasets.tensors import OpenTensors

        key: object = name
        if isinstance(key, list | slice):
            text = (
                "ds.ckpt[...] takes the name of one tensor: ds.ckpt.find takes several, or a glob"
            )
            raise TypeError(text)
        # Cached, as callers get many tensors; renewed after the object was changed in place.
        if self._tensors is None or not self._tensors.holds(name):
            self._tensors = OpenTensors(self._obj)
        return cast("DataArray", self._tensors[name])

    def _ipython_key_completions_(self) -> list[str]:
        from xckpt.datasets.tensors import OpenTensors

        return [row.name for row in OpenTensors(self._obj).rows]

    def _keep(
        self,
        result: xr.Dataset,
        tensors: TensorFilter | None = None,
        *,
        compute: bool = True,
        dim: object = None,
        exclude: object = None,
        only: object = None,
        **_: Any,
    ) -> None:
        """Keep statistics of all whole tensors for the summary and for plots."""
        if compute and all(option is None for option in (tensors, dim, exclude, only)):
            self._stats, self._findings = result, None
            self._described = self._arrays()

    def _find_signs(
        self, tensors: TensorFilter | None = None, *, stats: Any = None, **options: Any
    ) -> pd.DataFrame:
        """Return findings, and keep them with the statistics that they needed."""
        if isinstance(tensors, xr.Dataset):  # statistics select no tensors
            tensors, stats = None, tensors
        if stats is not None or self._is_result:
            return xckpt.findings(self._obj, tensors, stats=stats, **options)
        return self._examine(tensors, **options)[1]

    def _summarise(self, *arguments: Any, changes: bool = False, **options: Any) -> pd.DataFrame:
        """Return a summary, with the findings of a run that are known or needed."""
        if changes and self._known_findings() is None:
            self._examine()
        findings = self._known_findings()
        return describing.summary(
            self._obj, *arguments, changes=changes, findings=findings, **options
        )

    summary = Forwarded(lambda: describing.summary, without="findings", instead=_summarise)
    footprint = Forwarded(lambda: xckpt.footprint, without="storage_options")
    structure = Forwarded(lambda: describing.structure)
    tree = Forwarded(lambda: describing.tree)
    modules = Forwarded(lambda: describing.modules)
    adapters = Forwarded(lambda: describing.adapters)
    updates = Forwarded(lambda: describing.updates)

    find = Selecting(lambda: selecting.find)
    sel = Selecting(lambda: selecting.sel)
    isel = Selecting(lambda: selecting.isel)
    stack = Selecting(lambda: selecting.stack)
    unstack = Selecting(lambda: selecting.unstack)
    merge = Selecting(lambda: selecting.merge)
    by_base_id = Forwarded(lambda: selecting.by_base_id)

    stats = Forwarded(lambda: xckpt.stats, without="storage_options", after=_keep)
    histogram = Forwarded(lambda: xckpt.histogram, without="storage_options")
    spectrum = Forwarded(lambda: xckpt.spectrum)
    compare = Forwarded(lambda: xckpt.compare)
    findings = Forwarded(lambda: xckpt.findings, without="storage_options", instead=_find_signs)
    table = Forwarded(lambda: xckpt.table)
    by = Forwarded(lambda: comparison.by)
    save = Forwarded(lambda: xckpt.save)
    manifest = Forwarded(lambda: xckpt.manifest, without="engine storage_options")
    report = Forwarded(lambda: xckpt.report)
    plain = Forwarded(lambda: conversion.plain)

    def _examine(
        self, tensors: TensorFilter | None = None, **options: Any
    ) -> tuple[xr.Dataset, pd.DataFrame]:
        """Return statistics and findings, and keep both for the summary if they are of all."""
        from xckpt.health import examine

        result, findings = examine(self._obj, tensors, **options)
        self._keep(result, tensors, **options)
        if self._stats is result:
            self._findings = _as_findings(findings)
        return result, findings

    @property
    def names(self) -> dict[str, str]:
        """Names of tensors on the other side of a comparison, by name; only tensors on both sides.

        Examples
        --------
        >>> result = xckpt.compare("base.safetensors", "renamed.zt", names="auto")
        >>> Path("names.json").write_text(json.dumps(result.ckpt.names))
        >>> done = xckpt.convert("base.safetensors", "as-renamed.zt", names=result.ckpt.names)
        """
        from xckpt.statistics import matched_names

        result, axis = self._obj, "statistic"
        if (
            isinstance(result, xr.DataTree)
            or axis not in result.dims
            or "status" not in result[axis]
        ):
            raise TypeError("only results of ds.ckpt.compare() have names")
        return matched_names(result)

    def explore(self) -> Any:
        """Return a notebook widget to search, sort and inspect all tensors.

        It computes statistics in the background, for the selected tensor or for all.

        Returns
        -------
        xckpt.notebook.explorer.Explorer
            ``.selected`` is the name of the selected tensor. Without widgets
            (``pip install 'xckpt[widgets]'``) the summary is returned.

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
        >>> explorer = ds.ckpt.explore()
        >>> explorer.selected = "lm_head.weight"
        >>> explorer.selected
        'lm_head.weight'
        """
        from xckpt.accessor.exploring import explore
        from xckpt.datasets.tensors import OpenTensors

        if not self._has_summary:
            raise ValueError(_without_tensors(self._given))
        tensors = OpenTensors(self._obj)
        return explore(tensors, self._summary(tensors), self._stats, self._known_findings())

    @property
    def plot(self) -> Plots:
        """Plots: ``layers``, ``by``, ``histogram``, ``treemap``, ``heatmap``, ``compare``, ...

        Examples
        --------
        >>> ds.ckpt.plot.layers("std", "*.q_proj.weight")
        """
        from xckpt.plots import Plots

        if self._stats is None:
            return Plots(self._obj)
        # Statistics are outdated after the object was changed in place.
        is_current = len(now := self._arrays()) == len(self._described)
        is_current = is_current and all(map(is_, now, self._described))
        return Plots(self._obj, self._stats if is_current else None)

    def _report(
        self,
        path: str | os.PathLike[str],
        other: Describable | None,
        *,
        overwrite: bool,
        storage_options: dict[str, Any] | None,
        examining: dict[str, Any],
        comparing: dict[str, Any],
    ) -> None:
        """Write a report for `xckpt.report`."""
        from os import fsdecode

        from xckpt.accessor import reporting
        from xckpt.storage import new_file

        for obj in (self._obj, other):
            if isinstance(obj, xr.Dataset) and CheckpointAccessor(obj)._result():  # noqa: SLF001
                raise reporting.result_error(obj, path)
        kind = reporting.document_kind(path)
        sink = new_file(fsdecode(path), overwrite=overwrite, storage_options=storage_options)
        with sink:  # opened first, so that a path that cannot be written fails at once
            if other is None:
                stats, _ = self._examine(**examining)
                blocks = reporting.checkpoint_blocks(self._summary(), stats, self.plot.layers)
            else:
                comparison = self.compare(
                    other, storage_options=storage_options, **examining, **comparing
                )
                summaries = self._summary(), _summary_of(other, storage_options)
                blocks = reporting.comparison_blocks(summaries, comparison, self.plot.layers)
            sink.write(reporting.render(kind, blocks), 0)
            sink.commit()

    def param_key(self, name: str) -> int:
        """Return the stable id of a tensor of this opened checkpoint.

        Use it as a key for values derived from the tensor: statistics, decoded or packed forms. It
        is unique among the checkpoints opened in this process, even if a file is opened twice. A
        copy of the Dataset, also a pickled one, has the same ids.

        Parameters
        ----------
        name : str
            Name of the tensor in the file, also for a DataTree.

        Returns
        -------
        int
            128 bits: `xckpt.identity.param_key` of the checkpoint's namespace
            (``encoding["namespace"]``) and the base id of the name.

        Raises
        ------
        KeyError
            If no tensor has this name; the message suggests similar names.
        ValueError
            If the object was not opened from a checkpoint.

        Examples
        --------
        >>> cache = {}
        >>> ds = xr.open_dataset("m.zt", engine="ztensor")
        >>> cache[ds.ckpt.param_key("lm_head.weight")] = ds["lm_head.weight"].std()
        """
        namespace = self._encoding.get("namespace")
        if namespace is None:
            raise ValueError(_not_ours(self._given))
        # Cached, as callers need many; renewed if a name is missing.
        if name not in self._names:
            from xckpt.datasets.tensors import OpenTensors, no_tensor

            self._names = OpenTensors(self._obj).names
            if name not in self._names:
                raise KeyError(no_tensor(name, sorted(self._names)))
        return stable_id(namespace, name)

    def _arrays(self) -> list[Any]:
        from xckpt.datasets.tensors import OpenTensors

        variables = OpenTensors(self._obj).variables.values()
        return [xarray_variables.data_of(variable) for variable in variables]

    def _result(self) -> list[Block] | None:
        """Return the view of a result of statistics or of a footprint, None for tensors."""
        if isinstance(self._obj, xr.DataTree):
            return None
        if "precision_nbytes" in self._obj:
            from xckpt.notebook.footprint import footprint_blocks

            return footprint_blocks(self._obj)
        if not ({"statistic", "bin"} & set(self._obj.dims) or "grouped" in self._obj.encoding):
            return None
        from xckpt.statistics import result_blocks

        return result_blocks(self._obj)

    @property
    def _has_summary(self) -> bool:
        """Whether there are tensors: of a file, computed from them, or in memory."""
        return self.format is not None or any(node.data_vars for node in self._nodes())

    @property
    def _title(self) -> str:
        """Name of the file, or of the first of several files."""
        from xckpt.datasets.tensors import OpenTensors
        from xckpt.formatting import base_name, counted

        tensors = OpenTensors(self._obj)
        if tensors.source:
            return tensors.source
        variables = (v for node in self._nodes() for v in node.variables.values())
        sources = dict.fromkeys(str(v.encoding.get("source") or "") for v in variables)
        names, computed = [base_name(source) for source in sources if source], ""
        if not names:
            names = [base_name(source) for source in tensors.origins(_MOST_TRIED)]
            computed = "computed from " if names else ""
        first, *remaining = names or [""]
        others_text = f" and {counted(len(remaining), 'other')}" if remaining else ""
        return f"{computed}{first}{others_text}"

    def _nodes(self) -> Iterator[Any]:
        return iter(self._obj.subtree if isinstance(self._obj, xr.DataTree) else [self._obj])

    @property
    def _is_ours(self) -> bool:
        """Whether the object was opened from a checkpoint or derived from one."""
        if self.format is not None or self._is_result:
            return True
        from xckpt.arrays.derived import lazies_in

        # Some operations drop the encoding; the graphs of arrays still begin with the file.
        variables = (v for node in self._nodes() for v in node.variables.values())
        return any(
            lazies_in(xarray_variables.data_of(variable))
            for variable in islice(variables, _MOST_TRIED)
        )

    @property
    def _is_result(self) -> bool:
        """True if the object holds statistics or a comparison."""
        return bool(self._encoding.get("statistics"))

    @property
    def _called(self) -> str:
        """Name of the object in suggested code."""
        return "dt" if isinstance(self._obj, xr.DataTree) else "ds"

    @property
    def _encoding(self) -> dict[Any, Any]:
        root = self._obj.root if isinstance(self._obj, xr.DataTree) else self._obj
        return root.encoding

    def _summary(self, tensors: OpenTensors | None = None, notes: Sequence[str] = ()) -> Summary:
        from xckpt.datasets.row_orders import other_orders
        from xckpt.datasets.tensors import OpenTensors
        from xckpt.errors import some
        from xckpt.formatting import counted
        from xckpt.index import paused_collector
        from xckpt.notebook.summary import new_summary, notices
        from xckpt.structure.description import describe_model

        tensors = OpenTensors(self._obj) if tensors is None else tensors
        findings, run = self._known_findings(), tensors.run
        encoding = self._encoding
        errors, file_notes = notices(
            tensors, encoding.get("warnings", ()), encoding.get("facts", ())
        )
        file_notes += map(str, self._losses(tensors))
        file_notes += [f"{text}: {some(names)}" for text, names in other_orders(tensors).items()]
        if run is not None:
            steps = counted(self._obj.sizes[run], run)
            file_notes.append(f"{steps}: {self._called}.ckpt.summary() has their metrics")
        with paused_collector():
            summary = new_summary(
                tensors.rows,
                structure=tensors.structure,
                title=self._title,
                format=self.format or "",
                version=str(encoding.get("format_version", "")),
                attrs=self._obj.attrs,
                errors=errors,
                findings=findings,
                dims={dim: n for dim, n in tensors.dims.items() if not _SIZE_NAME.fullmatch(dim)},
                stacked=tensors.stacks,
                obj=self._called,
                notes=[*file_notes, *notes],
            )
            if run is None:
                return summary
            model = describe_model(tensors.origin.of_one_step.structure, self._obj.attrs)
            return replace(summary, model=model)

    def _losses(self, tensors: OpenTensors) -> list[Loss]:
        from xckpt.datasets.losses import losses

        return [] if isinstance(self._given, xr.DataArray) else losses(tensors)

    def _known_findings(self) -> tuple[TensorFinding, ...] | None:
        """Return the findings of the last statistics, None without statistics."""
        from xckpt.datasets.tensors import OpenTensors

        # Statistics do not compare the steps of a run.
        stats = self._stats if self._findings is None else None
        if stats is not None and OpenTensors(self._obj).run is None:
            self._findings = _as_findings(xckpt.findings(stats))
        return self._findings


def _as_findings(findings: pd.DataFrame) -> tuple[TensorFinding, ...]:
    from xckpt.notebook.summary import TensorFinding

    return tuple([TensorFinding(*row) for row in findings.itertuples(index=False)])


def _summary_of(obj: Any, storage_options: dict[str, Any] | None) -> Summary:
    """Return the summary of an open object or a file."""
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


def _without_tensors(obj: xr.Dataset | xr.DataTree | xr.DataArray) -> str:
    from xckpt.datasets.losses import NO_TENSORS

    return f"{NO_TENSORS}; {_not_ours(obj)}"


def _not_ours(obj: xr.Dataset | xr.DataTree | xr.DataArray) -> str:
    return (
        f"this {type(obj).__name__} was not opened from a checkpoint "
        "(xckpt.open(path) opens one), or an operation made a new one of it"
    )
