"""The methods of ``ds.ckpt`` that merge, stack or select; `obj` is the Dataset or tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast

import numpy as np
import xarray as xr

from xckpt.datasets.stacking import select_modules, stack_modules, unstack_modules
from xckpt.datasets.tensors import OpenTensors
from xckpt.datasets.tensors import find as find_variables
from xckpt.identity import base_id_text
from xckpt.options import SelectOptions, renamed, takes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from xckpt.datasets.tensors import DtypeFilter
    from xckpt.labels import TensorFilter
    from xckpt.scan.entries import Describable
    from xckpt.typing import DataArray

Obj = TypeVar("Obj", bound=xr.Dataset | xr.DataTree)


def merge(obj: Obj, other: Describable, scale: float | None = None) -> Obj:
    """Return the model with an adapter or updates added; all its other tensors stay.

    Sums are lazy, and saved in the type of the model. The update of an adapter is
    ``scale * B @ A``; DoRA then sets norms, and tensors that were trained whole replace those of
    the model, or are new.

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
        Same kind as the object, stacked as it is.

    Raises
    ------
    TypeError
        If `scale` is not a number, or `other` is a list.
    ValueError
        If the model has none of the changed tensors, or one of another shape; if the scale is
        unknown; if `other` is another model, whose tensors would be added.
    UnsupportedError
        If the update of an adapter is not computed, such as that of VeRA, or the model may have
        its rows in another order that is unknown.

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
    from xckpt.datasets.combining import merge as merged
    from xckpt.opening.reading import adapter_in, read_config
    from xckpt.scan.entries import contents_of

    if isinstance(other, list | tuple):
        raise TypeError("several are merged one after the other: base.ckpt.merge(a).ckpt.merge(b)")
    if scale is not None and (not hasattr(scale, "__float__") or np.ndim(scale)):
        raise TypeError(
            f"scale is a number, not {type(scale).__name__}; weights of each layer multiply "
            "stacked updates: base.ckpt.merge(adapter.ckpt.updates().ckpt.stack() * weights)"
        )
    scale = None if scale is None else float(scale)
    tensors = contents_of(adapter_in(other))
    config = read_config(tensors.source, tensors.attrs, "adapter_config")
    return merged(obj, tensors, find_adapters(tensors, config), scale)


def stack(
    obj: Obj,
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
        Modules whose numbers become dimensions; all by default. A module has a name
        (``"layers"``) and a path (``"model.decoder.layers"``), whose end is enough; globs match
        paths.
    join : {"exact", "outer"}, default "exact"
        How to stack tensors of a module that have different numbers. "exact": other numbers
        become another dimension (``layers_1``). "outer": one dimension has all numbers, and
        missing members are NaN; types without NaN, such as integers, are stacked as for
        "exact".

    Returns
    -------
    xarray.Dataset or xarray.DataTree
        Same kind as the object. A tensor without another one of the same shape and type, whose
        name differs in numbers only, stays as it is.

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
    return stack_modules(obj, modules, join)


def unstack(obj: Obj) -> Obj:
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
    return unstack_modules(obj)


def sel(obj: Obj, /, **modules: int | Sequence[int] | slice) -> Obj:
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
    return select_modules(obj, modules)


def isel(obj: Obj, /, **modules: int | Sequence[int] | slice) -> Obj:
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
    return select_modules(obj, modules, by_position=True)


@renamed("names", "tensors")
@takes(SelectOptions)
def find(
    obj: Obj,
    tensors: TensorFilter | None = None,
    *,
    dtype: DtypeFilter | None = None,
    min_bytes: int | str = 0,
    **options: Unpack[SelectOptions],
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
    return find_variables(obj, tensors, dtype=dtype, min_bytes=min_bytes, **options)


def by_base_id(obj: Any, base_id: int | bytes | str) -> DataArray:
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
    text = base_id_text(base_id)
    nodes: Iterable[Any] = obj.subtree if isinstance(obj, xr.DataTree) else [obj]
    for node in nodes:
        for name, variable in node.variables.items():
            if variable.attrs.get("base_id") == text:
                return cast("DataArray", node[name])
    tensors = OpenTensors(obj)
    for name in tensors.stacked:
        member = tensors.variable(name)
        if member.attrs.get("base_id") == text:
            return cast("DataArray", xr.DataArray(member, name=name))
    raise KeyError(f"no tensor here has the base id {text}")
