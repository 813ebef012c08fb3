"""Offsets and scales that conversions of known architectures apply, with their sources.

The converters of llama.cpp (github.com/ggml-org/llama.cpp, ``conversion/*.py``) change the numbers
of some tensors to simplify inference: see `KNOWN`. Any other offset or scale is a difference.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xckpt.comparison.explaining.rounding import Transform


class Known(NamedTuple):
    """An offset and a scale that a conversion applies to tensors of some architectures."""

    architectures: frozenset[str]
    names: re.Pattern[str]
    #: None for any number, which depends on the configuration of the model.
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
# Names of GGUF, whose numbers include the offset.
_GGUF = re.compile(r"(blk\.\d+|output_norm)\.")
_KEYS = ("general.architecture", "model_type", "architecture")


class Architecture:
    """The architecture of two checkpoints, from their attributes or the names of their tensors."""

    def __init__(self, attrs: Iterable[Mapping[object, object]], names: Iterable[str]) -> None:
        stated = {str(attr[key]).lower() for attr in attrs for key in _KEYS if key in attr}
        if not stated and any(_GEMMA.search(name) for name in names):
            stated = {"gemma2"}
        self.stated = frozenset(stated)

    def offset(self, names: Iterable[str]) -> float | None:
        """Return the offset that a conversion may have added to a tensor with one of the names."""
        for change in KNOWN:
            applies = not self.stated or change.architectures & self.stated
            if applies and change.offset and any(change.names.search(name) for name in names):
                return change.offset
        return None

    def admits(self, transform: Transform, names: tuple[str, str]) -> bool:
        """Return whether conversions of the architecture transform the first tensor like this."""
        is_of_gguf = [_GGUF.match(name) is not None for name in names]
        for change in KNOWN:
            applies = change.architectures & self.stated
            if not applies or not any(change.names.search(name) for name in names):
                continue
            is_back = change.offset is not None and transform.offset == -change.offset != 0
            if change.offset and is_of_gguf == [not is_back, is_back]:
                continue
            is_scaled = change.scale is None or transform.scale == change.scale
            if is_scaled and (is_back or transform.offset == change.offset):
                return True
        return False
