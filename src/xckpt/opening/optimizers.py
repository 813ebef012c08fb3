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
    first = _dataset(model)
    model, optimizer = training_parts(first) if optimizer is None else (first, _dataset(optimizer))
    return cast("Dataset", attach(model, optimizer, parameters))


def _dataset(obj: Any) -> xr.Dataset:
    """Return a Dataset for a mapping or path; a Dataset is returned unchanged."""
    if isinstance(obj, str | os.PathLike):
        return xr.open_dataset(obj, engine=format_of(obj))
    dataset = as_dataset(obj)
    if not isinstance(dataset, xr.Dataset):
        kind = type(obj).__name__
        raise TypeError(f"expected a Dataset, a mapping of names to arrays or a path, not {kind}")
    return dataset
