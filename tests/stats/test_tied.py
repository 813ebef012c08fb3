"""A tensor that a file names as tied to another one, instead of storing it, is compared with it."""

from __future__ import annotations

from itertools import product
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


@pytest.mark.parametrize("order", [1, -1], ids=["in a", "in b"])
@pytest.mark.parametrize("explain", [False, True])
def test_of_one_memory(paths: list[Path], order: int, explain: bool) -> None:
    model = {"wte.weight": W, "lm_head.weight": W, "v": V}
    save_file({"wte.weight": W, "v": V}, paths[0])
    sides = _ordered(model, paths[0], order)
    options: Any = {"explain": explain, "progress": False}
    table = xckpt.compare(*sides, **options).ckpt.table()
    row = ["same", "wte.weight", "tied"]
    assert table.loc["lm_head.weight", ["status", "other_name", "matched_by"]].to_list() == row
    if explain:
        assert table.loc["lm_head.weight", ["outcome", "cause"]].to_list() == ["explained", "tied"]
    save_file({"wte.weight": W + 1, "v": V}, paths[0])
    table = xckpt.compare(*sides, **options).ckpt.table()
    assert table.loc[["lm_head.weight", "wte.weight"], "status"].to_list() == ["changed"] * 2
    # A model that states no tie lacks the head.
    folder = paths[0].parent / "untied"
    folder.mkdir()
    paths[0].rename(folder / "model.safetensors")
    config = '{"model_type": "gpt2", "tie_word_embeddings": false}'
    (folder / "config.json").write_text(config)
    table = xckpt.compare(*_ordered(model, folder, order), **options).ckpt.table()
    assert table.loc["lm_head.weight", "status"].startswith("only_")


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


class TestStoredHead:
    """An output layer that both sides store beside the embeddings that it is equal to."""

    @pytest.mark.parametrize("order", [1, -1], ids=["in b", "in a"])
    @pytest.mark.parametrize("damaged", ["tok_embeddings.weight", "output.weight"])
    @pytest.mark.parametrize("damage", ["cut", "one element", "another", "reversed"])
    @pytest.mark.parametrize("names", [None, "auto"])
    def test_is_not_paired_with_damaged_embeddings(
        self, names: Any, damage: str, damaged: str, order: int
    ) -> None:
        rng = np.random.default_rng(2)
        table = rng.standard_normal((40, 16)).astype("f4")
        ours = {"model.embed_tokens.weight": table, "lm_head.weight": table.copy()}
        theirs = {"tok_embeddings.weight": table, "output.weight": table.copy()}
        names_of = {f"self_attn.{role}_proj": f"attention.w{role}" for role in "qkvo"}
        names_of |= {"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3"}
        for (first, second), n in product(names_of.items(), range(4)):
            values = rng.standard_normal((16, 16)).astype("f4")
            ours[f"model.layers.{n}.{first}.weight"] = values
            theirs[f"layers.{n}.{second}.weight"] = values
        changed = table.copy()
        changed[3, 5] += 1
        theirs[damaged] = {
            "cut": table[:35],
            "one element": changed,
            "another": rng.standard_normal((40, 16)).astype("f4"),
            "reversed": table[::-1].copy(),
        }[damage]
        pairs = dict(zip(ours, theirs, strict=False))
        compared = explained(*_ordered(ours, theirs, order), names=names)
        for pair in pairs.items():
            name, other = _ordered(*pair, order)
            if damaged not in pair:
                assert compared.loc[name, ["outcome", "other_names"]].to_list() == [
                    "explained",
                    other,
                ]
            elif damaged in compared.index:
                assert compared.loc[damaged, "outcome"] != "explained"


class TestCopies:
    """Copies that a file stores of a tensor, because the model has two names for it."""

    @pytest.mark.parametrize("prefix", ["", "module."])
    def test_of_an_embedding_are_explained(self, prefix: str) -> None:
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
        theirs = {prefix + name: values for name, values in (ours | copies).items()}
        table = explained(ours, theirs)
        assert set(table["outcome"]) == {"explained"}
        assert set(table.loc[[prefix + name for name in copies], "cause"]) == {"tied"}

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


