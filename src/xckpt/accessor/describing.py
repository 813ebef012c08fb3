"""Descriptions of open objects: tables, sizes and structure, without reading tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from xckpt.datasets.tensors import OpenTensors, find, no_tensor
from xckpt.options import OF_FRAMES, SelectOptions, takes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import xarray as xr

    from xckpt.datasets.adapters import Adapter
    from xckpt.labels import TensorFilter
    from xckpt.notebook.summary import ModuleTree, TensorFinding
    from xckpt.typing import Dataset


def selected(
    obj: Any, tensors: TensorFilter | None = None, **options: Unpack[SelectOptions]
) -> OpenTensors:
    """Return the selected tensors of an open object."""
    opened = OpenTensors(obj)
    if tensors is None and all(value is None for value in options.values()):
        return opened
    return OpenTensors(find(opened.obj, tensors, **options))


@takes(SelectOptions, **OF_FRAMES)
def summary(
    obj: Any,
    by: Literal["pattern", "dtype", "layer", "role", "kind", "module", "component", "step"]
    | None = None,
    *,
    tensors: TensorFilter | None = None,
    changes: bool = False,
    findings: Sequence[TensorFinding] | None = None,
    **options: Unpack[SelectOptions],
) -> pd.DataFrame:
    """Summarise the tensors in a table, largest first, or a training run by step.

    No tensor is read, unless `changes` asks for it.

    Parameters
    ----------
    by : {"pattern", "dtype", "layer", "role", "kind", "module", "component", "step"}, optional
        One row for each pattern of names, stored element type, numbered module, role (weights,
        moments of an optimizer, ...), kind of module (linear, norm, ...), module without its
        numbers, or component (encoder, unet, ...); ``"step"`` for a run.
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
    from xckpt.notebook.summary import sizes_table

    opened = selected(obj, tensors, **options)
    run = opened.run
    if by is None:
        by = "pattern" if run is None else "step"
    if by != "step":
        if changes:
            raise ValueError("changes=True is for the steps of a run: leave `by` out")
        return sizes_table(opened.rows, by, opened.structure)
    if run is None:
        raise ValueError("the object has no steps: open several with xckpt.open_steps")
    from xckpt.health import run_summary

    steps = cast("xr.Dataset", opened.obj)
    count = len(opened.rows) // len(steps[run])
    return run_summary(steps, run, count, findings, changes=changes)


@takes(SelectOptions, **OF_FRAMES)
def structure(
    obj: Any,
    name: str | None = None,
    *,
    tensors: TensorFilter | None = None,
    **options: Unpack[SelectOptions],
) -> pd.DataFrame:
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
    from xckpt.notebook.views import evidence_table, structure_table

    every = OpenTensors(obj).structure
    if name is None:
        names = {row.name for row in selected(obj, tensors, **options).rows}
        return structure_table(every).loc[lambda table: table.index.isin(names)]
    if name not in every:
        raise KeyError(no_tensor(name, list(every)))
    return evidence_table(every[name])


def adapters(obj: Any) -> pd.DataFrame:
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

    return adapter_table(_adapters_in(OpenTensors(obj)))


def updates(obj: Any, scale: float | None = None) -> Dataset:
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

    opened = OpenTensors(obj)
    return cast("Dataset", update_dataset(_adapters_in(opened), opened, scale))


@takes(SelectOptions)
def tree(
    obj: Any,
    depth: int = 3,
    *,
    tensors: TensorFilter | None = None,
    **options: Unpack[SelectOptions],
) -> ModuleTree:
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
    from xckpt.notebook.summary import ModuleTree

    return ModuleTree(selected(obj, tensors, **options).rows, depth)


@takes(SelectOptions, **OF_FRAMES)
def modules(
    obj: Any, tensors: TensorFilter | None = None, **options: Unpack[SelectOptions]
) -> pd.DataFrame:
    """List the numbers of each module, and the tensors that have them. Nothing is read.

    The table shows why stacking makes both ``layers`` and ``layers_2``: their tensors have
    different numbers.

    Parameters
    ----------
    obj : xarray.Dataset, xarray.DataTree or xarray.DataArray
        Object to describe.

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
        for s in number_sets(selected(obj, tensors, **options).obj)
    ]
    return pd.DataFrame(rows, columns=["module", "numbers", "count", "dim", "variables"])


def _adapters_in(opened: OpenTensors) -> list[Adapter]:
    from xckpt.datasets.adapters import find_adapters
    from xckpt.opening.reading import read_config

    config = read_config(opened.source, opened.attrs, "adapter_config")
    return find_adapters(opened, config)
