"""Conversions: tensors with their origins, and the steps that a converter could forget.

A converter fills a `Conversion`. Each step of a layout goes through `Conversion.step`, which notes
how else it could have been done. To repeat a conversion with one mistake, name that `Slip`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from torture.explaining.models import F32, FAMILIES, Array, Model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NUMBER = re.compile(r"(?<=[._/])\d+(?=[._/:]|$)|(?<=\bh)\d+|(?<=_l)\d+")


def slot(name: str) -> str:
    """Return the place of a tensor, which it shares with its siblings."""
    return _NUMBER.sub("#", name)


@dataclass
class Target:
    """A tensor of the second model."""

    name: str
    values: Array
    #: Names of the tensors of the first model that it has numbers of.
    origins: tuple[str, ...]
    #: Largest errors of a quantiser that is not repeated, or 0.
    bound: Array | float = 0.0
    #: Whether its layout is one that the search of the documentation does not have.
    is_apart: bool = False
    #: Whether no cause explains it, such as arithmetic with several tensors.
    is_free: bool = False
    #: Type of GGUF that it is stored in.
    stored: str = ""


@dataclass(frozen=True)
class Slip:
    """A mistake in one step: the step, the mistake, and the tensors that suffer it."""

    step: str
    mistake: str
    origins: tuple[str, ...]


@dataclass
class Conversion:
    """The tensors that a converter makes of a model."""

    model: Model
    rng: np.random.Generator
    slip: Slip | None = None
    is_apart: bool = False
    targets: list[Target] = field(default_factory=list)
    slips: list[Slip] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    #: Names of tensors of the first model that the second one lacks, because they are copies.
    tied: set[str] = field(default_factory=set)
    #: An adapter that was merged.
    adapter: dict[str, Array] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the tensors that no tensor was made of yet."""
        return [name for name in self.model.tensors if name not in self.used]

    def matching(self, pattern: str) -> list[re.Match[str]]:
        """Return matches of a pattern with whole names that no tensor was made of yet."""
        matches = [re.fullmatch(pattern, name) for name in self.names]
        return [match for match in matches if match]

    def __getitem__(self, name: str) -> Array:
        return self.model.tensors[name]

    def put(self, name: str, values: Array, *origins: str, **options: Any) -> None:
        """Add a tensor that was made of others."""
        options.setdefault("is_apart", self.is_apart)
        self.targets.append(Target(name, np.ascontiguousarray(values), origins, **options))
        self.used |= set(origins)

    def step(
        self, step: str, origin: str, right: Callable[[], Array], **wrong: Callable[[], Array]
    ) -> Array:
        """Do a step as it should be done, or with the mistake of this run."""
        self.slips += [Slip(step, mistake, (origin,)) for mistake in wrong]
        slip = self.slip
        if slip is not None and slip.step == step and origin in slip.origins:
            return wrong[slip.mistake]()
        return right()

    def turned(self, name: str, axes: tuple[int, ...] = (1, 0)) -> Array:
        """Return a tensor with its axes in another order."""
        values = self[name]
        wrong: dict[str, Callable[[], Array]] = {"not transposed": lambda: values}
        if len(axes) == 4:  # height and width exchanged
            first, second = (i for i, axis in enumerate(axes) if axis > 1)
            exchanged = list(axes)
            exchanged[first], exchanged[second] = exchanged[second], exchanged[first]
            wrong["height and width exchanged"] = lambda: values.transpose(exchanged)
        return self.step("transposed", name, lambda: values.transpose(axes), **wrong)

    def roped(self, name: str, heads: int) -> Array:
        """Return rows with the halves of each head interleaved."""
        values = self[name]
        more = {"wrong number of heads": lambda: interleaved(values, heads // 2)}
        return self.step(
            "rope",
            name,
            lambda: interleaved(values, heads),
            **{"not permuted": lambda: values} | (more if heads > 1 else {}),
        )

    def raised(self, name: str) -> Array:
        """Return a norm with 1 added."""
        values = self[name].astype(F32)
        return self.step("+1", name, lambda: values + F32(1), **{"+1 missing": lambda: values})

    def joined(self, names: Sequence[str], axis: int = 0) -> Array:
        """Return several tensors joined in order."""
        parts = [self[name] for name in names]
        return self.step(
            "joined",
            names[0],
            lambda: np.concatenate(parts, axis),
            **{"parts exchanged": lambda: np.concatenate(parts[::-1], axis)},
        )

    def stacked(
        self, names: Sequence[str], change: Callable[[Array], Array] | None = None
    ) -> Array:
        """Return a stack of tensors in order."""
        parts = [change(self[name]) if change else self[name] for name in names]
        return self.step("stacked", names[0], lambda: np.stack(parts),
                         **{"parts moved on": lambda: np.stack(parts[1:] + parts[:1])})  # fmt: skip

    def rest(self, rename: Callable[[str], str]) -> None:
        """Take the remaining tensors as they are, under other names."""
        for name in self.names:
            self.put(rename(name), self[name], name)

    def linear(
        self, rename: Callable[[str], str], pattern: str = r".*\.weight",
        without: str = r".*(embed|wte|wpe|shared|token).*",
    ) -> None:  # fmt: skip
        """Transpose the matrices and convolutions that match, except embeddings."""
        for match in self.matching(pattern):
            name, ndim = match[0], self[match[0]].ndim
            if ndim == 4:
                self.put(rename(name), self.turned(name, (2, 3, 1, 0)), name)
            elif ndim == 3 and "conv" in name:
                self.put(rename(name), self.turned(name, (2, 1, 0)), name)
            elif ndim == 2 and not re.fullmatch(without, name):
                self.put(rename(name), self.turned(name), name)


def interleaved(values: Array, heads: int) -> Array:
    """Return rows with the halves of each head interleaved, as for rotary embeddings."""
    rows = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def renaming(*pairs: tuple[str, str]) -> Callable[[str], str]:
    """Return a function that applies regular expressions in order."""
    patterns = [(re.compile(old), new) for old, new in pairs]

    def rename(name: str) -> str:
        for pattern, new in patterns:
            name = pattern.sub(new, name)
        return name

    return rename


@dataclass(frozen=True)
class Converter:
    """A conversion that can be drawn."""

    name: str
    families: tuple[str, ...]
    convert: Callable[[Conversion], None]
    #: Changes the first model before anything else, such as rounding it to a grid.
    prepare: Callable[[Model], None] | None = None
    #: Architecture of GGUF, if the second model is a file of that format.
    architecture: str = ""
    #: Whether the search of the documentation does not have these layouts.
    is_apart: bool = False
    #: Whether its tensors may not be rounded or quantised any further.
    is_final: bool = False


CONVERTERS: dict[str, Converter] = {}


def converter(
    name: str, *families: str, **options: Any
) -> Callable[[Callable[[Conversion], None]], Callable[[Conversion], None]]:
    """Register a converter for families, or for all of them."""

    def register(convert: Callable[[Conversion], None]) -> Callable[[Conversion], None]:
        CONVERTERS[name] = Converter(name, families or tuple(FAMILIES), convert, **options)
        return convert

    return register
