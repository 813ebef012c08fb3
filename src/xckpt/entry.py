"""The first calls: `xckpt.open`, `footprint`, `report`, `join_optimizer`; other names for calls."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from xckpt.datasets.options import OpenOptions
from xckpt.options import OpenKeywords, ScanOptions, SelectOptions, takes

if TYPE_CHECKING:
    import xarray as xr

    from xckpt.formats import FormatReadOptions
    from xckpt.labels import TensorFilter
    from xckpt.labels.renaming import Renaming
    from xckpt.opening import OpenPath
    from xckpt.scan.entries import Describable
    from xckpt.typing import Dataset

    class _Keywords(OpenKeywords, FormatReadOptions, total=False):
        """Keywords of `open` for all formats, for single formats, and for xarray."""

        chunks: Any

    Joinable = xr.Dataset | Mapping[Any, Any] | str | os.PathLike[str]


__all__ = ["footprint", "hint_for", "join_optimizer", "open", "report"]

# Options of mappings of arrays.
_IN_MEMORY = ("tensors", "exclude", "only", "stack", "join")

# Names that people try, by the call that does the work.
_INSTEAD = {
    "xckpt.open(path)": "load read load_file read_file open_file open_dataset load_dataset "
    "open_zarr open_checkpoint load_checkpoint open_model load_model from_file safe_open Dataset",
    "xckpt.open([path])": "open_mfdataset open_many open_shards load_sharded",
    "xckpt.open(path).ckpt": "info summary describe show print inspect display head ls tree",
    "xckpt.open(path).ckpt.explore()": "explore browse view",
    "xckpt.open(path).ckpt.merge": "merge merge_adapter merge_lora fuse combine",
    "xckpt.resize_adapter": "resize resize_lora",
    "xckpt.open(path).ckpt.find('*')": "find select sel filter search",
    "xckpt.open(path).ckpt.plot": "plot hist draw",
    "xarray.open_datatree(path)": "open_datatree open_tree load_tree DataTree",
    "xckpt.read_index(path)": "open_index header read_header metadata keys names tensors "
    "list list_tensors",
    "xckpt.footprint(path)": "memory size vram fits count_parameters num_parameters",
    "xckpt.stats(path)": "stat moments",
    "xckpt.compare(path, path)": "diff difference delta equal equals allclose",
    "xckpt.findings(path)": "health_check check_health lint problems",
    "xckpt.verify(path)": "check validate test",
    "xckpt.manifest(path)": "hash digest checksum sha256 fingerprint",
    "xckpt.spectrum(path)": "svd rank singular_values",
    "xckpt.save(ds, 'new.npz')": "write dump save_file to_file export save_checkpoint",
    "xckpt.convert(path, 'new.npz')": "cast quantize rename shard to_safetensors",
}


@takes(OpenKeywords, declared=OpenOptions, is_open=True)
def open(  # noqa: A001  as gzip.open and others
    path: OpenPath | Mapping[str, Any],
    engine: str | None = None,
    *,
    tensors: TensorFilter | None = None,
    **options: Unpack[_Keywords],
) -> Dataset:
    """Open a checkpoint as a lazy Dataset with one variable for each tensor.

    Equivalent to ``xarray.open_dataset`` with the engine for the content of the file.

    Parameters
    ----------
    path : str, os.PathLike, bytes, binary file object, list of these, or mapping
        A path, a folder, a URL, or the bytes themselves; several of them, a glob or an index of
        shards (``*.index.json``) are one checkpoint. A mapping of names to arrays, such as a state
        dict, becomes a Dataset in memory.
    engine : str, optional
        Name of the format; detected from the content by default.
    **options
        Options of ``xarray.open_dataset``, such as ``chunks``, and of a single format.

    Returns
    -------
    xarray.Dataset
        Only headers are read until values are computed. Its attribute ``ckpt`` is a
        `xckpt.accessor.CheckpointAccessor`.

    Raises
    ------
    OSError
        If the file cannot be opened.
    xckpt.FormatError
        If the file is malformed, or of an unknown format.

    Examples
    --------
    >>> ds = xckpt.open("m.zt")
    >>> ds["lm_head.weight"].std().compute()
    >>> xckpt.open("https://example.org/m.zt", stack=True)
    """
    import xarray as xr

    from xckpt import formats
    from xckpt.backend import DetectingBackend
    from xckpt.datasets.mappings import as_dataset
    from xckpt.index import Index
    from xckpt.opening.detection import format_of

    others: dict[str, Any] = {"tensors": tensors, **options}
    keywords = {name: others.pop(name) for name in OpenOptions.keywords()}
    keywords["dask"] &= others.get("chunks", ...) is not None
    source: Any = path  # xarray's annotation lacks lists
    if isinstance(path, Index):
        source, engine = path.source, engine or path.format
    elif isinstance(path, Mapping):
        in_memory = OpenOptions(**{name: keywords.pop(name) for name in _IN_MEMORY})
        if engine is not None or others or OpenOptions(**keywords) != OpenOptions():
            raise TypeError(
                f"a mapping is opened with {', '.join(_IN_MEMORY)}; others are of files"
            )
        return _of_mapping(as_dataset(path), in_memory)
    if isinstance(engine, str):
        formats.get(engine)  # its error suggests a name; xarray's would list all engines
    if engine is None and others.keys() - signature(xr.open_dataset).parameters.keys():
        engine = format_of(
            path, keywords["storage_options"]
        )  # which has the option, or raises an error
    if engine is None and not others and keywords["dask"]:
        # xarray would wrap and copy each variable, which only its own options need.
        return cast("Dataset", DetectingBackend().open_dataset(source, **keywords))
    ds = xr.open_dataset(source, engine=engine or DetectingBackend, **keywords, **others)
    return cast("Dataset", ds)


def _of_mapping(ds: Dataset, options: OpenOptions) -> Dataset:
    """Return the selected variables of a mapping, stacked if requested."""
    from xckpt.datasets.mappings import note_no_numbers
    from xckpt.datasets.stacking import stack_modules
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.labels import combined

    chosen = combined(
        options.tensors, options.exclude, options.only, lambda: [OpenTensors(ds).structure]
    )
    ds = ds if chosen is None else ds[OpenTensors(ds).select(chosen)]
    ds = ds if options.stack is False else stack_modules(ds, options.stack, options.join)
    note_no_numbers(ds)
    return ds


def _opened(obj: Any, storage_options: dict[str, Any] | None) -> Any:
    """Return an open object; open anything else."""
    import xarray as xr

    is_open = isinstance(obj, xr.Dataset | xr.DataArray | xr.DataTree)
    return obj if is_open else open(obj, storage_options=storage_options)


@takes(ScanOptions)
def report(
    obj: Describable,
    path: str | os.PathLike[str],
    other: Describable | None = None,
    *,
    tensors: TensorFilter | None = None,
    names: Renaming | Literal["auto"] | None = None,
    explain: bool = True,
    overwrite: bool = False,
    **options: Unpack[ScanOptions],
) -> None:
    """Write a report on a checkpoint, or on its differences from another one.

    A report on one checkpoint has the summary, the findings, and trends of statistics along
    the layers. A report on two has the differences, their reasons and sizes, and the tensors
    that changed most.

    Parameters
    ----------
    obj : path, mapping, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        Checkpoint to describe.
    path : str or os.PathLike
        New file: HTML if it ends in ``.html``, Markdown if it ends in ``.md``. It needs no
        other files, and is small for any number of tensors.
    other : path, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree, optional
        Checkpoint to compare with.
    names : "auto", mapping, callable, or pairs of regular expressions and replacements
        From the name of a tensor to the name in `other`; see `compare`.

    Raises
    ------
    FileExistsError
        If the file exists and `overwrite` is false.
    ValueError
        If `path` has another suffix, or `obj` or `other` is a result, such as one of `compare`.

    Notes
    -----
    Pictures need matplotlib (``pip install 'xckpt[plot]'``); tables have the same numbers.

    Examples
    --------
    >>> xckpt.report("m.zt", "m.html")
    >>> ds.ckpt.report("tuned.md", "tuned.safetensors")
    """
    from xckpt.errors import UnreadableWarning

    storage_options = options.pop("storage_options")
    with warnings.catch_warnings():
        # Statistics and comparisons warn of tensors that cannot be read.
        warnings.simplefilter("ignore", UnreadableWarning)
        opened = _opened(obj, storage_options)
    opened.ckpt._report(  # noqa: SLF001
        path,
        other,
        overwrite=overwrite,
        storage_options=storage_options,
        examining={"tensors": tensors, **options},
        comparing={"names": names, "explain": explain},
    )


@takes(SelectOptions, by="the sizes of groups: ds.ckpt.summary({value!r})")
def footprint(
    obj: Describable,
    tensors: TensorFilter | None = None,
    *,
    context: int | str | None = None,
    batch: int = 1,
    cache_dtype: str | None = None,
    fits: int | str | None = None,
    storage_options: dict[str, Any] | None = None,
    **options: Unpack[SelectOptions],
) -> Dataset:
    """Return the size of a model: as stored, on disk, in other precisions, and while it runs.

    Sizes follow from names, types, shapes and the config; no tensor is read. If there are tensors
    of experts, or a `context`, the ``config.json`` next to the file is read, unless the attributes
    have it.

    Parameters
    ----------
    obj : path, mapping, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        Checkpoint to describe.
    context : int or str, optional
        Number of tokens of each sequence, also as ``"8k"`` for 8192; adds the state
        that the model keeps of them: keys and values, windows of them, latent vectors, recurrent
        states.
    batch : int, default 1
        Number of sequences.
    cache_dtype : str, optional
        Element type of keys and values, or ``"int8"`` and ``"int4"`` with scales. By default the
        one that the config states, float16 for GGUF, or else bfloat16. Recurrent states are
        float32.
    fits : int or str, optional
        Size of the memory, such as ``"24GiB"``; adds whether weights and cache fit into it.

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
        ``cache_nbytes``        with a `context`: bytes for the whole batch along ``cache``, the
                                kinds of layers; also ``cache_layers``, ``cache_elements``; absent
                                if unknown, and ``attrs["unknown"]`` is the reason
        ``weights_nbytes``      with a `context` or `fits`: stored bytes without averages and the
                                state of an optimizer
        ``total_nbytes``        these and the cache; ``precision_total`` in other precisions
        ``fits``                with `fits`: ``"yes"``, ``"no"``, or ``"unknown"`` if the size of
                                the cache is; ``precision_fits`` in other precisions
        ======================  ============================================================

    Raises
    ------
    ValueError
        If a number is not positive, or a type or size is unknown.

    Warns
    -----
    CheckpointWarning
        If ``config.json`` is not a JSON object.

    Notes
    -----
    Activations and the overhead of the framework come on top. Sizes of the cache are those of
    transformers for a ``config.json``, and of llama.cpp for GGUF; sliding windows are full.

    Examples
    --------
    >>> xckpt.footprint("m.zt")["precision_nbytes"].sel(precision="bfloat16")
    >>> xckpt.footprint("m.zt", context=8192, batch=4, fits="24GiB")["precision_fits"]
    """
    from xckpt.accessor.describing import selected
    from xckpt.formatting import checked_count, parse_count, parse_size
    from xckpt.notebook.footprint import Memory, footprint_dataset, footprint_of
    from xckpt.opening.reading import attrs_with_config
    from xckpt.structure.caches import cache_of

    tokens = 0 if context is None else parse_count("context", context)
    batch = checked_count("batch", batch)
    limit = None if fits is None else parse_size("fits", fits)
    opened = _opened(obj, storage_options)
    contents = selected(opened, tensors, **options)
    rows, structure = contents.rows, contents.structure
    names = None if tokens else [row.name for row in rows]
    attrs = attrs_with_config(names, contents.source, contents.attrs, storage_options)
    stated = fits if isinstance(fits, str) and not fits[-1].isdigit() else ""
    memory = Memory(cache_of(structure, attrs), tokens, batch, cache_dtype, limit, stated)
    dataset = footprint_dataset(
        footprint_of(rows, structure, attrs),
        memory,
        file_nbytes=contents.encoding.get("file_nbytes"),
        source=contents.source,
    )
    return cast("Dataset", dataset)


def hint_for(name: str) -> str:
    """Return the error message for an unknown name, with a suggestion."""
    from xckpt.labels.filters import suggest_word

    text = f"module 'xckpt' has no attribute {name!r}"
    public_names = [f"xckpt.{public}" for public in import_module("xckpt").__all__]
    suggestion = suggest_word(name, _INSTEAD) or suggest_word(f"xckpt.{name}", {}, public_names)
    return (
        f"{text}; did you mean {suggestion}?"
        if suggestion
        else f"{text}; dir(xckpt) lists what it has"
    )


def join_optimizer(
    model: Joinable, optimizer: Joinable | None = None, *, parameters: Sequence[str] | None = None
) -> Dataset:
    """Attach the state of an optimizer to the parameters of a model.

    State is matched to parameters by name, identity or number:

    - By name: ``fc.weight.exp_avg`` and ``exp_avg.fc.weight`` belong to ``fc.weight``. Components
      that FSDP, DeepSpeed, `torch.compile` and training checkpoints add (``optimizer.state.``,
      ``module.``, ``_fsdp_wrapped_module.``) are ignored on both sides.
    - By identity: the attribute `param_id` of a variable in `model` is the first component of names
      in `optimizer` (``"9283.momentum.moment_1"``).
    - By number: a ``state_dict()`` of `torch.optim` numbers parameters (``state.0.exp_avg``) in the
      order of its ``param_groups``. The parameters of the model are in the order of its tensors;
      all shapes have to agree, and no other assignment may be possible.

    Parameters
    ----------
    model : xarray.Dataset, mapping or path
        Checkpoint of a module. Stacked layers are unstacked first.
    optimizer : xarray.Dataset, mapping or path, optional
        State of the optimizer; by default `model` is a training checkpoint that has both.
    parameters : sequence of str, optional
        Names of the parameters in the order in which they were passed to the optimizer, group by
        group, if it numbers them. For a single group, this is
        ``[name for name, _ in module.named_parameters()]``. By default, the names in the state of
        the optimizer, or else the order of the model's tensors.

    Returns
    -------
    xarray.Dataset
        The model, followed by the state as variables ``{parameter}:{field}``
        (``"conv1.weight:momentum.moment_1"``). These have the dimensions of the parameter if the
        shapes agree, and the attribute `parameter`. Parameters that share an identity share their
        state. State without a parameter keeps its name in `optimizer`. Attributes of the Dataset
        and coordinates come from the model. No data are read.

    Raises
    ------
    ValueError
        If no state belongs to a parameter of the model, numbered state has another shape than its
        parameter or may belong to several parameters, or there is no state.

    Warns
    -----
    CheckpointWarning
        If the model lacks parameters that have state.

    Examples
    --------
    >>> ds = xckpt.join_optimizer("model-3.bpk", "optim-3.bpk")
    >>> ds["conv1.weight:momentum.moment_1"].dims == ds["conv1.weight"].dims
    True
    """
    from xckpt.datasets.optimizers import attach, training_parts

    first = _dataset(model)
    model, optimizer = training_parts(first) if optimizer is None else (first, _dataset(optimizer))
    return cast("Dataset", attach(model, optimizer, parameters))


def _dataset(obj: Any) -> xr.Dataset:
    """Return a Dataset for a mapping or path; a Dataset is returned unchanged."""
    import xarray as xr

    from xckpt.datasets.mappings import as_dataset
    from xckpt.opening.detection import format_of

    if isinstance(obj, str | os.PathLike):
        return xr.open_dataset(obj, engine=format_of(obj))
    dataset = as_dataset(obj)
    if not isinstance(dataset, xr.Dataset):
        kind = type(obj).__name__
        raise TypeError(f"expected a Dataset, a mapping of names to arrays or a path, not {kind}")
    return dataset
