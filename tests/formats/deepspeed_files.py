"""Folders of DeepSpeed, written without PyTorch as `deepspeed.runtime.engine` does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.formats import torch_files as files

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

MODEL_STATES = "mp_rank_00_model_states.pt"
LOSS_SCALER = (
    files.name("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
    + b")\x81"
    + files.mapping({"cur_scale": files.real(1.0)})
    + b"b"
)


def listed(*values: bytes) -> bytes:
    return b"](" + b"".join(values) + b"e"


def ordered(items: dict[str, bytes]) -> bytes:
    body = b"".join(files.text(key) + value for key, value in items.items())
    return files.name("collections", "OrderedDict") + b")R(" + body + b"u"


def size(shape: tuple[int, ...]) -> bytes:
    return files.called(files.name("torch", "Size"), files.sizes(*shape))


class Storages:
    """The storages of a file."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def tensor(self, array: NDArray[Any]) -> bytes:
        key = str(len(self.data))
        self.data[key] = array.tobytes()
        return files.whole(key, array)

    def file(self, items: dict[str, bytes]) -> bytes:
        return files.archive(files.mapping(items), self.data)


@dataclass
class Run:
    """A model with the groups of its optimizer, written as the folder of a step.

    `changes` replaces entries: of the states of the model, of those of the optimizer on all ranks,
    or, below the number of a rank, of this one.
    """

    groups: list[dict[str, NDArray[Any]]]
    stage: int = 2
    world: int = 2
    buffers: dict[str, NDArray[Any]] = field(default_factory=dict)
    frozen: dict[str, NDArray[Any]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    prefix: str = "zero"
    gaps: list[list[int]] | None = None
    is_elastic: bool = False
    changes: dict[Any, Any] = field(default_factory=dict)

    @property
    def expected(self) -> dict[str, NDArray[Any]]:
        """The model as `zero_to_fp32` consolidates it, and the moments."""
        weights = {name: array for group in self.groups for name, array in group.items()}
        tied = {name: weights[owner] for name, owner in self.shared.items()}
        moments = {f"optimizer.state.{n}.exp_avg": -array for n, array in weights.items()}
        moments |= {f"optimizer.state.{n}.exp_avg_sq": array**2 for n, array in weights.items()}
        step = {"optimizer.step": np.array(7, "f4")}
        return {**weights, **self.buffers, **self.frozen, **tied, **moments, **step}

    def optimizer_name(self, rank: int) -> str:
        return f"{self.prefix}_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def model_name(self, rank: int) -> str:
        return f"zero_pp_rank_{rank}_{MODEL_STATES}" if self.stage == 3 else MODEL_STATES

    def files(self) -> dict[str, bytes]:
        written = {self.optimizer_name(rank): self.optimizer(rank) for rank in range(self.world)}
        ranks = range(self.world if self.stage == 3 else 1)
        return written | {self.model_name(rank): self.model(rank) for rank in ranks}

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files().items():
            (folder / name).write_bytes(data)
        return folder

    def share(self, array: NDArray[Any], rank: int) -> NDArray[Any]:
        """Return the piece of a parameter in stage 3, with its padding."""
        padded = np.pad(array.ravel(), (0, -array.size % self.world), constant_values=99)
        return np.split(padded, self.world)[rank]

    def flat(self, number: int, rank: int) -> tuple[NDArray[Any], int]:
        """Return the vector of a group on a rank, and the size of the padding at its end."""
        arrays = [*self.groups[number].values()]
        if self.stage == 3:
            return np.concatenate([self.share(array, rank) for array in arrays]), 0
        gaps = self.gaps[number] if self.gaps else [0] * len(arrays)
        pairs = zip(arrays, gaps, strict=True)
        padded = [np.pad(a.ravel(), (0, gap), constant_values=88) for a, gap in pairs]
        whole = np.concatenate(padded)
        padding = -whole.size % (2 * self.world)
        piece = np.split(np.pad(whole, (0, padding), constant_values=99), self.world)[rank]
        return piece, padding if rank == self.world - 1 else 0

    def optimizer(self, rank: int) -> bytes:
        storages = Storages()
        weights: list[bytes] = []
        states: list[bytes] = []
        for number in range(len(self.groups)):
            flat, padding = self.flat(number, rank)
            weights.append(storages.tensor(flat[: flat.size - padding]))
            flat = flat[: flat.size - padding] if self.is_elastic else flat
            moments = {"step": np.array(7, "f4"), "exp_avg": -flat, "exp_avg_sq": flat**2}
            moments = {name: np.asarray(values) for name, values in moments.items()}
            state = {name: storages.tensor(values) for name, values in moments.items()}
            states += [] if self.is_elastic else [files.number(number)]
            states.append(files.mapping(state))
        enum = files.name("deepspeed.runtime.zero.config", "ZeroStageEnum")
        base = files.mapping({"state": b"}(" + b"".join(states) + b"u"})
        base = listed(*states) if self.is_elastic else base
        is_cut = self.stage == 3
        count = files.number(self.world)
        items = {
            "loss_scaler": LOSS_SCALER,
            "zero_stage": files.called(enum, files.number(self.stage)),
            "partition_count": count if is_cut else listed(*[count] * len(self.groups)),
            "optimizer_state_dict" if is_cut else "base_optimizer_state": base,
            "fp32_flat_groups" if is_cut else "single_partition_of_fp32_groups": listed(*weights),
        }
        if self.gaps is not None:
            gaps = [listed(*map(files.number, group)) for group in self.gaps]
            items["param_alignment_paddings"] = listed(*gaps)
        items |= self.changes.get("optimizer", {}) | self.changes.get(rank, {})
        return storages.file({"optimizer_state_dict": files.mapping(items)})

    def model(self, rank: int) -> bytes:
        storages = Storages()
        weights = {name: array for group in self.groups for name, array in group.items()}
        weights |= {name: weights[owner] for name, owner in self.shared.items()}
        empty = {name: np.empty(0, "f2") for name in weights}
        module = empty if self.stage == 3 else {n: a.astype("f2") for n, a in weights.items()}
        module = {**module, **self.buffers}
        module |= {n: a if self.stage < 3 else np.empty(0, "f2") for n, a in self.frozen.items()}
        fragments = {
            name: array if self.stage < 3 else self.share(array, rank)
            for name, array in self.frozen.items()
        }
        has_frozen = self.stage > 1
        frozen = {name: size(array.shape) for name, array in self.frozen.items()}
        items = {
            "module": ordered({name: storages.tensor(a) for name, a in module.items()}),
            "buffer_names": listed(*map(files.text, self.buffers)),
            "optimizer": b"N",
            "param_shapes": listed(
                *(ordered({n: size(a.shape) for n, a in group.items()}) for group in self.groups)
            ),
            "frozen_param_shapes": ordered(frozen) if has_frozen else b"N",
            "shared_params": files.mapping({n: files.text(o) for n, o in self.shared.items()}),
            "frozen_param_fragments": ordered(
                {name: storages.tensor(array) for name, array in fragments.items()}
            )
            if has_frozen
            else b"N",
            "global_steps": files.number(10),
            "mp_world_size": files.number(1),
        }
        return storages.file(items | self.changes.get("model", {}))
