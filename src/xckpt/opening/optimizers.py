"""`join_optimizer`: the state of an optimizer next to the parameters that it belongs to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import xarray as xr

from xckpt.datasets.mappings import as_dataset
from xckpt.datasets.optimizers import attach, training_parts
from xckpt.opening import format_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.typing import Dataset

    Joinable = xr.Dataset | Mapping[Any, Any] | str | os.PathLike[str]

__all__ = ["join_optimizer"]


def join_optimizer(
    model: Joinable, optimizer: Joinable | None = None, *, parameters: Sequence[str] | None = None
) -> Dataset:
    """Attach the state of an optimizer to the parameters of a model.

    State belongs to a parameter by its name, its identity or its number. By name:
    ``fc.weight.exp_avg`` or ``exp_avg.fc.weight`` belongs to ``fc.weight``; what FSDP, DeepSpeed,
    `torch.compile` and checkpoints of a whole training put in front or in between
    (``optimizer.state.``, ``module.``, ``_fsdp_wrapped_module.``) does not matter, on either side.
    By identity: the attribute `param_id` of a variable in `model` is the first component of names
    in `optimizer` (``"9283.momentum.moment_1"``). By number: a ``state_dict()`` of `torch.optim`
    counts parameters (``state.0.exp_avg``) in the order of its ``param_groups``, and those of the
    model are in the order of its tensors. Every shape has to agree, and no other assignment may be
    possible.

    Parameters
    ----------
    model : xarray.Dataset, mapping or path
        Checkpoint of a module. Stacked layers are taken apart first.
    optimizer : xarray.Dataset, mapping or path, optional
        State of its optimizer; by default the one that `model` holds as the checkpoint of a whole
        training.
    parameters : sequence of str, optional
        Names of the parameters in the order in which the optimizer was given them, group after
        group, where it numbers them: ``[name for name, _ in module.named_parameters()]``, for
        one group. By default, the names that it has itself or the order of the model's tensors.

    Returns
    -------
    xarray.Dataset
        The model, and after its variables the state as ``{parameter}:{field}``
        (``"conv1.weight:momentum.moment_1"``), with the dimensions of the parameter where the
        shapes agree, and the attribute `parameter`. A parameter that the optimizer does not know
        has no state; parameters that share an identity all have it. What belongs to no parameter
        keeps the name it has in `optimizer`. Attributes of the Dataset and coordinates are the
        model's. Nothing is read.

    Raises
    ------
    ValueError
        If none of the state belongs to a parameter of the model; if numbered state has another
        shape than its parameter, or may belong to several; if there is no state.

    Warns
    -----
    CheckpointWarning
        If there is state of parameters that the model does not have.

    Examples
    --------
    >>> ds = xckpt.join_optimizer("model-3.bpk", "optim-3.bpk")  # doctest: +SKIP
    >>> ds["conv1.weight:momentum.moment_1"].dims == ds["conv1.weight"].dims  # doctest: +SKIP
    True
    >>> ds = xckpt.join_optimizer("training.pt")  # model and optimizer in one  # doctest: +SKIP
    """
    first = _dataset(model)
    model, optimizer = training_parts(first) if optimizer is None else (first, _dataset(optimizer))
    return cast("Dataset", attach(model, optimizer, parameters))


def _dataset(obj: Any) -> xr.Dataset:
    """Return a Dataset as it is, or one of a mapping or a path."""
    if isinstance(obj, str | os.PathLike):
        return xr.open_dataset(obj, engine=format_of(obj))
    dataset = as_dataset(obj)
    if not isinstance(dataset, xr.Dataset):
        kind = type(obj).__name__
        raise TypeError(f"expected a Dataset, a mapping of names to arrays or a path, not {kind}")
    return dataset
