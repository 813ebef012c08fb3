"""Conventions for names of files and folders: parts, ranks, indexes, steps, unfinished writes.

Comments name the libraries that write such names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from xckpt import formats
from xckpt.formatting import natural_key

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Suffix of an index of shards that is written.
INDEX_SUFFIX = ".index.json"
# model.safetensors.index.json, model.safetensors.index.fp16.json: transformers, diffusers.
_INDEX = re.compile(r"(?P<single>.+)\.index(?:\.[A-Za-z0-9_-]+)?\.json", re.IGNORECASE)
# model-00001-of-00004.safetensors: huggingface_hub, llama.cpp.
_PART = re.compile(
    r"(?P<stem>.*?)-?(?P<number>[0-9]{1,9})-of-(?P<count>[0-9]{1,9})(?P<suffix>.*)",
    re.DOTALL | re.IGNORECASE,
)
# shard-00000-model-00001-of-00002.safetensors: ranks of torch.distributed.checkpoint, which have
# chunks of tensors, and may lack numbers.
_CHUNKS = re.compile(r"shard-[0-9]{1,9}-model-[0-9]{1,9}-of-[0-9]{1,9}\.safetensors")
# mp_rank_00, mp_rank_00_001, tp_rank_00_pp_rank_000 (Megatron-LM), consolidated.00 (Llama), rank_0,
# model-tp0, tp_1_pp_0.
_RANK_WORD = r"(?:(?:mp|tp|pp|ep|cp)[-_]?rank|rank|tp|pp)"
_RANK = re.compile(
    rf"(?P<stem>(?:.*?[-_.])??)(?P<rank>{_RANK_WORD}[-_]?[0-9]{{1,6}}"
    rf"(?:[-_](?:{_RANK_WORD}[-_]?)?[0-9]{{1,6}})*)(?P<suffix>(?:[-_.][A-Za-z][^/]*)?)",
    re.IGNORECASE,
)
_NUMBER_OF_RANK = re.compile(r"[-_]?(?P<words>[a-z]+(?:[-_][a-z]+)*)?[-_]?(?P<number>[0-9]+)")
_CONSOLIDATED = re.compile(
    r"(?P<stem>consolidated)\.(?P<rank>[0-9]{2,4})(?P<suffix>\.[a-z]+)", re.IGNORECASE
)
# Words before the number of a step: transformers, Lightning, DeepSpeed, Megatron-LM, nanoGPT, ...
_STEP = re.compile(
    r"(?:^|[^a-z])(?:global_?step|checkpoint|chkpt|ckpt|cp|step|iteration|iter|it|epoch|update|"
    r"snapshot|save)s?[^a-z0-9]*$",
    re.IGNORECASE,
)
# 0000100_adapters.safetensors: mlx-lm.
_MLX = "_adapters."
# tmp-checkpoint-30 (transformers), 30.orbax-checkpoint-tmp-17 (Orbax), model.safetensors.tmp,
# ....incomplete (huggingface_hub), .crdownload (Chromium), .part (Firefox, curl), .aria2.
_UNFINISHED = re.compile(
    r"(?:_*(?:tmp|temp)[-_.].*"
    r"|.*[-_.](?:tmp|temp|partial|incomplete|part|crdownload|download(?:ing)?|aria2|xckpt-partial)"
    r"(?:[-_.]?[0-9]{0,20}))",
    re.IGNORECASE | re.DOTALL,
)
#: Suffix of the file beside an unfinished download of aria2, which writes into the file itself in
#: any order, so that a whole size and a good header say nothing.
IN_PLACE = ".aria2"
#: Suffixes of unfinished downloads of the file with the rest of the name.
DOWNLOADS = (IN_PLACE, ".part", ".crdownload", ".incomplete", ".downloading")
# Files that trainers write next to a model: transformers, accelerate, peft.
_COMPANION = re.compile(
    r"(?:optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args|trainer_state|"
    r"training_state)(?:[-_.].*)?",
    re.IGNORECASE | re.DOTALL,
)
# Stems of the files that libraries load from a folder with a config, best first: transformers
# (modeling_utils.py), diffusers, peft, mlx-lm, mistral-inference.
_PREFERRED = (
    "model", "diffusion_pytorch_model", "adapter_model", "adapters", "pytorch_model", "tf_model",
    "flax_model", "consolidated",
)  # fmt: skip
_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")


class PartName(NamedTuple):
    """A file name that states its number in a set of files."""

    stem: str
    number: int
    total: int
    suffix: str

    @property
    def family(self) -> tuple[str, int, str]:
        """The fields that all names of the set have in common."""
        return self.stem, self.total, self.suffix


class RankName(NamedTuple):
    """A name of a file or folder of one rank of a model that is split over several."""

    rank: str  # "mp_rank_00", "tp0"; a prefix for the names of its tensors
    family: tuple[str, ...]  # fields that the names of all ranks have in common


def part_of(name: str) -> PartName | None:
    """Return the number of a file in its set, or None if its name states none."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    return PartName(match["stem"], int(match["number"]), int(match["count"]), match["suffix"])


