"""Programs of TorchScript: their attributes are values, and the weights of frozen ones are read."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.formats.torch_files import (
    called,
    mapping,
    name,
    number,
    pickled,
    several,
    text,
    whole,
    zipped,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

W, B = np.arange(6, dtype="f4").reshape(2, 3), np.array([1, 2], "f4")
FALSE, NONE = b"\x89", b"N"
FLAGS = {"training": FALSE, "_is_full_backward_hook": NONE}


def module(kind: str, state: Mapping[str, bytes]) -> bytes:
    """Write an instance of a class of TorchScript."""
    return name(f"__torch__.{kind}", "Module") + b")\x81" + mapping(state) + b"b"


def listed(*values: bytes) -> bytes:
    return b"](" + b"".join(values) + b"e"


def typed(function: str, *args: bytes) -> bytes:
    return called(name("torch.jit._pickle", function), *args)


def program(value: bytes, constants: bytes, members: Mapping[str, bytes]) -> bytes:
    files = {"m/data.pkl": pickled(value), "m/constants.pkl": pickled(constants)}
    return zipped({**files, **members, "m/code/__torch__.py": b"pass", "m/version": b"3\n"})


def test_lists_and_mappings_are_values_and_flags_of_modules_are_left_out() -> None:
    inner = module("fc", {**FLAGS, "weight": whole("0", W), "scale": number(3)})
    state = {
        **FLAGS,
        "sample_rates": typed("build_intlist", listed(number(8000), number(16000))),
        "flags": typed("build_boollist", listed(FALSE, b"\x88")),
        "names": typed("restore_type_tag", listed(text("a"), text("b")), text("List[str]")),
        "sizes": typed("restore_type_tag", mapping({"a": number(1)}), text("Dict[str, int]")),
        "parts": typed("build_tensorlist", listed(whole("1", B))),
        "_hidden": whole("1", B),
        "fc": inner,
    }
    data = {"m/data/0": W.tobytes(), "m/data/1": B.tobytes()}
    ds = xckpt.open(program(module("top", state), b")", data))
    assert ds.attrs == {
        "training": False,
        "sample_rates": [8000, 16000],
        "flags": [False, True],
        "names": ["a", "b"],
        "sizes.a": 1,
        "fc.scale": 3,
    }
    assert list(ds) == ["parts.0", "_hidden", "fc.weight"]
    np.testing.assert_array_equal(ds["fc.weight"], W)


@pytest.mark.parametrize("state", [{}, FLAGS, {"bias": whole("0", B)}])
def test_constants_of_a_frozen_program_are_read(state: dict[str, bytes]) -> None:
    constants = several(whole("0", W), whole("1", B))
    members = {"m/data/0": B.tobytes(), "m/constants/0": W.tobytes(), "m/constants/1": B.tobytes()}
    ds = xckpt.open(program(module("top", state), constants, members))
    names = [*(key for key in state if key not in FLAGS), "constants.0", "constants.1"]
    assert list(ds) == names
    np.testing.assert_array_equal(ds["constants.0"], W)
    np.testing.assert_array_equal(ds["constants.1"], B)


@pytest.mark.parametrize("constants", [b"K\1", b"(", whole("9", B), b"cos\nsystem\n(X\1\0\0\0xtR"])
def test_damaged_constants_are_errors_of_the_package(constants: bytes) -> None:
    data: Any = program(
        module("top", {"bias": whole("0", B)}), constants, {"m/data/0": B.tobytes()}
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", xckpt.CheckpointWarning)  # of missing members
            ds = xckpt.open(data)
    except xckpt.CheckpointError as error:
        assert error.offset is not None  # noqa: PT017
    else:
        np.testing.assert_array_equal(ds["bias"], B)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # of files that exist all the same
def test_torch_writes_such_programs() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    linear = torch.nn.Linear(3, 2).eval()
    file = io.BytesIO()
    torch.jit.save(torch.jit.freeze(torch.jit.script(linear)), file)
    ds = xckpt.open(file.getvalue())
    arrays = [ds[key].values for key in ds if str(key).startswith("constants.")]
    for value in (linear.weight, linear.bias):
        assert any(np.array_equal(array, value.detach().numpy()) for array in arrays)