class TestCopiesOfOtherLayers:
    """A conversion replaced a tensor by the one of another layer."""

    LEAVES = ("norm1.bias", "norm2.bias", "conv1.weight", "conv1.bias")

    def sides(self, first: str, second: str) -> tuple[dict[str, Any], dict[str, Any]]:
        rng = np.random.default_rng(3)
        ours, theirs = {}, {}
        for n in range(2):
            for leaf in self.LEAVES:
                shape = (8, 8, 3, 3) if leaf == "conv1.weight" else (8,)
                values = rng.standard_normal(shape).astype("f4")
                ours[first.format(n, leaf)], theirs[second.format(n + 1, leaf)] = values, values
        return ours, theirs

    @pytest.mark.parametrize("is_rounded", [False, True])
    @pytest.mark.parametrize("order", [1, -1], ids=["in b", "in a"])
    @pytest.mark.parametrize("names", [None, "auto"])
    def test_are_found_by_the_names_of_the_rest(
        self, names: Any, order: int, is_rounded: bool
    ) -> None:
        ours, theirs = self.sides("net.mid.resnets.{}.{}", "middle.block_{}.{}")
        assert set(explained(*_ordered(ours, theirs, order), names=names)["outcome"]) == {
            "explained"
        }
        damaged, source = (f"middle.block_{n}.norm2.bias" for n in (1, 2))
        theirs[damaged] = theirs[source]
        if is_rounded:
            theirs = {name: values.astype(np.float16) for name, values in theirs.items()}
        table = explained(*_ordered(ours, theirs, order), names=names)
        wrong = {"net.mid.resnets.0.norm2.bias", damaged}
        assert set(table.index[table["outcome"] != "explained"]) == wrong & set(table.index)

    def copied(self, theirs: dict[str, Any], second: str) -> list[str]:
        """Put the tensors of block 2 in the place of block 1, and return their names."""
        names = [second.format(1, leaf) for leaf in self.LEAVES]
        theirs |= dict(
            zip(names, [theirs[second.format(2, leaf)] for leaf in self.LEAVES], strict=True)
        )
        return names

    @pytest.mark.parametrize("is_known", [True, False])
    def test_are_found_by_another_component_or_the_family(self, is_known: bool) -> None:
        first, second = "{}.mid_block.resnets.{{}}.{{}}", "{}.mid.block_{{}}.{{}}"
        ours, theirs = self.sides(first.format("encoder"), second.format("encoder"))
        if is_known:
            values = np.random.default_rng(5).standard_normal((8, 8, 3, 3))
            ours["encoder.down_blocks.0.resnets.0.conv1.weight"] = values
            theirs["encoder.down.0.block.0.conv1.weight"] = values
        else:
            rest, rest_of_b = self.sides(first.format("decoder"), second.format("decoder"))
            ours |= {name: values + 1 for name, values in rest.items()}
            theirs |= {name: values + 1 for name, values in rest_of_b.items()}
        wrong = self.copied(theirs, second.format("encoder"))
        table = explained(ours, theirs)
        assert set(table.loc[wrong, "outcome"]) == {"changed"}
        assert "are copies" in table.loc[wrong[0], "explanation"]
        wrong += [first.format("encoder").format(0, leaf) for leaf in self.LEAVES]
        assert set(table.index[table["outcome"] != "explained"]) == set(wrong)

    def test_are_not_explained_if_nothing_tells_which(self) -> None:
        ours, theirs = self.sides("x.{}.{}", "y_{}z.{}")
        theirs |= {f"y_1z.{leaf}": theirs[f"y_2z.{leaf}"] for leaf in self.LEAVES}
        table = explained(ours, theirs)
        assert "explained" not in set(table["outcome"])
        for name in ("y_1z.conv1.weight", "y_2z.conv1.weight", "x.1.conv1.weight"):
            text = table.loc[name, "explanation"]
            assert "y_1z.conv1.weight" in text
            assert "y_2z.conv1.weight" in text


def _ordered(a: Any, b: Any, order: int) -> tuple[Any, Any]:
    return (a, b) if order > 0 else (b, a)


def explained(a: Any, b: Any, names: Any = None) -> Any:
    """Return the table of a comparison."""
    result = xckpt.compare(a, b, explain=True, cache=False, progress=False, names=names)
    return result.ckpt.table()


@pytest.mark.parametrize("order", [1, -1], ids=["in a", "in b"])
def test_a_head_of_an_unknown_model_is_tied_to_its_embedding(order: int) -> None:
    rng = np.random.default_rng(0)
    tied = rng.standard_normal((12, 4)).astype("f4")
    both = {"net.embed_tokens.weight": tied, "lm_head.weight": tied, "net.scale": W}
    one = {name: x for name, x in both.items() if name != "lm_head.weight"}
    comparison = xckpt.compare(*(both, one)[::order], explain=True, progress=False)
    row = comparison.ckpt.table().loc["lm_head.weight"]
    assert (row["outcome"], row["cause"]) == ("explained", "tied")
