"""A tensor that a file names as tied to another one, instead of storing it, is compared with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import xckpt
from xckpt.cli import main

if TYPE_CHECKING:
    from pathlib import Path

W, V = np.arange(32, dtype="f4").reshape(8, 4), np.ones(3, "f4")


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """A file with both tied tensors, and one as `safetensors.torch.save_model` writes it."""
    both, one = tmp_path / "both.safetensors", tmp_path / "one.safetensors"
    save_file({"lm_head.weight": W, "wte.weight": W, "v": V}, both)
    metadata = {"wte.weight": "lm_head.weight", "format": "pt", "gone": "v"}
    save_file({"lm_head.weight": W, "v": V}, one, metadata=metadata)
    return [both, one]


@pytest.mark.parametrize("order", [1, -1], ids=["in a", "in b"])
@pytest.mark.parametrize("options", [{}, {"names": "auto"}, {"explain": True}], ids=str)
def test_it_is_the_same(paths: list[Path], order: int, options: Any) -> None:
    table = xckpt.compare(*paths[::order], progress=False, **options).ckpt.table()
    assert set(table["status"]) == {"same"}
    assert table.loc["wte.weight", ["other_name", "matched_by"]].to_list() == [
        "lm_head.weight",
        "tied",
    ]
    assert table.loc["lm_head.weight", "matched_by"] == "name"


@pytest.mark.parametrize("order", [1, -1], ids=["in a", "in b"])
def test_it_is_no_new_name(paths: list[Path], order: int) -> None:
    names = xckpt.compare(*paths[::order], progress=False).ckpt.names
    assert names == {"lm_head.weight": "lm_head.weight", "v": "v"}


@pytest.mark.parametrize("order", [1, -1], ids=["in a", "in b"])
def test_another_value_is_a_change(paths: list[Path], order: int) -> None:
    save_file({"lm_head.weight": W, "wte.weight": W + 1, "v": V}, paths[0])
    table = xckpt.compare(*paths[::order], progress=False).ckpt.table()
    assert table.loc["wte.weight", ["status", "max_abs"]].to_list() == ["changed", 1]


def test_other_metadata_state_nothing(paths: list[Path]) -> None:
    save_file({"lm_head.weight": W, "v": V}, paths[1], metadata={"wte.weight": "no such tensor"})
    table = xckpt.compare(*paths, progress=False).ckpt.table()
    assert table.loc["wte.weight", "status"] == "only_a"
    assert "matched_by" not in table


def test_the_command_line(paths: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *map(str, paths)]) == 0
    assert "only" not in capsys.readouterr().out


class TestOmittedHead:
    """An output layer that one side omits, because the model ties it to the embeddings."""

    @pytest.fixture
    def model(self) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (64, 16),
            "model.norm.weight": (16,),
        }
        for layer in range(4):
            for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj"):
                shapes[f"model.layers.{layer}.{name}.weight"] = (16, 16)
        return {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}

    @pytest.mark.parametrize("order", [1, -1], ids=["in a", "in b"])
    @pytest.mark.parametrize("prefix", ["", "module."], ids=["same names", "renamed"])
    def test_it_is_explained(self, model: dict[str, Any], order: int, prefix: str) -> None:
        a = model | {"lm_head.weight": model["model.embed_tokens.weight"].copy()}
        b = {prefix + name: values for name, values in model.items()}
        result = xckpt.compare(*[a, b][::order], explain=True, progress=False)
        row = result.ckpt.table().loc["lm_head.weight"]
        assert (row["outcome"], row["cause"]) == ("explained", "tied")
        assert row["other_names"] == prefix + "model.embed_tokens.weight"
        assert result.attrs["explanation"].startswith("all ")

    def test_damaged_embeddings_explain_no_head(self, model: dict[str, Any]) -> None:
        a = model | {"lm_head.weight": model["model.embed_tokens.weight"].copy()}
        b = model | {"model.embed_tokens.weight": model["model.embed_tokens.weight"] + 1}
        table = xckpt.compare(a, b, explain=True, progress=False).ckpt.table()
        assert table.loc["lm_head.weight", "outcome"] == "unmatched"

    def test_a_copy_of_another_tensor_is_unmatched(self, model: dict[str, Any]) -> None:
        a = model | {"extra.weight": model["model.embed_tokens.weight"].copy()}
        table = xckpt.compare(a, model, explain=True, progress=False).ckpt.table()
        assert table.loc["extra.weight", "outcome"] == "unmatched"


class TestCopies:
    """Copies that a file stores of a tensor, because the model has two names for it."""

    def test_of_an_embedding_are_explained(self) -> None:
        """`state_dict()` of T5 has its embeddings three times."""
        rng = np.random.default_rng(1)
        base, attention = "{}.block.{}.layer.0.", ("q", "k", "v", "o")
        ours = {"shared.weight": rng.standard_normal((40, 16)).astype("f4")}
        for stack, layer in (("encoder", 0), ("encoder", 1), ("decoder", 0), ("decoder", 1)):
            front = base.format(stack, layer)
            ours[f"{front}layer_norm.weight"] = rng.standard_normal(16).astype("f4")
            for name in attention:
                values = rng.standard_normal((16, 16)).astype("f4")
                ours[f"{front}SelfAttention.{name}.weight"] = values
        copies = {f"{n}.embed_tokens.weight": ours["shared.weight"] for n in ("encoder", "decoder")}
        table = xckpt.compare(ours, ours | copies, explain=True, progress=False).ckpt.table()
        assert set(table["outcome"]) == {"explained"}
        assert set(table.loc[list(copies), "cause"]) == {"tied"}

    def test_of_the_same_bytes_are_explained(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        ours = {"head.bias": torch.randn(16), "head.weight": torch.randn(8, 16)}
        torch.save(ours, tmp_path / "a.pt")
        torch.save(ours | {"head.decoder.bias": ours["head.bias"]}, tmp_path / "b.pt")
        paths = tmp_path / "a.pt", tmp_path / "b.pt"
        table = xckpt.compare(*paths, explain=True, progress=False).ckpt.table()
        assert table.loc["head.decoder.bias", ["outcome", "cause"]].to_list() == [
            "explained",
            "tied",
        ]
        torch.save(ours | {"head.decoder.bias": ours["head.bias"].clone()}, paths[1])
        table = xckpt.compare(*paths, explain=True, progress=False).ckpt.table()
        assert table.loc["head.decoder.bias", "outcome"] == "unmatched"
