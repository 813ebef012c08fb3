"""The accessor ``ds.ckpt`` of Datasets, DataTrees and DataArrays.

Each method calls one function of the package with the open object; this room adds signatures and
documentation, the widget of `explore`, and reports. It may import every room except `cli`. Read
`xckpt.options` first: `Forwarded` makes the methods of functions of the package.
"""

from __future__ import annotations

import re
from itertools import islice
from operator import is_
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

import xarray as xr

import xckpt
from xckpt import formats
from xckpt.identity import base_id_text, stable_id
from xckpt.options import Forwarded, SelectOptions, renamed, takes
from xckpt.upstream.xarray_variables import data_of

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterator, Sequence

    import pandas as pd

    from xckpt.datasets.adapters import Adapter
    from xckpt.datasets.losses import Loss
    from xckpt.datasets.tensors import DtypeFilter, OpenTensors
    from xckpt.labels import TensorFilter
    from xckpt.notebook.documents import Block
    from xckpt.notebook.summary import ModuleTree, Summary, TensorFinding
    from xckpt.plots import Plots
    from xckpt.scan.entries import Describable
    from xckpt.typing import DataArray, Dataset

__all__ = ["CheckpointAccessor"]

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
    "plot.histogram": "hist distribution",
    "save": "write dump export to_file to_safetensors convert",
    "plain().to_netcdf": "to_netcdf to_zarr",
    "report": "html to_html markdown",
    "manifest()": "hash digest checksum sha256 fingerprint",
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
            if suggestion:
                hint = f"did you mean .ckpt.{suggestion}?"
            raise AttributeError(f".ckpt has no attribute {name!r}; {hint}")

    def _blocks(self, *, calls: bool = False) -> list[Block]:
        result = self._result()
        if result is not None:
            return result
        if not self._has_summary:
            from xckpt.notebook.documents import Heading

            return [Heading("", "Checkpoint: none", [_not_ours(self._given)])]
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

    def summary(
        self,
        by: Literal["pattern", "dtype", "layer", "role", "component", "step"] | None = None,
        *,
        changes: bool = False,
    ) -> pd.DataFrame:
        """Summarise the tensors in a table, largest first, or a training run by step.

        No tensor is read, unless `changes` asks for it.

        Parameters
        ----------
        by : {"pattern", "dtype", "layer", "role", "component", "step"}, optional
            One row for each pattern of names, stored element type, numbered module, role (weights,
            moments of an optimizer, ...) or component (encoder, unet, ...); ``"step"`` for a run.
            By default ``"step"`` for a Dataset of `open_steps`, ``"pattern"`` otherwise.
        changes : bool
            Compare each step of a run with the step before, and add findings. This reads every
            step, unless results are cached.

        Returns
        -------
        pandas.DataFrame
            Columns ``tensors``, ``parameters`` (trainable elements), ``nbytes`` and ``share``;
            for patterns also ``shape``, ``dtype`` and ``storage``. Tied tensors count once.

            For a run, a column for each step. Rows are named by kind and name: ``metric`` (varying
            attributes of the files, and the logs in ``trainer_state.json`` next to them),
            ``relative change of weights`` (of all, and of each layer), ``relative change of
            others`` (moments, running statistics, ...) and ``change of counters``.
            ``attrs["notes"]`` has the findings.

        Raises
        ------
        ValueError
            If `by` has another value, or steps are requested of another object.

        Examples
        --------
        >>> ds.ckpt.summary("dtype")["nbytes"]
        >>> run = xckpt.open_steps("run/")
        >>> table = run.ckpt.summary()  # a column for each step
        """
        from xckpt.datasets.tensors import OpenTensors
        from xckpt.notebook.summary import sizes_table

        tensors = OpenTensors(self._obj)
        rows = tensors.rows
        run = self._run
        if by is None:
            by = "pattern" if run is None else "step"
        if by != "step":
            if changes:
                raise ValueError("changes=True is for the steps of a run: leave `by` out")
            return sizes_table(rows, by, tensors.structure)
        if run is None:
            raise ValueError("the object has no steps: open several with xckpt.open_steps")
        from xckpt.health import run_summary

        if changes and self._known_findings() is None:
            self._examine()
        count = len(rows) // len(self._obj[run])
        findings = self._known_findings()
        return run_summary(cast("xr.Dataset", self._obj), run, count, findings, changes=changes)

    @property
    def _run(self) -> str | None:
        """Dimension of the steps of a training run, None for other objects."""
        from xckpt.datasets.tensors import run_dim

        if isinstance(self._obj, xr.DataTree):
            return None
        run = run_dim({name: self._obj.variables[name] for name in self._obj.coords})
        return run if run in self._obj.dims else None

    def footprint(self) -> Dataset:
        """Return the size of the model: as stored, on disk, and in other precisions.

        Sizes follow from names, types and shapes; no tensor is read. If there are tensors of
        experts, the ``config.json`` next to the file is read, unless the attributes have it.

        Returns
        -------
        xarray.Dataset
            ``attrs["footprint"]`` is the sentence of the summary. Tied tensors count once.

            ======================  ============================================================
            ``parameters``          trainable elements
            ``active_parameters``   those that one token uses; absent unless the config states the
                                    numbers of experts, ``experts`` and ``experts_per_token``
            ``nbytes``              stored bytes of all tensors
            ``file_nbytes``         size of all files; absent for objects in memory
            ``precision_nbytes``    bytes of the parameters along ``precision``: ``float32``,
                                    ``bfloat16``, ``int8``, ``int4``
            ``precision_bits``      bits of a parameter: 32, 16, 8.5, 4.5. Integers have one float16
                                    scale for each 32 of them, as Q8_0 and Q4_0 of GGUF have
            ``scheme_parameters``   parameters along ``scheme``, which is a stored element type or a
                                    method of quantisation (``"gptq 4-bit, group 64"``); also
                                    ``scheme_tensors`` and ``scheme_nbytes``, scales included
            ``scheme_bits``         stored bits of a parameter
            ``group_elements``      elements along ``group``: parameters, averages, buffers,
                                    optimizer state, ...; also ``group_tensors``, ``group_nbytes``
            ``component_nbytes``    bytes along ``component``: unet, vae, encoder, vision, ...; also
                                    ``component_tensors``, ``component_parameters``; absent for a
                                    model of a single component
            ======================  ============================================================

        Warns
        -----
        CheckpointWarning
            If ``config.json`` is not a JSON object.

        Examples
        --------
        >>> ds.ckpt.footprint()["precision_nbytes"].sel(precision="bfloat16")
        """
        from xckpt.datasets.tensors import OpenTensors
        from xckpt.notebook.footprint import footprint_dataset, footprint_of
        from xckpt.opening.configs import attrs_with_config

        tensors = OpenTensors(self._obj)
        rows = tensors.rows
        source = str(self._encoding.get("source", ""))
        config = attrs_with_config((row.name for row in rows), source, self._obj.attrs)
        file_nbytes = self._encoding.get("file_nbytes")
        footprint = footprint_of(rows, tensors.structure, config)
        return cast("Dataset", footprint_dataset(footprint, file_nbytes=file_nbytes, source=source))

    def structure(self, name: str | None = None) -> pd.DataFrame:
        """Return what each tensor is in its model, or the reasons for one tensor.

        It is the first thing to look at when a summary, a group or a finding is wrong. Nothing is
        read.

        Parameters
        ----------
        name : str, optional
            Name of a tensor whose reasons to list.

        Returns
        -------
        pandas.DataFrame
            A row for each tensor, with the columns ``role``, ``component``, ``layer``, ``module``,
            ``module_type``, ``slot``, ``param``, ``axes``, ``owner`` (the codes that a scale
            belongs to) and ``evidence`` (the reason for the role). With `name`, a row for each
            reason, strongest source first: ``field``, ``value``, ``source`` (``"user"``,
            ``"file"``, ``"model"``, ``"convention"`` or ``"shape"``), ``reason``, and whether it
            ``decided``.

        Raises
        ------
        KeyError
            If no tensor has the name.

        Examples
        --------
        >>> ds.ckpt.structure().query("role == 'constant'")
        >>> ds.ckpt.structure("model.embed_tokens.weight")
        """
        from xckpt.datasets.tensors import OpenTensors, no_tensor
        from xckpt.notebook.structures import evidence_table, structure_table

        structure = OpenTensors(self._obj).structure
        if name is None:
            return structure_table(structure)
        if name not in structure:
            raise KeyError(no_tensor(name, list(structure)))
        return evidence_table(structure[name])

    def adapters(self) -> pd.DataFrame:
        """List the adapters of a file, such as LoRA: base tensors, ranks, scales.

        Only ``adapter_config.json`` next to the file is read, and scalars called ``alpha``. Factors
        of PEFT, diffusers, kohya, MLX and llama.cpp are known by their names.

        Returns
        -------
        pandas.DataFrame
            One row for each tensor of the base model that the adapter changes, by its name there:
            ``kind`` (``lora``, ``dora``, ``loha``, ``lokr``, ``adalora``, ``ia3``, ``bias``;
            ``saved`` for a whole tensor; ``rows``; ``unsupported``), ``rank``, ``alpha``, ``scale``
            (the factor of the update), ``shape``, and ``note``: why there is no scale, or the name
            of an unsupported method, such as OFT, and what to do. Empty if the file has no
            adapters.

        Raises
        ------
        ValueError
            If a module has several adapters.

        Examples
        --------
        >>> ds = xckpt.open("adapter/adapter_model.safetensors")
        >>> ds.ckpt.adapters().groupby("rank").size()
        """
        from xckpt.datasets.adapter_updates import adapter_table

        return adapter_table(self._adapters()[1])

    def updates(self, scale: float | None = None) -> Dataset:
        """Return the update of each tensor that an adapter changes, such as ``scale * B @ A``.

        The products are lazy. `xckpt.spectrum` of them needs the factors only. DoRA also sets the
        norms of the sum; its update is the product alone.

        Parameters
        ----------
        scale : float, optional
            Scale of adapters that state none; without it, they are left out with a warning.

        Returns
        -------
        xarray.Dataset
            A variable for each product, named like the tensor of the base model, with the
            attributes ``kind``, ``rank`` and ``scale``.

        Raises
        ------
        ValueError
            If a module has several adapters.

        Warns
        -----
        CheckpointWarning
            If an adapter is left out.

        Examples
        --------
        >>> ds = xckpt.open("adapter/adapter_model.safetensors")
        >>> ds.ckpt.updates().ckpt.spectrum().ckpt.table()
        """
        from xckpt.datasets.adapter_updates import update_dataset

        tensors, adapters = self._adapters()
        return cast("Dataset", update_dataset(adapters, tensors, scale))

    def merge(self, other: Describable, scale: float | None = None) -> Obj:
        """Return the model with an adapter or updates added; all its other tensors stay.

        Sums are lazy, and saved in the type of the model. The update of an adapter is
        ``scale * B @ A``; DoRA then sets norms, and trained tensors replace those of the model.

        Parameters
        ----------
        other : path, mapping, xarray.Dataset, xarray.DataArray or xarray.DataTree
            LoRA or DoRA adapter, as a folder or file, or updates by the names of the tensors that
            they are added to, such as ``lora.ckpt.updates()`` or ``b - c``.
        scale : float, optional
            Factor of the updates, 1 by default. An adapter multiplies it by the scale that it
            states; one that states none needs it.

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            Same kind as the object, with one variable for each tensor.

        Raises
        ------
        ValueError
            If the model has none of the changed tensors, or one of another shape; if the scale is
            unknown; if `other` is another model, whose tensors would be added.
        UnsupportedError
            If the update of an adapter is not computed, such as that of VeRA, or the model has its
            rows in another order.

        Warns
        -----
        CheckpointWarning
            If the model lacks some of the changed tensors.

        Examples
        --------
        >>> base, tuned = xckpt.open("base.safetensors"), xckpt.open("tuned.safetensors")
        >>> base.ckpt.merge("adapter/").ckpt.save("with-adapter.safetensors")
        >>> half = base.ckpt.merge(tuned - base, scale=0.5)
        """
        from xckpt.datasets.adapters import find_adapters
        from xckpt.datasets.combining import merge
        from xckpt.opening.configs import adapter_in, read_config
        from xckpt.scan.entries import contents_of_all

        [tensors] = contents_of_all([adapter_in(other)])
        config = read_config(tensors.source, tensors.attrs, "adapter_config")
        return merge(self._obj, tensors, find_adapters(tensors, config), scale)

    def _adapters(self) -> tuple[OpenTensors, list[Adapter]]:
        from xckpt.datasets.adapters import find_adapters
        from xckpt.datasets.tensors import OpenTensors
        from xckpt.opening.configs import read_config

        tensors = OpenTensors(self._obj)
        config = read_config(tensors.source, tensors.attrs, "adapter_config")
        return tensors, find_adapters(tensors, config)

    def tree(self, depth: int = 3) -> ModuleTree:
        """Return the tree of modules with their numbers of tensors and bytes, numbered ones folded.

        Parameters
        ----------
        depth : int, default 3
            Number of levels.

        Returns
        -------
        ModuleTree
            Its ``repr`` is the tree.

        Examples
        --------
        >>> ds.ckpt.tree(4)
        """
        from xckpt.datasets.tensors import OpenTensors
        from xckpt.notebook.summary import ModuleTree

        return ModuleTree(OpenTensors(self._obj).rows, depth)

    def modules(self) -> pd.DataFrame:
        """List the numbers of each module, and the tensors that have them. Nothing is read.

        The table shows why stacking makes both ``layers`` and ``layers_2``: their tensors have
        different numbers.

        Returns
        -------
        pandas.DataFrame
            One row for each set of numbers: ``module``, ``numbers`` (``"{0..60}"``), ``count``,
            ``dim`` (the stacked dimension, empty without one), and ``variables``, the names of the
            tensors without their numbers.

        Examples
        --------
        >>> ds = xr.open_dataset("moe.zt", engine="ztensor", stack=True)
        >>> ds.ckpt.modules()
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
        """Turn numbered modules into dimensions, as ``open_dataset(..., stack=...)`` does.

        ``layers.0.mlp.w``, ``layers.1.mlp.w``, ... of one shape and element type become the
        variable ``layers.mlp.w`` with a dimension ``layers``, whose coordinate has the numbers.
        Nothing is read.

        Parameters
        ----------
        modules : True, str, or list of str, default True
            Modules whose numbers become dimensions; all by default.
        join : {"exact", "outer"}, default "exact"
            How to stack tensors of a module that have different numbers. "exact": other numbers
            become another dimension (``layers_1``). "outer": one dimension has all numbers, and
            missing members are NaN; types without NaN, such as integers, are stacked as for
            "exact".

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            Same kind as the object. A tensor stays as it is if no other name differs from its
            name by numbers alone, or if its shape or type differs from theirs.

        Raises
        ------
        TypeError
            If `modules` has another type.
        ValueError
            If `join` has another value.

        Examples
        --------
        >>> ds = xr.open_dataset("m.zt", engine="ztensor")
        >>> ds.ckpt.stack()["model.layers.mlp.up_proj.weight"].sel(layers=5)
        """
        from xckpt.datasets.stacking import stack_modules

        return stack_modules(self._obj, modules, join)

    def unstack(self) -> Obj:
        """Split stacked tensors into one variable for each tensor, the inverse of `stack`.

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            Same kind as the object, with the tensors in the order of the file. A selection has
            the tensors that it selected; variables computed from stacked ones stay as they are.

        Raises
        ------
        ValueError
            If a stacked dimension was renamed or lost its coordinate, which names the tensors.

        Examples
        --------
        >>> ds = xr.open_dataset("m.zt", engine="ztensor", stack=True)
        >>> ds.sel(layers=[0, 1]).ckpt.unstack()
        """
        from xckpt.datasets.stacking import unstack_modules

        return unstack_modules(self._obj)

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

    def sel(self, **modules: int | Sequence[int] | slice) -> Obj:
        """Select tensors by the numbers of their modules, stacked or not.

        Unlike xarray's own ``sel`` it takes the name of a module, for all dimensions that stacking
        made of it (``layers``, ``layers_2``), and drops tensors outside of the selected modules.

        Parameters
        ----------
        **modules : int, list of int, or slice
            ``layers=17``, ``layers=[0, 23]`` or ``layers=slice(4, 8)``, whose end is included.

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            Same kind as the object. A single number of a stacked module drops its dimension.

        Raises
        ------
        KeyError
            If a module or a number of it does not exist.
        TypeError
            If an indexer has another type.

        Examples
        --------
        >>> ds = xr.open_dataset("moe.zt", engine="ztensor", stack=True)
        >>> ds.ckpt.sel(layers=17, experts=3)
        """
        from xckpt.datasets.stacking import select_modules

        return select_modules(self._obj, modules)

    def isel(self, **modules: int | Sequence[int] | slice) -> Obj:
        """Select tensors as `sel` does, by position among the numbers of a module.

        Parameters
        ----------
        **modules : int, list of int, or slice
            ``layers=-1`` is the last layer.

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            Same kind as the object.

        Raises
        ------
        KeyError
            If a module does not exist.
        IndexError
            If a module has fewer numbers.

        Examples
        --------
        >>> ds = xr.open_dataset("moe.zt", engine="ztensor", stack=True)
        >>> ds.ckpt.isel(layers=-1)
        """
        from xckpt.datasets.stacking import select_modules

        return select_modules(self._obj, modules, by_position=True)

    @renamed("names", "tensors")
    @takes(SelectOptions)
    def find(
        self,
        tensors: TensorFilter | None = None,
        *,
        exclude: TensorFilter | None = None,
        only: Literal["weights"] | None = None,
        dtype: DtypeFilter | None = None,
        min_bytes: int | str = 0,
    ) -> Obj:
        """Select variables by name, element type and size.

        Parameters
        ----------
        dtype : str or dtype, or a list of these, optional
            Stored element type: ``"bfloat16"`` or ``"bf16"``, ``numpy.float32``.
        min_bytes : int or str, default 0
            Minimum stored size, in bytes or as ``"10 MiB"``.

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            Same kind as the object, with the attributes of the file; empty if nothing matches.

        Raises
        ------
        TypeError
            If an argument has another type.
        ValueError
            If `min_bytes` is a string other than a size.

        Warns
        -----
        CheckpointWarning
            If nothing matches; the warning suggests a filter or similar names.

        Examples
        --------
        >>> ds = xr.open_dataset("m.zt", engine="ztensor")
        >>> ds.ckpt.find("*.q_proj.*", dtype="bfloat16", min_bytes="1 MiB")
        """
        from xckpt.datasets.tensors import find

        options: Any = {"exclude": exclude, "only": only, "dtype": dtype, "min_bytes": min_bytes}
        return find(self._obj, tensors, **options)

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

    stats = Forwarded(lambda: xckpt.stats, without="storage_options", after=_keep)
    histogram = Forwarded(lambda: xckpt.histogram, without="storage_options")
    spectrum = Forwarded(lambda: xckpt.spectrum)
    compare = Forwarded(lambda: xckpt.compare)
    findings = Forwarded(lambda: xckpt.findings, without="storage_options", instead=_find_signs)
    table = Forwarded(lambda: xckpt.table)
    save = Forwarded(lambda: xckpt.save)
    manifest = Forwarded(lambda: xckpt.manifest, without="engine storage_options")
    report = Forwarded(lambda: xckpt.report)

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

        if not isinstance(self._obj, xr.Dataset) or "status" not in self._statistics:
            raise TypeError("only results of ds.ckpt.compare() have names")
        return matched_names(self._obj)

    def by(self, *keys: str, stats: xr.Dataset | None = None) -> Dataset:
        """Merge a result by layer, role or numbered module.

        The result is one of `stats`, `compare`, `histogram` or `spectrum`; `findings` has a method
        of the same name. The numbers of a group are those of all its elements together, computed
        from counts, moments and sums of squares; they are not averages over tensors. Those of
        several matrices are of the matrix with all of them along its diagonal. Tied copies count
        once.

        Parameters
        ----------
        *keys : str
            One or more of ``"layer"`` (the number of the outermost repeated module; its path if
            there are several stacks of layers), ``"role"`` (weights, moments of an optimizer, ...),
            ``"kind"`` (of the module: ``"linear"``, ``"norm"``, ...), ``"component"``
            (``"encoder"``, ``"optimizer"``, ...), ``"dtype"``, ``"module"`` (the name without
            numbers and without its last word), and the name of a numbered module, such as
            ``"expert"``.
        stats : xarray.Dataset, optional
            Statistics of the first side of a comparison. `compare` does not decode tensors with
            equal bytes. Groups of such tensors and changed ones need their norms, for ``rmse``,
            ``rel_l2``, ``cosine``, ``sqnr_db`` and ``nmse``; these are NaN without.

        Returns
        -------
        xarray.Dataset
            A variable for each statistic, along the keys, and ``tensors``, the number of tensors.
            Comparisons also have the number of tensors of each status. A histogram has ``count``.
            Quantiles follow from the counts of elements that `stats` cached for unchanged files.
            ``attrs["missing"]`` lists the statistics that do not follow from those of the tensors,
            with reasons; ``attrs["outside"]`` names tensors that have no number for a key, or no
            spectrum.

        Raises
        ------
        ValueError
            If no tensor has a key, or the result is not one of whole tensors.
        TypeError
            If the object is not such a result.

        Examples
        --------
        >>> ds.ckpt.stats().ckpt.by("layer", "role")["std"]
        >>> ds.ckpt.compare("tuned.zt").ckpt.by("layer")["rel_l2"].plot()
        """
        from xckpt.statistics.grouping import by

        obj = self._obj
        if isinstance(obj, xr.DataTree) or not {"statistic", "bin"} & set(obj.dims):
            raise TypeError("by() merges a result: call stats(), compare(), ... first")
        if "status" in self._statistics:
            from xckpt.comparison.merging import compared_by

            return cast("Dataset", compared_by(obj, keys, stats))
        if stats is not None:
            raise TypeError("stats= is for comparisons")
        return cast("Dataset", by(obj, keys))

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
            raise ValueError(_not_ours(self._given))
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

        from xckpt.accessor.reporting import describe, document_kind, relate, written
        from xckpt.storage import new_file

        kind = document_kind(path)
        sink = new_file(fsdecode(path), overwrite=overwrite, storage_options=storage_options)
        with sink:  # opened first, so that a path that cannot be written fails at once
            if other is None:
                stats, _ = self._examine(**examining)
                blocks = describe(self._summary(), stats, self.plot.layers)
            else:
                comparison = self.compare(
                    other, storage_options=storage_options, **examining, **comparing
                )
                summaries = self._summary(), _summary_of(other, storage_options)
                blocks = relate(summaries, comparison, self.plot.layers)
            sink.write(written(kind, blocks), 0)
            sink.commit()

    def plain(self) -> Any:
        """Return the same data with names, attributes and types that netCDF and zarr can store.

        Names that these formats do not allow (``a/b``) are replaced (``a%2Fb``). Attributes other
        than text and numbers become JSON text. Element types that netCDF lacks become wider ones,
        and sparse chunks become dense. Nothing is read or computed.

        Returns
        -------
        xarray.Dataset or xarray.DataTree
            Same kind as the object. Attributes hold the originals: ``xckpt_name``, ``xckpt_dims``
            and ``xckpt_dtype`` of a variable, ``xckpt_attrs`` (old names of attributes by new name)
            and ``xckpt_json`` (names of attributes that are JSON text now).

        Warns
        -----
        CheckpointWarning
            If anything was replaced or left out.

        Examples
        --------
        >>> ds = xr.open_dataset("model.bin", engine="gptrs")
        >>> ds.ckpt.plain().to_netcdf("model.nc")
        """
        from xckpt.writing.plain import plain

        return plain(self._obj)

    def by_base_id(self, base_id: int | bytes | str) -> DataArray:
        """Return the tensor with a base id, the stable id of a name.

        Parameters
        ----------
        base_id : int, bytes or str
            Number, 16 bytes as in a checkpoint, or 32 hexadecimal digits as in the attribute
            ``base_id``.

        Returns
        -------
        xarray.DataArray
            Variable with this attribute.

        Raises
        ------
        KeyError
            If no tensor has this id.
        ValueError
            If the number is too large, or has another number of bytes or digits.

        Examples
        --------
        >>> ds = xr.open_dataset("model.bin", engine="gptrs")
        >>> ds.ckpt.by_base_id("a962c72e0d59ef7a13ff91bdee235d58").name
        'lm_head'
        """
        from xckpt.datasets.tensors import OpenTensors

        text = base_id_text(base_id)
        for node in self._nodes():
            for name, variable in node.variables.items():
                if variable.attrs.get("base_id") == text:
                    return cast("DataArray", node[name])
        tensors = OpenTensors(self._obj)
        for name in tensors.stacked:
            member = tensors.variable(name)
            if member.attrs.get("base_id") == text:
                return cast("DataArray", xr.DataArray(member, name=name))
        raise KeyError(f"no tensor here has the base id {text}")

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
        return [data_of(variable) for variable in variables]

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
        from xckpt.formatting import base_name, counted

        if "source" in self._encoding:
            return str(self._encoding["source"])
        variables = (v for node in self._nodes() for v in node.variables.values())
        sources = dict.fromkeys(str(v.encoding.get("source") or "") for v in variables)
        names, computed = [base_name(source) for source in sources if source], ""
        if not names:
            from xckpt.datasets.tensors import OpenTensors

            names = [base_name(source) for source in OpenTensors(self._obj).origins(_MOST_TRIED)]
            computed = "computed from " if names else ""
        first, *others = names or [""]
        others_text = f" and {counted(len(others), 'other')}" if others else ""
        return f"{computed}{first}{others_text}"

    def _nodes(self) -> Iterator[Any]:
        return iter(self._obj.subtree if isinstance(self._obj, xr.DataTree) else [self._obj])

    @property
    def _is_ours(self) -> bool:
        """Whether the object was opened from a checkpoint or derived from one."""
        if self.format is not None or self._is_result:
            return True
        import dask.array as da

        from xckpt.arrays.graph import TensorLayer

        # Some operations drop the encoding; the graphs of arrays still begin with the file.
        variables = (v for node in self._nodes() for v in node.variables.values())
        arrays = [data_of(v) for v in islice(variables, _MOST_TRIED)]
        graphs = [getattr(data.dask, "layers", {}) for data in arrays if isinstance(data, da.Array)]
        return any(isinstance(layer, TensorLayer) for graph in graphs for layer in graph.values())

    @property
    def _is_result(self) -> bool:
        """Whether the object holds statistics or a comparison."""
        return bool(self._encoding.get("statistics"))

    @property
    def _statistics(self) -> list[str]:
        """Names of the statistics in a result, empty for tensors."""
        dims = () if isinstance(self._obj, xr.DataTree) else self._obj.dims
        return self._obj["statistic"].to_numpy().tolist() if "statistic" in dims else []

    @property
    def _called(self) -> str:
        """Name of the object in suggested code."""
        return "dt" if isinstance(self._obj, xr.DataTree) else "ds"

    @property
    def _encoding(self) -> dict[Any, Any]:
        root = self._obj.root if isinstance(self._obj, xr.DataTree) else self._obj
        return root.encoding

    def _summary(self, tensors: OpenTensors | None = None, notes: Sequence[str] = ()) -> Summary:
        from xckpt.datasets.tensors import OpenTensors
        from xckpt.formatting import counted
        from xckpt.index import paused_collector
        from xckpt.notebook.summary import (
            file_notes,
            new_summary,
            shared_notes,
            unread_errors,
        )

        tensors = OpenTensors(self._obj) if tensors is None else tensors
        findings = self._known_findings()
        run = self._run
        if run is not None:
            steps = counted(self._obj.sizes[run], run)
            notes = [f"{steps}: {self._called}.ckpt.summary() has their metrics", *notes]
        with paused_collector():
            return new_summary(
                tensors.rows,
                structure=tensors.structure,
                title=self._title,
                format=self.format or "",
                version=str(self._encoding.get("format_version", "")),
                attrs=self._obj.attrs,
                errors=unread_errors(tensors.unreadable(), tensors.source),
                findings=findings,
                dims={dim: n for dim, n in tensors.dims.items() if not _SIZE_NAME.fullmatch(dim)},
                stacked=tensors.stacks,
                obj=self._called,
                notes=[
                    *file_notes(
                        self._encoding.get("warnings", ()), self._encoding.get("facts", ())
                    ),
                    *shared_notes(tensors.shared),
                    *map(str, self._losses(tensors)),
                    *notes,
                ],
            )

    def _losses(self, tensors: OpenTensors) -> list[Loss]:
        from xckpt.datasets.losses import losses

        return [] if isinstance(self._given, xr.DataArray) else losses(tensors)

    def _known_findings(self) -> tuple[TensorFinding, ...] | None:
        """Return the findings of the last statistics, None without statistics."""
        if self._findings is None and self._stats is not None:
            self._findings = _as_findings(xckpt.findings(self._stats))
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


def _not_ours(obj: xr.Dataset | xr.DataTree | xr.DataArray) -> str:
    return (
        f"this {type(obj).__name__} was not opened from a checkpoint "
        "(xckpt.open(path) opens one), or an operation made a new one of it"
    )
