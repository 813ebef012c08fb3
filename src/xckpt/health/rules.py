"""The rules of `findings`, in the order in which they are listed.

A rule is a class with a name, a severity, the roles of the tensors it applies to, its thresholds,
and the sentence that explains a finding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.health.channels import (
    DeadColumns,
    DeadExperts,
    DeadHeads,
    DeadRows,
    EqualRows,
    EqualTokens,
    OutlierChannels,
    RankOne,
)
from xckpt.health.code_ranges import NarrowCodes, SaturatedCodes
from xckpt.health.elements import (
    AllZero,
    Constant,
    Empty,
    Executes,
    Exploding,
    Imports,
    Infinite,
    LoneElement,
    NaN,
    Subnormal,
    Untrained,
    WideType,
)
from xckpt.health.equal_tensors import CopiedLayer, Duplicated, EqualExperts, Tied
from xckpt.health.runs import IdenticalStep, StoppedChanging, UnlikeStep
from xckpt.health.siblings import (
    DeadGains,
    Hole,
    MixedTypes,
    NegativeNorm,
    SignsLost,
    UnlikeLayer,
    ZeroCentredNorm,
)
from xckpt.health.statistics import (
    NegativeMoment,
    NegativeStatistic,
    OddScale,
    OddStep,
    UnlikeStatistic,
)

if TYPE_CHECKING:
    from xckpt.health.evidence import Rule

#: Every rule by its name, in the order in which findings of one tensor are listed.
RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Executes(), Imports(), Empty(), NaN(), Infinite(), AllZero(), Untrained(), Constant(),
        Exploding(), LoneElement(),
        NegativeStatistic(), UnlikeStatistic(), OddScale(), NegativeMoment(), OddStep(),
        SignsLost(), Hole(), EqualRows(), EqualTokens(), RankOne(),
        DeadRows(), DeadColumns(), DeadHeads(), DeadExperts(),
        ZeroCentredNorm(), DeadGains(), NegativeNorm(), UnlikeLayer(), OutlierChannels(),
        Subnormal(), WideType(), MixedTypes(), NarrowCodes(), SaturatedCodes(),
        Tied(), Duplicated(), EqualExperts(), CopiedLayer(),
        IdenticalStep(), UnlikeStep(), StoppedChanging(),
    )
}  # fmt: skip
