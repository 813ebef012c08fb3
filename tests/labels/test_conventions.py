"""Tensors match across naming conventions, and codes are recognised by their scales."""

from __future__ import annotations

from xckpt.labels.conventions import match_names

# Names of codes, their element type, and the name of their scales.


def test_gamma_and_beta_match_weight_and_bias() -> None:
    ours = ["params/encoder/layers_3/norm/gamma", "params/encoder/layers_3/norm/beta"]
    theirs = ["params/encoder/layers_3/norm/weight", "params/encoder/layers_3/norm/bias"]
    pairs = zip(ours, theirs, strict=True)
    assert list(match_names(ours, theirs)) == [(*pair, "burn") for pair in pairs]