def rank_of(name: str) -> RankName | None:
    """Return the rank of a file or folder, or None if its name states none."""
    match = _CONSOLIDATED.fullmatch(name)
    if match is not None:
        return RankName(f"rank_{match['rank']}", (match["stem"].lower(), match["suffix"]))
    match = _RANK.fullmatch(name)
    if match is None or _CHUNKS.fullmatch(name):
        return None
    words = re.sub(r"[0-9]+", "", match["rank"])
    return RankName(match["rank"], (match["stem"], words, match["suffix"]))


def numbers_of(rank: str) -> list[tuple[str, int]]:
    """Return the numbers in the name of a rank, each with the words before it, or none."""
    matches = _NUMBER_OF_RANK.finditer(rank.lower())
    return [(match["words"] or "", int(match["number"])) for match in matches]


def is_chunked(name: str) -> bool:
    """Return whether a file has chunks of tensors that continue in other files."""
    return _CHUNKS.fullmatch(name) is not None


def is_index(name: str) -> bool:
    """Return whether a name is one of an index of shards."""
    return _INDEX.fullmatch(name) is not None


def is_called_like_one(name: str) -> bool:
    """Return whether a file has a name of a checkpoint, or of an index of shards."""
    lower = name.lower()
    return is_index(lower) or any(lower.endswith(formats.suffixes(f)) for f in formats.names())


def single_of(index_name: str) -> str:
    """Return the name of the single file that libraries look for before an index of shards."""
    match = _INDEX.fullmatch(index_name)
    return match["single"] if match is not None else ""


def is_unfinished(name: str) -> bool:
    """Return whether a name is one that writers and downloads give to unfinished files."""
    return _UNFINISHED.fullmatch(name) is not None


def is_companion(name: str) -> bool:
    """Return whether a file belongs to the training of the model next to it."""
    return _COMPANION.fullmatch(name) is not None


def preference(name: str) -> tuple[int, int] | None:
    """Return the rank of a file among those that libraries load; None for other names."""
    lower = name.lower()
    part, consolidated = part_of(lower), _CONSOLIDATED.fullmatch(lower)
    stem = lower.rpartition(".")[0] if part is None else part.stem.rstrip("_")
    stem = stem if consolidated is None else consolidated["stem"]
    if stem not in _PREFERRED:
        return None
    suffix = next((n for n, s in enumerate(_SUFFIXES) if lower.endswith(s)), len(_SUFFIXES))
    return _PREFERRED.index(stem), suffix


def preferred(names: Sequence[str]) -> str | None:
    """Return the name that libraries load first from a folder with a config."""
    ranked = [(key, natural_key(name), name) for name in names if (key := preference(name))]
    return min(ranked)[2] if ranked else None


def form_of(name: str) -> tuple[str, ...]:
    """Return the texts between the numbers in a name."""
    return tuple(re.split("[0-9]+", name))


def step_in(name: str) -> int | None:
    """Return the last number in a name that follows a word for steps; None without one."""
    parts = re.split(r"([0-9]+)", name)
    numbers = [int(parts[at]) for at in range(1, len(parts), 2) if _STEP.search(parts[at - 1])]
    return numbers[-1] if numbers else None


def steps_of(names: Sequence[str]) -> list[int] | None:
    """Return the steps in names of one form; None if no number in them is a step."""
    # A number is a step if a word for steps precedes it, or if it is the whole name.
    if len({form_of(name) for name in names}) != 1:
        return None
    split = [re.split(r"([0-9]+)", name) for name in names]
    before = split[0][::2]
    columns = [at for at in range(1, len(split[0]), 2) if _STEP.search(split[0][at - 1])]
    if len(before) == 2 and before[0] == "" and (before[1][:1] in {"", "."} or _MLX in before[1]):
        columns = [1]
    # "epoch=0-step=5": the last number that differs between all names.
    for column in reversed(columns):
        numbers = [int(parts[column]) for parts in split]
        if len(set(numbers)) == len(numbers):
            return numbers
    return None
