"""Stable ids of tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.identity import base_id, next_namespace, param_key, stable_id

if TYPE_CHECKING:
    from pathlib import Path

# From github.com/Lallapallooza/gpt.rs: the bytes of an id as stored, and the key in namespace 1.
VECTORS = {
    "tok_embeddings.weight": (
        "7e7feacfe1ddb49f69ba6d05e7ec9ee6",
        "3372a319cf42856b2b62774033edae5e",
    ),
    "lm_head": ("585d23eebd91ff137aef590d2ec762a9", "bc874dba78a0af10e0bf65eac431acd0"),
    "": ("af1349b9f5f9a1a6a0404dea36dcc949", "6c63f592967a668fd6c5f58e1158f1b1"),
    "x" * 1025: ("71b7ce25ca2144dcf4d7ed561d8a526b", "a650557660c66bb66e23ce29c941be6c"),
}


@pytest.mark.parametrize("name", VECTORS)
def test_ids_are_those_of_gpt_rs(name: str) -> None:
    stored, key = VECTORS[name]
    number = base_id(name)
    assert number.to_bytes(16, "little").hex() == stored
    assert f"{param_key(1, number):032x}" == key
    assert stable_id(1, name) == param_key(1, number)


def test_names_without_an_id() -> None:
    with pytest.raises(ValueError, match="ASCII"):
        base_id("poids.été")
    for namespace, number in ((-1, 0), (0, -1), (2**128, 0), (0, 2**128)):
        with pytest.raises(OverflowError):
            param_key(namespace, number)
    assert param_key(2**128 - 1, 2**128 - 1) < 2**128


@given(st.text(st.characters()), st.text(st.characters()), st.integers(0, 2**128 - 1))
def test_every_name_has_a_stable_id(name: str, other_name: str, namespace: int) -> None:
    assert (stable_id(namespace, name) == stable_id(namespace, other_name)) == (name == other_name)
    assert stable_id(namespace, name) != stable_id(namespace ^ 1, name)
    assert stable_id(1, "\ud800") != stable_id(1, "?")


def test_namespaces_of_many_threads_differ() -> None:
    with ThreadPoolExecutor(8) as pool:
        given_out = list(pool.map(lambda _: next_namespace(), range(2000)))
    assert len(set(given_out)) == 2000


def test_the_first_namespace_is_1() -> None:
    code = "from xckpt.identity import next_namespace; print(next_namespace(), next_namespace())"
    run = [sys.executable, "-c", code]
    output = subprocess.run(run, capture_output=True, check=True, text=True)  # noqa: S603  our own
    assert output.stdout.split() == ["1", "2"]


def test_golden_ids(golden: Path) -> None:
    vectors = json.loads((golden / "gptrs" / "base_id_vectors.json").read_text("utf-8"))
    assert len(vectors) == 21
    for vector in vectors:
        number = base_id(vector["name"])
        assert f"{number:032x}" == vector["base_id_hex"]
        assert number.to_bytes(16, "little").hex() == vector["le_bytes"]
        for namespace, column in ((0, "key_ns0"), (1, "key_ns1"), (2**127 + 5, "key_ns_2^127+5")):
            assert f"{param_key(namespace, number):032x}" == vector[column]
