"""Names of axes: for each kind of model that gpt.rs loads, by the name of the tensor and the axis.

A name is given only where the axis has the size that the config gives, and never guessed from
the size, since sizes collide. Transformers have their weights as ``[in, out]``; the classifiers of
vision models theirs as ``[out, in]``. The channels and kernels of convolutions differ from layer
to layer, so that no one name fits them all.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ModelAxes"]

_Names = tuple[str | None, ...]

# By kind and name of the tensor, "*" being the number of a block. Block 3 of 2 has them too:
# whether the model uses a tensor says nothing about its axes.
_AXES: Mapping[str, Mapping[str, _Names]] = {
    "gpt": {
        "tok_embeddings.weight": ("vocab_size", "embed_dim"),
        "pos_embeddings": ("context_length", "embed_dim"),
        "blocks.*.attention.w_qkv": ("embed_dim", "qkv_dim"),
        "blocks.*.attention.b_qkv": ("qkv_dim",),
        "blocks.*.attention.w_out": ("attn_dim", "embed_dim"),
        "blocks.*.attention.b_out": ("embed_dim",),
        "blocks.*.feed_forward.w_in": ("embed_dim", "mlp_hidden_dim"),
        "blocks.*.feed_forward.b_in": ("mlp_hidden_dim",),
        "blocks.*.feed_forward.w_out": ("mlp_hidden_dim", "embed_dim"),
        "blocks.*.feed_forward.b_out": ("embed_dim",),
        "blocks.*.ln_1.gamma": ("embed_dim",),
        "blocks.*.ln_1.beta": ("embed_dim",),
        "blocks.*.ln_2.gamma": ("embed_dim",),
        "blocks.*.ln_2.beta": ("embed_dim",),
        "final_ln.gamma": ("embed_dim",),
        "final_ln.beta": ("embed_dim",),
        "lm_head": ("embed_dim", "vocab_size"),
    },
    "ministral": {
        "tok_embeddings.weight": ("vocab_size", "embed_dim"),
        "blocks.*.attention.w_qkv": ("embed_dim", "qkv_dim"),
        "blocks.*.attention.w_out": ("attn_dim", "embed_dim"),
        "blocks.*.feed_forward.w_gate": ("embed_dim", "mlp_hidden_dim"),
        "blocks.*.feed_forward.w_up": ("embed_dim", "mlp_hidden_dim"),
        "blocks.*.feed_forward.w_down": ("mlp_hidden_dim", "embed_dim"),
        "blocks.*.norm_1.gamma": ("embed_dim",),
        "blocks.*.norm_2.gamma": ("embed_dim",),
        "final_norm.gamma": ("embed_dim",),
        "lm_head": ("embed_dim", "vocab_size"),
    },
    "resnet34": {
        "fc.weight": ("num_classes", "in_features"),
        "fc.bias": ("num_classes",),
    },
    "mobilenet_v2": {
        "classifier.weight": ("num_classes", "in_features"),
        "classifier.bias": ("num_classes",),
    },
}

# By kind and name of an axis: a sum of products of numbers and keys of the config.
_SIZES: Mapping[str, Mapping[str, str]] = {
    "gpt": {
        "vocab_size": "vocab_size",
        "context_length": "context_length",
        "embed_dim": "embed_dim",
        "attn_dim": "embed_dim",
        "qkv_dim": "3 * embed_dim",
        "mlp_hidden_dim": "embed_dim * mlp_ratio",
    },
    "ministral": {
        "vocab_size": "vocab_size",
        "embed_dim": "embed_dim",
        "attn_dim": "num_heads * head_dim",
        "qkv_dim": "num_heads * head_dim + 2 * num_kv_heads * head_dim",
        "mlp_hidden_dim": "mlp_hidden_dim",
    },
    "resnet34": {"num_classes": "num_classes", "in_features": "512"},
    "mobilenet_v2": {"num_classes": "num_classes", "in_features": "1280"},
}

# By kind and key that may be missing: the keys whose quotient it is then.
_QUOTIENTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "ministral": {"head_dim": ("embed_dim", "num_heads")},
}

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_LARGEST = (1 << 63) - 1


class ModelAxes:
    """Names the axes of the tensors of one model.

    Parameters
    ----------
    kind : str or None
        Kind of the model.
    config : object
        Its config, of which keys may be missing or of any type.

    Examples
    --------
    >>> axes = ModelAxes("gpt", {"vocab_size": 19, "embed_dim": 8})
    >>> axes.of("tok_embeddings.weight", (19, 8)), axes.of("lm_head", (8, 20))
    (('vocab_size', 'embed_dim'), ('embed_dim', None))
    """

    __slots__ = ("_axes", "_known", "_sizes")

    def __init__(self, kind: str | None, config: Any) -> None:
        self._axes = _AXES.get(kind or "", {})
        self._sizes = _sizes(kind or "", config)
        self._known: dict[tuple[str, tuple[int, ...]], _Names | None] = {}

    def of(self, name: str, shape: tuple[int, ...]) -> _Names | None:
        """Name the axes of a tensor.

        Parameters
        ----------
        name : str
            Name of the tensor.
        shape : tuple of int
            Its shape.

        Returns
        -------
        tuple of (str or None), or None
            A name for each axis that has the size the config gives, None for the others; None
            where no axis has a name.
        """
        if not self._axes:
            return None
        key = _NUMBER.sub("*", name), shape
        if key not in self._known:
            self._known[key] = self._fitting(*key)
        return self._known[key]

    def _fitting(self, pattern: str, shape: tuple[int, ...]) -> _Names | None:
        names = self._axes.get(pattern, ())
        if len(names) != len(shape):
            return None
        fitting = tuple(
            name if name is not None and self._sizes.get(name) == size else None
            for name, size in zip(names, shape, strict=True)
        )
        return fitting if any(fitting) else None


def _sizes(kind: str, config: Any) -> dict[str, int | None]:
    """Compute the size of each axis; None where the config does not tell."""
    entries = config.items() if type(config) is dict else ()
    known = {key: n for key, n in entries if type(n) is int and 0 < n <= _LARGEST}
    for key, (dividend, divisor) in _QUOTIENTS.get(kind, {}).items():
        if type(config) is dict and config.get(key) is None and {dividend, divisor} <= known.keys():
            quotient, left = divmod(known[dividend], known[divisor])
            if quotient and not left:
                known[key] = quotient
    return {name: _evaluated(size, known) for name, size in _SIZES.get(kind, {}).items()}


def _evaluated(size: str, known: Mapping[str, int]) -> int | None:
    terms = [
        [int(factor) if factor.isdigit() else known.get(factor) for factor in term.split(" * ")]
        for term in size.split(" + ")
    ]
    products = [prod(factor for factor in term if factor is not None) for term in terms]
    return None if any(None in term for term in terms) else sum(products)
