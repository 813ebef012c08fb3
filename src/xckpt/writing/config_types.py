"""The element type of tensors that a config states."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.elements import WIDE_FLOATS
from xckpt.structure.facts import DTYPE_KEYS, declarations_in, stated_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from xckpt.formats.plan import WantedTensor
    from xckpt.structure.info import Described
    from xckpt.writing.payloads import Gathered

_OTHER_TYPE = "of another type than {0} of config.json, which transformers {1} ({2} writes {0})"
# Methods that transformers loads weights for by an operation, also those that are not quantised.
_KEEPING_TYPES = frozenset({"bitsandbytes"})


def with_types(
    config: dict[str, Any], tensors: Sequence[Described | WantedTensor]
) -> dict[str, Any]:
    """Set the element type of tensors in a config."""
    dtype = main_type(tensors)
    return config | {key: dtype for key in DTYPE_KEYS if key in config and dtype}


def with_written_type(
    attrs: Mapping[str, Any], gathered: Gathered, written: Mapping[str, WantedTensor]
) -> Mapping[str, Any]:
    """Return attributes whose config states the type of tensors that writing converts."""
    config = attrs.get("config")
    dtype = main_type(written.values())
    if not isinstance(config, dict) or dtype == main_type(gathered.payloads):
        return attrs
    return {**attrs, "config": with_types(config, list(written.values()))}


def main_type(tensors: Iterable[Described | WantedTensor]) -> str:
    """Return the type of most elements of floats; empty without floats."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in WIDE_FLOATS:
            sizes[tensor.dtype] += prod(tensor.shape)
    return sizes.most_common(1)[0][0] if sizes else ""


def other_types(
    config: Mapping[str, Any],
    old_config: Mapping[str, Any],
    before: Iterable[Described],
    after: Iterable[Described],
) -> Iterator[tuple[str, str]]:
    """Yield notes of tensors whose type differs from the config, and did not before."""
    stated, old_stated = map(stated_dtype, (config, old_config))
    types = {tensor.name: tensor.dtype for tensor in before} if stated == old_stated else {}
    declared = [value for _, value in declarations_in(config)]
    methods = [value.get("quant_method") for value in declared if isinstance(value, dict)]
    method = next((method for method in _KEEPING_TYPES if method in methods), None)
    use = "converts them to" if method is None else f"does not convert them to, beside {method}"
    # A type of all floats would be one of the scales of codes, too.
    remedy = f"encoding={{name: {{'dtype': {stated!r}}}}}" if declared else f"dtype={stated!r}"
    change = _OTHER_TYPE.format(stated, use, f"{remedy}, cast='allow'")
    for tensor in after if stated in WIDE_FLOATS else ():
        if tensor.dtype in WIDE_FLOATS and tensor.dtype not in {stated, types.get(tensor.name)}:
            yield change, f"{tensor.name} {tensor.dtype}"
