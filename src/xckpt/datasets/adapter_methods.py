"""Methods of adapters, as configs and names of tensors state them.

LoRA and DoRA are supported: their update is ``scale * B @ A``. Every other method is recognised by
``peft_type`` in ``adapter_config.json``, or by words in the names of tensors that only this method
writes. Methods whose update follows from the file have a formula (`FORMULAS`); results name others.

References: peft 0.21.2, `utils/peft_types.py` and `tuners/*`; lycoris-lora 4.1.3, `modules/*`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import shown, some
from xckpt.quantization.model import is_match

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Shape = tuple[int, ...]

#: Beginning of the names of kohya and LyCORIS, which have underscores instead of dots.
FLAT_PREFIX = re.compile(r"(lora_(unet|te[0-9]*|transformer|prior_unet|prior_te)|lycoris)_")

_MERGE = "merge them into the model first, with the library that wrote them"
_NO_MERGE = "they cannot be merged into weights"
_OTHER = "the update is another function than scale * B @ A"


@dataclass(frozen=True, slots=True)
class Method:
    """A method whose adapters are unsupported."""

    name: str
    # Words between dots in names of tensors that no model and no other method has.
    words: tuple[str, ...] = ()
    # Beginning of all words of the method, once the file or its config states the method.
    prefix: str = ""
    update: str = _OTHER
    remedy: str = _MERGE

    @property
    def note(self) -> str:
        """Why its adapters are unsupported, and what to do."""
        return f"{self.name} adapters are unsupported: {self.update}; {self.remedy}"


def _pair(name: str, prefix: str, *ends: str, update: str = _OTHER, remedy: str = _MERGE) -> Method:
    return Method(name, tuple(f"{prefix}{end}" for end in ends), prefix, update, remedy)


def _prompt(name: str) -> Method:
    update = "trained inputs stand before those of the model"
    return Method(name, update=update, remedy=_NO_MERGE)


_SHARED_FACTORS = "all modules share random factors"
_ROTATION = "the weight is multiplied by a rotation"
_VECTOR = "activations are multiplied by a vector"
_COEFFICIENTS = "the update is a transform of a few coefficients"

#: By `peft_type`. Bone is the earlier name of MiSS.
_METHODS = {
    "LOHA": _pair(
        "LoHa", "hada_", "w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2",
        update="the update is the elementwise product of two products",
    ),
    "LOKR": _pair(
        "LoKr", "lokr_", "w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t1", "t2",
        update="the update is a Kronecker product",
    ),
    "IA3": _pair("(IA)³", "ia3_", "l", update=_VECTOR),
    "VERA": _pair("VeRA", "vera_", "lambda_b", "lambda_d", update=_SHARED_FACTORS),
    "PVERA": _pair("PVeRA", "pvera_", "lambda_b", "lambda_d", update=_SHARED_FACTORS),
    "ADALORA": Method(
        "AdaLoRA", ("lora_E",), "lora_", "a vector of singular values stands between the factors"
    ),
    "OFT": _pair("OFT", "oft_", "R", "r", "blocks", update=_ROTATION),
    "BOFT": _pair("BOFT", "boft_", "R", "s", update=_ROTATION),
    "PSOFT": _pair("PSOFT", "psoft_", "R", update=_ROTATION),
    "HRA": _pair("HRA", "hra_", "u", update=_ROTATION),
    "ROAD": _pair("RoAd", "road_", "theta", update=_ROTATION),
    "FOURIERFT": _pair("FourierFT", "fourierft_", "spectrum", update=_COEFFICIENTS),
    "WAVEFT": _pair("WaveFT", "waveft_", "spectrum", update=_COEFFICIENTS),
    "C3A": _pair("C3A", "c3a_", "kernel", update="the update is a circular convolution"),
    "VBLORA": _pair("VB-LoRA", "vblora_", "logits_A", "logits_B"),
    "UNILORA": _pair("Uni-LoRA", "unilora_", "theta_d"),
    "TINYLORA": _pair("TinyLoRA", "tinylora_", "P"),
    "RANDLORA": _pair("RandLoRA", "randlora_", "lambda", "gamma", update=_SHARED_FACTORS),
    "FROD": _pair("FRoD", "frod_", "lambda_l", "lambda_s_values"),
    "MISS": _pair("MiSS", "miss_", "block"),
    "BONE": _pair("Bone", "bone_", "block"),
    "LN_TUNING": _pair(
        "LN tuning", "ln_tuning_", "layers", update="they replace norms"
    ),
    "TRAINABLE_TOKENS": _pair(
        "Trainable-token", "trainable_tokens_", "delta", update="they replace rows of an embedding"
    ),
    "SHIRA": _pair("SHiRA", "shira_", "weight", "indices", update="the update is sparse"),
    "DELORA": _pair("DeLoRA", "delora_", "lambda", "w_norm"),
    "GRALORA": _pair("GraLoRA", "gralora_", "A", "B", update="blocks have products of their own"),
    "GLORA": _pair("GLoRA", "glora_", "A", "B", "C", "D", "E"),
    "HIRA": _pair("HiRA", "hira_", "A", "B", update="the weight is multiplied by a product"),
    "LILY": _pair("Lily", "lily_", "router", remedy=_NO_MERGE),
    "POLY": _pair(
        "Poly", "poly_", "lora_A", "lora_B", "router", update="they route inputs", remedy=_NO_MERGE
    ),
    "XLORA": Method("X-LoRA", update="they mix several adapters by input", remedy=_NO_MERGE),
    "BEFT": _pair("BEFT", "beft_", "bias"),
    "DEFT": _pair("DEFT", "deft_", "P", "R"),
    "PEANUT": _pair("PEANuT", "peanut_", "A", "B"),
    "ADAMSS": _pair("AdaMSS", "adamss_"),
    "OSF": _pair("OSF", "osf_"),
    "PROMPT_TUNING": _prompt("Prompt tuning"),
    "MULTITASK_PROMPT_TUNING": _prompt("Multitask prompt tuning"),
    "P_TUNING": _prompt("P-tuning"),
    "PREFIX_TUNING": _prompt("Prefix tuning"),
    "CPT": _prompt("CPT"),
    "ADAPTION_PROMPT": _prompt("Adaption prompt"),
    "CARTRIDGE": _prompt("Cartridge"),
}  # fmt: skip
# Variants of LoRA that have no `peft_type`.
_KASA = Method("KaSA", ("lora_diag",), update="a diagonal stands between the factors")
_TUCKER = Method("LoRA with Tucker decomposition", ("lora_mid",), update="they have a third factor")
_BY_WORD = {
    word: method for method in (*_METHODS.values(), _KASA, _TUCKER) for word in method.words
}
# Words of LyCORIS that models have as well.
_BY_COMMON_WORD = {
    **dict.fromkeys(("diff", "diff_b"), Method("Full", update="they hold differences of weights")),
    **dict.fromkeys(("w_norm", "b_norm"), Method("Norm", update="they hold differences of norms")),
    **dict.fromkeys(("a1", "a2", "b1", "b2", "bm"), _METHODS["GLORA"]),
    **dict.fromkeys(("lambda_layer", "q_layer", "p_layer"), Method("T-LoRA")),
    "on_input": _METHODS["IA3"],
}
_WORDS = _BY_WORD.keys() | _BY_COMMON_WORD.keys()
# Initial values of factors that PEFT subtracts from the weights of the base model.
_SUBTRACTED = {
    "pissa": "PiSSA", "olora": "OLoRA", "corda": "CorDA", "loftq": "LoftQ", "lora_ga": "LoRA-GA",
}  # fmt: skip
_OPTIONS = (
    "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
# Parameters of experts, in the order in which transformers defines them.
_OF_EXPERTS = (
    "gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias",
)  # fmt: skip
_MOST_WORDS = 4  # from the end of a name
_MOST_MODULES = 64  # inside each other
_ALL = "all-linear"  # target_modules of any name
_LAYER = re.compile(r".*?\.[^.]*\.(\d{1,9})\.")  # the first number, as PEFT finds it


def method_of_config(config: Mapping[str, Any] | None) -> Method | None:
    """Return the unsupported method that a config states; None if it is LoRA or not stated."""
    stated = (config or {}).get("peft_type")
    if not isinstance(stated, str) or stated.upper() == "LORA":
        return None
    return _METHODS.get(stated.upper()) or Method(shown(stated))


def method_of_name(name: str, prefixes: Mapping[str, Method]) -> tuple[str, Method] | None:
    """Return the module of a tensor and the unsupported method that writes such a name.

    `prefixes` has the methods that the file or its config states, by the prefix of their words.
    """
    words = name.rsplit(".", _MOST_WORDS)
    if not prefixes and _WORDS.isdisjoint(words):
        return None
    is_flat = FLAT_PREFIX.match(name) is not None
    for position, word in enumerate(words):
        method = _BY_WORD.get(word) or (_BY_COMMON_WORD.get(word) if is_flat else None)
        if method is None:
            method = next((m for prefix, m in prefixes.items() if word.startswith(prefix)), None)
        if method is not None:
            return ".".join(words[:position]), method
    return None


def problem_of_options(config: Mapping[str, Any]) -> str:
    """Return why the options of a LoRA config are unsupported; empty if they are supported."""
    used = next((name for name in _OPTIONS if config.get(name)), None)
    if used is not None:
        return f"the option {used} is unsupported; {_MERGE}"
    if config.get("kasa_config"):
        return _KASA.note
    init = config.get("init_lora_weights")
    name = _SUBTRACTED.get(init.partition("_niter_")[0].lower()) if isinstance(init, str) else None
    if name is None:
        return ""
    return Method(
        name,
        update="their initial factors were subtracted from the base model",
        remedy="merge them into it first, or save them with PEFT's "
        "path_initial_model_for_weight_conversion",
    ).note


class Targets:
    """The modules and parameters that a LoRA config of PEFT names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        modules, parameters = config.get("target_modules"), config.get("target_parameters")
        self._modules = modules if isinstance(modules, str) else frozenset(_texts(modules))
        layers = None if config.get("layers_pattern") else config.get("layers_to_transform")
        layers = layers if isinstance(layers, list) else [layers]
        self._layers = {layer for layer in layers if isinstance(layer, int)}
        # Names by the ends of their modules; names without a module have the end "".
        self._parameters: dict[str, list[str]] = {}
        for path in _texts(parameters):
            module, _, name = path.rpartition(".")
            self._parameters.setdefault(module, []).append(name)

    def parameters_of(self, module: str, count: int) -> tuple[str, ...] | None:
        """Return `count` parameters of a module that PEFT adapts, in the order of their definition.

        Empty if the module is adapted as a whole; None if its parameters are unknown.
        """
        ends = _ends(module)
        if not self._parameters or self._has_module(module, ends):
            return ()
        names = dict.fromkeys(name for end in ends for name in self._parameters.get(end, ()))
        unplaced = self._parameters.get("", [])
        if not names and not unplaced:
            return ()
        if len(names) != count:
            names |= dict.fromkeys(name for name in unplaced if name in _OF_EXPERTS)
        if len(names) != count or (count > 1 and not names.keys() <= set(_OF_EXPERTS)):
            return None
        return tuple(sorted(names, key=_OF_EXPERTS.index) if count > 1 else names)

    def omits(self, module: str) -> bool:
        """Return whether PEFT does not adapt a module, although the file may have its factors."""
        if not self._modules or self._modules == _ALL:
            return False
        if isinstance(self._modules, str):
            return is_match(f"{self._modules}$", module) is False
        layer = _LAYER.match(module) if self._layers else None
        is_other_layer = layer is not None and int(layer[1]) not in self._layers
        return is_other_layer or not self._has_module(module, _ends(module))

    def problem_of(self, module: str) -> str:
        """Return why the adapters of unknown parameters of a module are unsupported."""
        names = [
            f"{path}.{name}" if path else name
            for path, of_path in self._parameters.items()
            for name in of_path
        ]
        stated = f" ({some(names)})" if names else ""
        return (
            f"the option target_parameters is unsupported for {shown(module)}: which of its "
            f"parameters are adapted is unknown{stated}; {_MERGE}"
        )

    def _has_module(self, module: str, ends: Sequence[str]) -> bool:
        if isinstance(self._modules, str):
            return is_match(f"{self._modules}$", module) is True
        return not self._modules.isdisjoint(ends)


