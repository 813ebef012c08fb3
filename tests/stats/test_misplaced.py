"""Numbers of another tensor explain nothing if the tensor of the place has no partner."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import pytest

from tests.stats.test_claims import F32, Array, Tensors, differing, explained

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 24
ROLES = ("attn.q", "attn.k", "mlp.fc1", "mlp.fc2")


def _values(*shape: int) -> Array:
    rng = np.random.default_rng(sum(shape) + _values.calls)  # type: ignore[attr-defined]
    _values.calls += 1  # type: ignore[attr-defined]
    return rng.standard_normal(shape).astype(F32)


_values.calls = 0  # type: ignore[attr-defined]


def model(layers: int) -> Tensors:
    """Return a model whose matrices have one shape."""
    tensors = {"net.embed.weight": _values(40, WIDTH), "net.head.weight": _values(40, WIDTH)}
    for layer in range(layers):
        for role in ROLES:
            tensors[f"net.layer.{layer}.{role}.weight"] = _values(WIDTH, WIDTH)
            tensors[f"net.layer.{layer}.{role}.bias"] = _values(WIDTH)
        for param in ("weight", "bias"):
            tensors[f"net.layer.{layer}.norm.{param}"] = _values(WIDTH)
    tensors["net.norm.weight"], tensors["net.norm.bias"] = _values(WIDTH), _values(WIDTH)
    return tensors


def _slashes(name: str) -> str:
    return name.replace("net.layer.", "model/h").replace("net.", "model/").replace(".", "/")


def _numbered(name: str) -> str:
    return name.replace("layer.", "layers.layer_").replace("net.norm", "net.ln_f")


SPELLINGS: dict[str, Callable[[str], str]] = {
    "prefix": "module.{}".format,
    "slashes": _slashes,
    "numbered": _numbered,
}
PAIRS = {  # the name in the first model, and the tensor whose numbers it has in the second one
    "another layer": ("net.layer.1.mlp.fc1.weight", "net.layer.0.mlp.fc1.weight"),
    "another role": ("net.layer.0.mlp.fc1.weight", "net.layer.0.mlp.fc2.weight"),
    "both": ("net.layer.1.attn.q.bias", "net.layer.0.mlp.fc2.bias"),
    "a norm": ("net.norm.bias", "net.layer.1.attn.q.bias"),
    "a head": ("net.head.weight", "net.embed.weight"),
}


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("pair", PAIRS)
class TestCopies:
    """Replace a tensor, and the tensor that they copy has other numbers or is missing."""

    @pytest.mark.parametrize("is_missing", [False, True])
    def test_are_no_explanation(
        self, pair: str, spelling: str, layers: int, *, is_missing: bool
    ) -> None:
        ours, spelled = model(layers), SPELLINGS[spelling]
        theirs = {spelled(name): x for name, x in ours.items()}
        replaced, copied = PAIRS[pair]
        theirs[spelled(replaced)] = ours[copied]
        theirs[spelled(copied)] = _values(*ours[copied].shape)
        if is_missing:
            del theirs[spelled(copied)]
        expected = {replaced, copied, spelled(replaced), spelled(copied)} & {*ours, *theirs}
        assert differing(*((ours, theirs) if layers == 2 else (theirs, ours))) == expected


def test_the_first_of_several_modules_of_keras_has_the_number_0() -> None:
    kinds = ("weight_ih", "weight_hh")
    matrices = {(kind, n): _values(4 * WIDTH, WIDTH) for kind in kinds for n in range(5)}
    ours = {f"lstm.{kind}_l{n}": x for (kind, n), x in matrices.items()}
    theirs = {
        f"layers/lstm{f'_{n}' if n else ''}/cell/vars/{kinds.index(kind)}": x.T.copy()
        for (kind, n), x in matrices.items()
    }
    theirs["layers/lstm/cell/vars/1"] = theirs.pop("layers/lstm_2/cell/vars/1")
    expected = {"lstm.weight_hh_l0", "lstm.weight_hh_l2", "layers/lstm/cell/vars/1"}
    assert differing(ours, theirs) == expected


def test_numbers_of_another_tensor_in_the_place_of_a_part_explain_nothing() -> None:
    ours, theirs = model(4), {}
    for name, x in model(4).items():
        theirs[f"net.{name}"] = ours[name] = x
    for layer, param in product(range(4), ("weight", "bias")):
        shape = (WIDTH, WIDTH) if param == "weight" else (WIDTH,)
        parts = {role: _values(*shape) for role in ("query", "key", "value")}
        ours[f"net.layer.{layer}.self.query_key_value.{param}"] = np.concatenate([*parts.values()])
        for role, x in parts.items():
            theirs[f"net.net.layer.{layer}.self.{role}.{param}"] = x
    copied, front = "net.layer.0.mlp.fc2.bias", "net.layer.2.self"
    theirs[f"net.{front}.key.bias"] = theirs.pop(f"net.{copied}")
    parts_of_whole = {f"net.{front}.{role}.bias" for role in ("query", "key", "value")}
    expected = {copied, f"{front}.query_key_value.bias", *parts_of_whole}
    assert differing(ours, theirs) == expected


def _anonymous(name: str) -> str:
    return f"val_{crc32(name.encode()) % 100_000}"


@pytest.mark.parametrize("spelling", [*SPELLINGS.values(), _anonymous])
def test_a_damaged_tensor_accuses_no_other(spelling: Callable[[str], str]) -> None:
    ours = model(3)
    for damaged in ours:
        theirs = {spelling(name): x for name, x in ours.items()}
        theirs[spelling(damaged)] = _values(*ours[damaged].shape)
        outcomes = explained(ours, theirs)
        wrong = {name for name, outcome in outcomes.items() if outcome != "explained"}
        assert wrong == {damaged, spelling(damaged)}


def test_a_missing_norm_of_a_layer_accuses_no_norm_of_the_model() -> None:
    ours = {**model(3), "net.norm.bias": _values(8), "net.norm.weight": _values(WIDTH)}
    spellings = {"net.norm": "net.decoder.final_norm", "layer": "decoder.block"}
    theirs: Tensors = {}
    for name, x in ours.items():
        for old, new in spellings.items():
            name = name.replace(old, new)  # noqa: PLW2901
        theirs[name] = x
    del theirs["net.decoder.block.1.norm.weight"]
    assert differing(ours, theirs) == {"net.layer.1.norm.weight"}


def test_tensors_exchanged_between_the_models_of_text_and_images_are_named() -> None:
    """One of the two models has a name that both sides know, without its component."""
    rng = np.random.default_rng(0)
    ours: Tensors = {}
    for component in ("text_model.roberta", "vision_model"):
        for layer, role in product(range(2), ("mlp.fc1", "mlp.fc2", "self_attn.q_proj")):
            name = f"{component}.encoder.layers.{layer}.{role}.weight"
            ours[name] = rng.standard_normal((24, 24)).astype(F32)
    theirs = {name.replace("layers", "layer"): x for name, x in ours.items()}
    pair = [f"{c}.encoder.layer.0.mlp.fc2.weight" for c in ("vision_model", "text_model.roberta")]
    theirs[pair[0]], theirs[pair[1]] = theirs[pair[1]], theirs[pair[0]]
    assert differing(ours, theirs) == {*pair, *(name.replace("layer", "layers") for name in pair)}
