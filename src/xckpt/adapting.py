"""Adapters from checkpoints: `extract_adapter` and `resize_adapter` write folders for PEFT.

The best approximation of an update by factors of some rank has its largest singular values. They
are computed in blocks of rows, as by `xckpt.spectrum`, and the factors of a matrix by another pass.
Factors are kept in files until the adapter is written, so that memory is bounded by a few matrices.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np

from xckpt.datasets.adapter_updates import factors_of
from xckpt.datasets.adapters import Adapter, find_adapters
from xckpt.errors import UnsupportedError, shown, some, warn
from xckpt.options import TransferOptions, takes
from xckpt.progress import Progress
from xckpt.scan.entries import contents_of, contents_of_all, entries_of, filter_of
from xckpt.statistics.singular import Factorized, best_factors, factors_of_product
from xckpt.statistics.spectra import Matrix, on_threads, select_matrices
from xckpt.storage import write_file
from xckpt.structure import PARAMETERS, Structure
from xckpt.structure.families import under_other_modules
from xckpt.writing.saving import save
from xckpt.writing.targets import Target, made_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pandas as pd

    from xckpt.labels import TensorFilter
    from xckpt.scan.entries import Describable
    from xckpt.typing import Array

#: Highest rank if only the energy is stated.
HIGHEST = 256
_MODEL, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_CAUSAL = "ForCausalLM"
_OTHER_MODULES = (
    "transformers 5 names modules of this model otherwise than its files do, as {}, and "
    "PEFT leaves out factors whose module it does not find: pass state dicts instead of files, "
    "extract_adapter(base_model.state_dict(), tuned_model.state_dict(), ...)"
)


@takes(TransferOptions)
def extract_adapter(
    base: Describable,
    tuned: Describable,
    path: str | os.PathLike[str],
    rank: int | None = None,
    *,
    energy: float | None = None,
    tensors: TensorFilter | None = None,
    overwrite: bool = False,
    **options: Unpack[TransferOptions],
) -> pd.DataFrame:
    """Write the difference of two checkpoints as a LoRA adapter, in a folder that PEFT loads.

    Each linear weight that differs gets two factors, whose product is the best approximation of its
    update. Memory is bounded by a few matrices; the checkpoints may be larger.

    Parameters
    ----------
    base, tuned : path, mapping, Index, xarray.Dataset or xarray.DataTree
        The model before and after fine-tuning, with the same names of tensors.
    path : str or os.PathLike
        New folder, which gets ``adapter_config.json`` and ``adapter_model.safetensors``.
    rank : int, optional
        Highest rank; 256 by default if `energy` is stated.
    energy : float, optional
        Share of the squares of an update to keep, from 0 to 1, such as 0.99: a tensor gets the
        lowest rank that does so. By default each has `rank`.

    Returns
    -------
    pandas.DataFrame
        A row for each tensor of the adapter: its ``rank``, the ``energy`` that its factors have,
        and the norm of its update, ``frobenius``. Singular values that rounding to the stored types
        explains are left out, whatever `energy` is.

    Raises
    ------
    FileExistsError
        If the folder has an adapter and `overwrite` is false.
    ValueError
        If neither `rank` nor `energy` is stated, or no linear weight differs.

    Warns
    -----
    CheckpointWarning
        If other tensors differ, such as norms and embeddings, which the adapter lacks, as it lacks
        updates with NaN or infinities; or if updates have less than `energy`. If transformers names
        modules of this model otherwise than its files do, so that PEFT does not find them.

    Examples
    --------
    >>> xckpt.extract_adapter("base.safetensors", "tuned.safetensors", "extracted/", rank=4)
    """
    request = _Request.of(rank, energy)
    storage_options = options["storage_options"]
    opened, base_opened = contents_of_all([tuned, base], storage_options)
    chosen = filter_of(tensors, options, opened)
    structure = opened.structure
    entries = entries_of(opened, chosen=chosen)
    names = {stream.name for entry in entries for stream in entry.streams}
    linear = {name for name in names if _are_linear(name, structure, base_opened.structure)}
    matrices = select_matrices(entries, linear.__contains__, base_opened) if linear else {}
    nbytes = sum(matrix.nbytes for matrix in matrices.values())
    ranks: dict[str, Factorized] = {}
    factors: dict[str, dict[str, Array]] = {}
    broken: list[str] = []
    with (
        _new_adapter(path, overwrite=overwrite, storage_options=storage_options) as write,
        TemporaryDirectory(prefix="xckpt-") as scratch,
    ):
        with Progress(options["progress"], "extract", nbytes) as bar:

            def deliver(matrix: Matrix, result: Factorized) -> None:
                name = matrix.name
                if math.isnan(result.total):
                    broken.append(name)
                elif result.total > 0:
                    ranks[name] = result._replace(left=_NOTHING, right=_NOTHING)
                    named_factors = _named(name, result, is_turned=_is_in_first(structure, name))
                    factors[name] = {
                        key: _stored(f"{scratch}/{len(ranks)}{key[-9:]}.npy", factor)
                        for key, factor in named_factors.items()
                    }
                bar.advance(matrix.nbytes)

            on_threads(list(matrices.values()), request.factorize, deliver)
        if broken:
            text = f"the adapter lacks the updates of {some(sorted(broken), 'tensors')}"
            warn(f"{text}, which have NaN or infinities")
        if not ranks:
            raise ValueError("no linear weight of the checkpoints differs by numbers")
        _warn_of_missing(base_opened, opened, names - matrices.keys())
        elsewhere = under_other_modules(structure.facts.config, sorted(ranks))
        if elsewhere and opened.format is not None:
            warn(_OTHER_MODULES.format(some(elsewhere, "", 1)))
        ranks = {name: ranks[name] for name in matrices if name in ranks}
        values = {key: array for name in ranks for key, array in factors[name].items()}
        write(values, _config(ranks, structure))
        values.clear()
        factors.clear()  # closes the files before they are removed
    return request.report(ranks)


@takes()
def resize_adapter(
    adapter: Describable,
    path: str | os.PathLike[str],
    rank: int | None = None,
    *,
    energy: float | None = None,
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> pd.DataFrame:
    """Write a LoRA adapter of PEFT with another rank, in a new folder.

    The new factors are the best approximation of the old product; updates are not formed.

    Parameters
    ----------
    adapter : path, Index, xarray.Dataset or xarray.DataTree
        Adapter, with its ``adapter_config.json`` next to it.
    path : str or os.PathLike
        New folder, as for `extract_adapter`.
    rank : int, optional
        Highest rank.
    energy : float, optional
        Share of the squares of an update to keep, as for `extract_adapter`.

    Returns
    -------
    pandas.DataFrame
        A row for each tensor, as for `extract_adapter`.

    Raises
    ------
    FileExistsError
        If the folder has an adapter and `overwrite` is false.
    UnsupportedError
        If it is no LoRA adapter of PEFT, or has DoRA.
    ValueError
        If neither `rank` nor `energy` is stated.

    Examples
    --------
    >>> xckpt.resize_adapter("adapter/", "smaller/", rank=2)
    """
    from xckpt.opening.reading import adapter_in, read_config

    request = _Request.of(rank, energy)
    tensors = contents_of(adapter_in(adapter, storage_options), storage_options)
    config = read_config(tensors.source, tensors.attrs, "adapter_config", storage_options)
    adapters = find_adapters(tensors, config)
    resized = [item for item in adapters if item.kind == "lora"]
    unsupported = [i.base for i in adapters if i.kind not in {"lora", "bias", "saved", "rows"}]
    if config is None or config.get("peft_type") != "LORA" or unsupported or not resized:
        names = f": it has {some(unsupported, 'tensors')} of another kind" if unsupported else ""
        raise UnsupportedError(f"only LoRA adapters of PEFT can be resized{names}", rule="Adapter")
    values: dict[str, Any] = {name: tensors.variable(name).data for name in tensors.names}
    ranks: dict[str, Factorized] = {}
    for item in resized:
        if item.scale is None:
            raise UnsupportedError(f"{shown(item.base)}: {item.note}", rule="Adapter")
        parts = factors_of(item, tensors, item.scale)
        result = factors_of_product(*parts.arrays(), parts.scale, request.choose)
        ranks[item.base] = result
        values |= _reshaped(item, result, values)
    by_module = {_module(name): result.rank for name, result in ranks.items()}
    new_config = {**config, **_ranks(by_module), "use_rslora": False}
    with _new_adapter(path, overwrite=overwrite, storage_options=storage_options) as write:
        write(values, new_config)
    return request.report(ranks)


# --- what is requested ---------------------------------------------------------------------------


class _Request(NamedTuple):
    """The highest rank, and the share of the squares to keep; None for the rank alone."""

    rank: int
    energy: float | None

    @classmethod
    def of(cls, rank: int | None, energy: float | None) -> _Request:
        if rank is None and energy is None:
            raise ValueError("state the rank of the adapter, or the energy to keep: energy=0.99")
        if rank is not None and (type(rank) is not int or rank < 1):
            raise ValueError(f"rank must be a positive number, not {rank!r}")
        if energy is not None and not 0 < energy <= 1:
            raise ValueError(f"energy must be a number above 0 and up to 1, not {energy!r}")
        return cls(HIGHEST if rank is None else rank, energy)

    def choose(self, squares: Array, total: float) -> int:
        """Return the number of singular values to keep, given their squares, largest first."""
        if self.energy is None:
            return min(self.rank, len(squares))
        reached = np.cumsum(squares) >= self.energy * total
        lowest = int(np.argmax(reached)) + 1 if reached.any() else len(squares)
        return min(self.rank, lowest)

    def factorize(self, matrix: Matrix, threads: int) -> Factorized:
        """Return the factors of the difference of a matrix."""
        noise = matrix.noise()
        result = best_factors(matrix.blocks(noise), noise, self.choose, self.rank, threads)
        columns, rows = matrix.shape[1], matrix.shape[0]
        # The blocks of a wide matrix are those of its transpose.
        return result.turned() if columns > rows else result

    def report(self, ranks: Mapping[str, Factorized]) -> pd.DataFrame:
        """Return a row for each tensor; warn if some have less than the energy."""
        import pandas as pd

        least = self.energy or 0
        below = [name for name, result in ranks.items() if result.energy < least and result.is_cut]
        if below:
            text = f"a higher rank than {self.rank} would keep {least:g} of the squares"
            warn(f"{text} of {some(below, 'tensors')}")
        columns = ["rank", "energy", "frobenius"]
        rows = [[r.rank, r.energy, math.sqrt(r.total)] for r in ranks.values()]
        return pd.DataFrame(rows, pd.Index(list(ranks), name="name", dtype=object), columns)


# --- names and configs ---------------------------------------------------------------------------

_NOTHING = np.zeros((0, 0), np.float32)


def _are_linear(name: str, structure: Structure, base: Structure) -> bool:
    """Return whether a tensor is a linear weight in two checkpoints."""
    if not name.endswith(".weight") or name not in base:
        return False
    shape, base_shape = (tuple(side.described(name).shape) for side in (structure, base))
    is_matrix = len(shape) == 2 and shape == base_shape and structure.roles[name] in PARAMETERS
    return is_matrix and structure.module_type(name) == "linear"


def _is_in_first(structure: Structure, name: str) -> bool:
    place = structure.place(name)
    return place is not None and place.outputs == 1


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


def _named(name: str, factors: Factorized, *, is_turned: bool) -> dict[str, Array]:
    """Return the factors of a weight by their names in PEFT."""
    up, down = (factors.right.T, factors.left.T) if is_turned else (factors.left, factors.right)
    stem = f"{_PREFIX}{_module(name)}"
    return {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}


def _reshaped(adapter: Adapter, factors: Factorized, values: Mapping[str, Any]) -> dict[str, Array]:
    """Return new factors by the names of the old ones, with their types and axes."""
    reshaped = {}
    for purpose, matrix, axis in (("left", factors.left, 1), ("right", factors.right, 0)):
        name = adapter.tensors[purpose]
        shape = list(values[name].shape)
        shape[1 - axis if adapter.is_transposed else axis] = factors.rank
        stored = np.ascontiguousarray(matrix.T if adapter.is_transposed else matrix)
        reshaped[name] = stored.reshape(shape).astype(values[name].dtype)
    return reshaped


def _config(ranks: Mapping[str, Factorized], structure: Structure) -> dict[str, Any]:
    """Return the config of PEFT for an adapter of some weights."""
    by_module = {_module(name): result.rank for name, result in ranks.items()}
    config = structure.facts.config
    classes = config.get("architectures")
    is_causal = isinstance(classes, list) and any(_CAUSAL in str(name) for name in classes)
    in_first = {_is_in_first(structure, name) for name in ranks}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_causal else None,
        "base_model_name_or_path": config.get("_name_or_path"),
        "target_modules": list(by_module),
        **_ranks(by_module),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": in_first == {True},
        "inference_mode": True,
    }


def _ranks(by_module: Mapping[str, int]) -> dict[str, Any]:
    """Return the ranks of modules, and alphas for a scale of 1, as PEFT states them."""
    usual = Counter(by_module.values()).most_common(1)[0][0]
    # Keys are regular expressions. Dots stay as they are, as everybody writes them.
    patterns = {
        re.escape(module).replace(r"\.", "."): rank
        for module, rank in by_module.items()
        if rank != usual
    }
    return {
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
    }


def _warn_of_missing(base: Any, tuned: Any, names: set[str]) -> None:
    """Warn about tensors that differ and are not in an adapter."""
    shared = names & base.names
    missing = sorted(names - shared)
    if shared:
        from xckpt.comparison import compare

        chosen = shared.__contains__
        table: Any = compare(base, tuned, tensors=chosen, ignore_attrs=True, progress=False)
        status = table.ckpt.table()["status"]
        missing += list(status.index[status != "same"])
    if missing:
        warn(f"the adapter lacks the changes of {some(missing, 'tensors')}")


# --- files ---------------------------------------------------------------------------------------


@contextmanager
def _new_adapter(
    path: str | os.PathLike[str], *, overwrite: bool, storage_options: dict[str, Any] | None
) -> Iterator[Callable[[Mapping[str, Any], Mapping[str, Any]], None]]:
    """Make a folder, and give a function that writes tensors and a config into it."""
    folder = os.fspath(path).rstrip("/")
    options: dict[str, Any] = {"overwrite": overwrite, "storage_options": storage_options}

    def write(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        save(dict(tensors), f"{folder}/{_MODEL}", progress=False, **options)
        # Without its config PEFT finds no adapter.
        text = json.dumps(config, indent=2) + "\n"
        write_file(f"{folder}/{_CONFIG}", text.encode("ascii"), **options)

    with made_folder(folder):
        for name in (_MODEL, _CONFIG):
            Target.of(f"{folder}/{name}", **options).check()
        yield write


def _stored(path: str, values: Array) -> Array:
    """Write an array to a file, and return it as a memory map."""
    np.save(path, np.ascontiguousarray(values, np.float32))
    mapped: Array = np.load(path, mmap_mode="r")
    return mapped