def _texts(value: Any) -> list[str]:
    return [str(text) for text in (value if isinstance(value, list) else [value] if value else [])]


def _ends(name: str) -> list[str]:
    """Return the ends of a dotted name, from the whole name to its last word."""
    words = name.split(".")[-_MOST_MODULES:]
    return [".".join(words[first:]) for first in range(len(words))]


def fits_pattern(pattern: str, name: str) -> bool | None:
    """Return whether PEFT applies a pattern to a name; None if matching could take long."""
    if pattern.startswith("^"):
        return is_match(f"{pattern}$", name)
    matches = [is_match(f"{pattern}$", end) for end in _ends(name)]
    return None if None in matches else any(matches)


# --- formulas ------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """A number by which an update is multiplied."""

    alpha: float | None = None
    scale: float | None = None
    #: Reason for a missing scale.
    note: str = ""


@dataclass(frozen=True, slots=True)
class Formula:
    """The tensors from which an update follows, by the ends of their names."""

    method: str
    kind: str
    names: frozenset[str]
    has_scale: bool = True
    #: Key of alpha in the config.
    alpha: str = "alpha"
    #: Number that is added to the rank by which alpha is divided.
    divisor: float = 0.0

    def scale(self, alpha: float, rank: int, *, is_root: bool = False) -> Scale:
        """Return alpha divided by the rank, or by its root; no scale if alpha is NaN."""
        if math.isnan(alpha):
            return Scale(note="alpha is not a number")
        return Scale(alpha, alpha / ((math.sqrt(rank) if is_root else rank) + self.divisor))

    def shape_and_rank(self, shapes: Mapping[str, Shape]) -> tuple[Shape, int | None]:
        """Return the shape of the update as a matrix, and the rank.

        The shape is empty if the tensors do not fit each other.
        """
        factors, ranks = [], set()
        for whole, left, right in _MATRICES[self.kind]:
            names = [whole] if whole in shapes else [left, right]
            matrices = [(shapes[n][0], math.prod(shapes[n][1:])) for n in names if shapes[n]]
            if len(matrices) != len(names) or any(0 in matrix for matrix in matrices):
                return (), None
            (rows, inner), (rank, columns) = matrices[0], matrices[-1]
            if whole not in shapes:
                ranks.add(rank)
                if inner != rank:
                    return (), None
            factors.append((rows, columns if whole not in shapes else inner))
        if self.kind == "adalora" and math.prod(shapes["lora_E"]) not in ranks:
            return (), None
        if self.kind == "lokr":
            (a, b), (c, d) = factors
            factors = [(a * c, b * d)]
        fits = len(set(factors)) == 1 and (len(ranks) < 2 or self.kind == "lokr")
        return (factors[0], min(ranks, default=None)) if fits else ((), None)


