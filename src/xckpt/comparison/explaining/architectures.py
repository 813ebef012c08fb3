"""Offsets and scales that architectures are known for, with where each is from.

The converters of llama.cpp (github.com/ggml-org/llama.cpp, ``conversion/*.py``) change numbers so
that the engine need not: see `KNOWN`. Any other offset or scale is a difference.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xckpt.comparison.explaining.rounding import Transform


class Known(NamedTuple):
    """A number that the tensors of some architectures are added or multiplied by."""

    architectures: frozenset[str]
    names: re.Pattern[str]
    #: None for any number: it is in the configuration of the model.
    offset: float | None
    scale: float | None
    source: str


_NORMS = re.compile(r"^(?!.*linear_attn\.norm).*norm\.(weight|gamma|scale)$")
KNOWN = (
    Known(
        frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"}),
        *(_NORMS, 1.0, 1.0, "conversion/gemma.py: norm_shift"),
    ),
    Known(frozenset({"nemotron"}), *(_NORMS, 1.0, 1.0, "conversion/nemotron.py: layernorm1p")),
    Known(
        frozenset({"qwen3next", "qwen3_next"}),
        *(_NORMS, 1.0, 1.0, "conversion/qwen.py: Qwen3NextModel"),
    ),
    Known(
        frozenset({"jais"}),
        re.compile(r"(wte|lm_head)\.weight$"),
        *(0.0, None, "conversion/jais.py: embeddings_scale, width_scale"),
    ),
)
# Names that only models with such norms have: Gemma 2 and 3.
_GEMMA = re.compile(r"(pre|post)_feedforward_layernorm\.weight$|\.post_ffw_norm\.weight$")
# Names of GGUF, which has the numbers with the offset.
_GGUF = re.compile(r"(blk\.\d+|output_norm)\.")
_KEYS = ("general.architecture", "model_type", "architecture")


class Architecture:
    """The architecture of two checkpoints, as their attributes or names state it."""

    def __init__(self, attrs: Iterable[Mapping[object, object]], names: Iterable[str]) -> None:
        stated = {str(each[key]).lower() for each in attrs for key in _KEYS if key in each}
        if not stated and any(_GEMMA.search(name) for name in names):
            stated = {"gemma2"}
        self.stated = frozenset(stated)

    def offset(self, names: Iterable[str]) -> float | None:
        """Return the number that may have been added to a tensor with one of some names."""
        for known in KNOWN:
            is_meant = not self.stated or known.architectures & self.stated
            if is_meant and known.offset and any(known.names.search(name) for name in names):
                return known.offset
        return None

    def admits(self, transform: Transform, names: tuple[str, str]) -> bool:
        """Return whether the architecture is known for a transform from one name to the other."""
        is_of_gguf = [_GGUF.match(name) is not None for name in names]
        for known in KNOWN:
            is_meant = known.architectures & self.stated
            if not is_meant or not any(known.names.search(name) for name in names):
                continue
            is_back = known.offset is not None and transform.offset == -known.offset != 0
            if known.offset and is_of_gguf == [not is_back, is_back]:
                continue
            is_scaled = known.scale is None or transform.scale == known.scale
            if is_scaled and (is_back or transform.offset == known.offset):
                return True
        return False
