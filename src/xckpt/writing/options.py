"""The keywords that `save`, `convert` and `append` hand on to a format, with their types."""

from __future__ import annotations

from typing import Any, TypedDict

__all__ = ["FormatOptions"]


class FormatOptions(TypedDict, total=False):
    """Options of single formats; each is described with its format. Others are a `TypeError`."""

    alignment: int | None  # ztensor
    config: Any  # gptrs
    container: str | None  # gptrs
    data_type: str | None  # primitiv
    dialect: str  # burnpack
    ids: str | None  # gptrs
    kind: str | None  # gptrs
    max_shard_size: int | str | None  # safetensors
    multi_shard: bool | None  # mlcp
    param_ids: str  # burnpack
    version: str  # ztensor