# By kind: matrices of the update, as a whole or as two factors.
_MATRICES = {
    "loha": (("", "hada_w1_a", "hada_w1_b"), ("", "hada_w2_a", "hada_w2_b")),
    "lokr": (("lokr_w1", "lokr_w1_a", "lokr_w1_b"), ("lokr_w2", "lokr_w2_a", "lokr_w2_b")),
    "adalora": (("", "lora_B", "lora_A"),),
    "ia3": (("ia3_l", "", ""),),
    "rows": (("trainable_tokens_delta", "", ""),),
}


def _formula(method: str, kind: str, *names: str, **options: Any) -> Formula:
    return Formula(method, kind, frozenset(names), **options)


LORA = _formula("LoRA", "lora", alpha="lora_alpha")
_LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
_PARTS_OF_LOKR = [
    (*w1, *w2)
    for w1 in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
    for w2 in (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))
]
#: One for each set of tensors.
FORMULAS = (
    _formula("LoHa", "loha", *_LOHA),
    *[_formula("LoKr", "lokr", *names) for names in _PARTS_OF_LOKR],
    # PEFT adds 1e-5 to the rank.
    _formula("AdaLoRA", "adalora", "lora_A", "lora_B", "lora_E", alpha="lora_alpha", divisor=1e-5),
    _formula("(IA)³", "ia3", "ia3_l", has_scale=False),
    _formula("Trainable-token", "rows", "trainable_tokens_delta", has_scale=False),
)
