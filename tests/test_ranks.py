"""Ranks of tensor parallelism: joined to whole tensors where the family and its sizes are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import fsspec
import numpy as np
import pytest

import xckpt
from tests.formats import torch_files
from tests.formats.safetensors_files import entry, safetensors_file
from tests.rank_files import COLUMN, ROW, Llama, Megatron, Model
from xckpt.cli import main
from xckpt.errors import CheckpointWarning, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import xarray as xr

    Files = Mapping[str, bytes]
    Put = Callable[[Files], str]

DTYPES = ["f4", "u2"]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Write files into a new folder, and return its path."""

    def write(files: Files) -> str:
        folder = tmp_path / uuid4().hex
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return str(folder)

    return write


def assert_equal(ds: xr.Dataset, whole: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Compare all bits of all tensors."""
    assert set(map(str, ds.data_vars)) == set(whole)
    for name, array in whole.items():
        values = ds[name].values
        assert (name, values.shape) == (name, array.shape)
        assert values.tobytes() == array.tobytes(), name


def reason_of(folder: str, **options: Any) -> str:
    """Return the reason for ranks that stay side by side, which `join_ranks` raises."""
    with pytest.warns(CheckpointWarning, match="ranks of one model, opened side by side") as record:
        ds = xckpt.open(folder, **options)
    assert all("rank" in str(name).partition(".")[0] for name in ds.data_vars)
    with pytest.raises(UnsupportedError) as caught:
        xckpt.open(folder, join_ranks=True, **options)
    assert any(caught.value.reason in str(warning.message) for warning in record)
    return caught.value.reason


class TestLlama:
    """The files ``consolidated.NN.pth`` are one model."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("generation", [1, 3])
    @pytest.mark.parametrize("n_kv_heads", [None, 8])
    @pytest.mark.parametrize("world", [2, 4, 8])
    def test_all_tensors_are_equal_bit_for_bit(
        self, put: Put, world: int, n_kv_heads: int | None, generation: int, dtype: str
    ) -> None:
        llama = Llama(generation=generation, n_kv_heads=n_kv_heads, n_heads=16, dtype=dtype)
        folder = put(llama.files(world))
        assert_equal(xckpt.open(folder, decode=False), llama.model.tensors)

    @pytest.mark.parametrize("generation", [1, 3])
    @pytest.mark.parametrize("vocab", [32, 64, 128])
    def test_square_embeddings(self, put: Put, vocab: int, generation: int) -> None:
        llama = Llama(generation=generation, vocab=vocab)
        assert_equal(xckpt.open(put(llama.files(2))), llama.model.tensors)

    def test_the_feed_forward_layers_of_a_multiplier(self, put: Put) -> None:
        llama = Llama(ffn_dim_multiplier=1.3, n_kv_heads=4)
        assert_equal(xckpt.open(put(llama.files(4))), llama.model.tensors)

    def test_an_unknown_vocabulary_decides_nothing(self, put: Put) -> None:
        llama = Llama(generation=3)
        params = llama.params | {"vocab_size": -1}
        folder = put(llama.files(2) | {"params.json": json.dumps(params).encode()})
        reason = reason_of(folder)
        assert "'tok_embeddings.weight' with shape [48, 64] may be divided along axis 0" in reason
        assert "or not at all: nothing states the size of vocab" in reason

    @pytest.mark.parametrize("params", [None, b"{", b"[]"])
    def test_without_sizes_nothing_is_joined(self, put: Put, params: bytes | None) -> None:
        files = Llama().files(2) | {"params.json": params or b""}
        if params is None:
            files.pop("params.json")
        assert "nothing states the sizes of the model" in reason_of(put(files))

    def test_the_last_ranks_are_missing(self, put: Put) -> None:
        files = Llama().files(4)
        for rank in (2, 3):
            files.pop(f"consolidated.{rank:02}.pth")
        reason = reason_of(put(files))
        assert "has shape [96, 16] on each of 2 ranks, which does not agree" in reason

    @pytest.mark.parametrize("world", [2, 8])
    def test_one_rank_alone_in_its_folder(self, put: Put, world: int) -> None:
        files = {n: d for n, d in Llama().files(world).items() if n[-6:] in {"00.pth", "s.json"}}
        folder = put(files)
        with pytest.warns(CheckpointWarning, match=f"one of {world} ranks by the sizes"):
            xckpt.open(folder)
        xckpt.open(f"{folder}/consolidated.00.pth")  # its own path is taken at its word

    def test_a_whole_model_in_one_file_is_no_rank(self, put: Put) -> None:
        llama = Llama()
        assert_equal(xckpt.open(put(llama.files(1))), llama.model.tensors)

    @pytest.mark.parametrize(
        "whole", [("wk", "wv"), ("w1", "w2", "w3"), ("tok_embeddings",), ("output",)]
    )
    def test_tensors_that_all_ranks_share(self, put: Put, whole: tuple[str, ...]) -> None:
        llama = Llama(n_kv_heads=2, generation=3)
        model = llama.model
        for name in model.cuts:
            if name.split(".")[-2] in whole:
                model.cuts[name] = None
        files = {
            f"consolidated.{rank:02}.pth": torch_files.checkpoint(model.rank(rank, 4))
            for rank in range(4)
        }
        folder = put(files | {"params.json": json.dumps(llama.params).encode()})
        assert_equal(xckpt.open(folder), model.tensors)


class TestMegatron:
    """The folders ``mp_rank_NN`` of Megatron-LM are one model."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("groups", [None, 2])
    @pytest.mark.parametrize("world", [2, 8])
    def test_all_tensors_are_equal_bit_for_bit(
        self, put: Put, world: int, groups: int | None, *, gated: bool, legacy: bool, dtype: str
    ) -> None:
        model = Megatron(groups=groups, gated=gated, legacy=legacy, dtype=dtype)
        ds = xckpt.open(put(model.files(world)), decode=False)
        assert_equal(ds, model.whole())

    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize("world", [1, 2])
    def test_stages_of_a_pipeline(self, put: Put, world: int, *, legacy: bool) -> None:
        model = Megatron(layers=4, legacy=legacy)
        assert_equal(xckpt.open(put(model.files(world, 2))), model.whole(2))

    def test_the_state_of_a_training_stays_side_by_side(self, put: Put) -> None:
        model = Megatron()
        state = torch_files.ndarray(np.ones(3, "f4"))
        folder = put(model.files(2, rng_state=torch_files.mapping({"numpy": state})))
        ds = xckpt.open(folder)
        extra = {f"mp_rank_0{rank}.rng_state.numpy" for rank in "01"}
        assert set(map(str, ds.data_vars)) == {*model.whole(), *extra}
        assert "not joined, because they are of single ranks: 'mp_rank_00.rng_" in repr(ds.ckpt)

    def test_an_embedding_that_two_stages_have(self, put: Put) -> None:
        model = Megatron(layers=4)
        files = model.files(2, 2)
        first, last = model.stage(0, 2), model.stage(1, 2)
        name = "embedding.word_embeddings.weight"
        last.tensors[name], last.cuts[name] = first.tensors[name], first.cuts[name]
        for rank in range(2):
            args = model.args(2, 2)
            data = model.file(last.rank(rank, 2), args)
            files[f"mp_rank_0{rank}_001/model_optim_rng.pt"] = data
        folder = put(files)
        assert_equal(xckpt.open(folder), model.whole(2))
        assert xckpt.verify(folder).findings == ()

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"tensor_model_parallel_size": 4}, "states 4 ranks, but 2 are here"),
            ({"pipeline_model_parallel_size": 2}, "states 2 stages, but 1 are here"),
            ({"expert_model_parallel_size": 2}, "expert_model_parallel_size = 2"),
            ({"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size"),
            ({"hidden_size": 128}, "does not agree with the sizes of the model"),
            ({"ffn_hidden_size": 100}, "does not agree with the sizes of the model"),
            ({"num_query_groups": 4, "group_query_attention": True}, "linear_qkv"),
        ],
    )
    def test_other_statements(self, put: Put, changes: dict[str, Any], reason: str) -> None:
        assert reason in reason_of(put(Megatron(changes=changes).files(2)))

    def test_the_order_of_old_versions(self, put: Put) -> None:
        files = Megatron(legacy=True).files(2, checkpoint_version=torch_files.real(0.0))
        assert "has the order of checkpoint_version 0" in reason_of(put(files))

    def test_stages_with_other_layers(self, put: Put) -> None:
        files = Megatron(layers=4, changes={"num_layers": 6}).files(1, 2)
        assert "4 layers in total, but 6 are stated" in reason_of(put(files))

    def test_ranks_of_two_steps(self, put: Put) -> None:
        files = dict(Megatron().files(2))
        later = Megatron().files(2, iteration=torch_files.number(200))
        files["mp_rank_01/model_optim_rng.pt"] = later["mp_rank_01/model_optim_rng.pt"]
        assert "iteration is 100 in 'mp_rank_00', but 200 in 'mp_rank_01'" in reason_of(put(files))


class TestOtherRanks:
    """Other ranks are joined by the same rules."""

    def test_fused_projections_of_vllm(self, put: Put) -> None:
        dim, ff, vocab = 64, 96, 128
        model = Model()
        model.add("model.embed_tokens.weight", (vocab, dim), COLUMN)
        for layer in range(2):
            at = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                model.add(f"{at}.{norm}.weight", (dim,))
            model.add(f"{at}.self_attn.o_proj.weight", (dim, dim), ROW)
            model.add(f"{at}.mlp.gate_up_proj.weight", (2 * ff, dim), (0, 2))
            model.add(f"{at}.mlp.down_proj.weight", (dim, ff), ROW)
        model.add("model.norm.weight", (dim,))
        model.add("lm_head.weight", (vocab, dim), COLUMN)
        rng = np.random.default_rng(1)
        # Queries, keys and values of 8 and 2 heads, each divided by itself.
        parts = [rng.standard_normal((n * 8, dim)).astype("f4") for n in (8, 2, 2)]
        whole = dict(model.tensors)
        names = [f"model.layers.{layer}.self_attn.qkv_proj.weight" for layer in range(2)]
        whole |= dict.fromkeys(names, np.concatenate(parts))
        config = {"model_type": "llama", "hidden_size": dim, "intermediate_size": ff}
        config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": vocab}
        files = {"config.json": json.dumps(config | {"num_hidden_layers": 2}).encode()}
        for rank in range(2):
            tensors = model.rank(rank, 2)
            fused = np.concatenate([np.split(part, 2)[rank] for part in parts])
            tensors |= dict.fromkeys(names, fused)
            header, data = {}, b""
            for name, array in tensors.items():
                end = len(data) + array.nbytes
                header[name] = entry("F32", list(array.shape), len(data), end)
                data += array.tobytes()
            files[f"model-rank-{rank}-part-0.safetensors"] = safetensors_file(header, data)
        assert_equal(xckpt.open(put(files)), whole)

    def test_copies_of_a_whole_model_are_not_joined(self, put: Put) -> None:
        llama = Llama(generation=3)
        data = torch_files.checkpoint(llama.model.tensors)
        files = {f"consolidated.0{rank}.pth": data for rank in "01"}
        files["params.json"] = json.dumps(llama.params).encode()
        assert "they may be copies of one model" in reason_of(put(files))

    def test_unknown_names(self, put: Put) -> None:
        data = torch_files.checkpoint({"w": np.ones(3, "f4")})
        folder = put({f"consolidated.0{rank}.pth": data for rank in "01"})
        assert "no family has the names" in reason_of(folder)


class TestAnotherRank:
    """A rank of another model is an obstacle, which is named."""

    def changed(self, change: Callable[[dict[str, Any]], Any]) -> dict[str, bytes]:
        llama = Llama()
        tensors = llama.model.rank(1, 2)
        change(tensors)
        return llama.files(2) | {"consolidated.01.pth": torch_files.checkpoint(tensors)}

    def test_a_tensor_is_missing(self, put: Put) -> None:
        files = self.changed(lambda tensors: tensors.pop("norm.weight"))
        reason = reason_of(put(files))
        assert reason == "'norm.weight' is in 'rank_00', but not in 'rank_01'"

    def test_a_tensor_is_extra(self, put: Put) -> None:
        extra = {"norm.bias": np.ones(64, "f4")}
        reason = reason_of(put(self.changed(lambda tensors: tensors.update(extra))))
        assert reason == "'norm.bias' in 'rank_01', but not in 'rank_00'"

    def test_another_shape(self, put: Put) -> None:
        other = {"output.weight": np.ones((40, 64), "f4")}
        reason = reason_of(put(self.changed(lambda tensors: tensors.update(other))))
        assert "float32 [48, 64] in 'rank_00', but float32 [40, 64] in 'rank_01'" in reason

    def test_another_type(self, put: Put) -> None:
        other = {"norm.weight": np.ones(64, "f8")}
        reason = reason_of(put(self.changed(lambda tensors: tensors.update(other))))
        assert "float32 [64] in 'rank_00', but float64 [64] in 'rank_01'" in reason

    def test_verify_compares_what_all_ranks_have(self, put: Put) -> None:
        other = {"norm.weight": np.zeros(64, "f4")}
        folder = put(self.changed(lambda tensors: tensors.update(other)))
        (finding,) = xckpt.verify(folder).findings
        assert (finding.severity, finding.rule) == ("warning", "Ranks")
        assert "'norm.weight' in 'rank_01' differ from the copies that count" in finding.message


class TestJoined:
    """Joined tensors are as others."""

    def test_the_option_decides(self, put: Put) -> None:
        folder = put(Llama().files(2))
        apart = xckpt.open(folder, join_ranks=False)
        assert {str(name).partition(".")[0] for name in apart.data_vars} == {"rank_00", "rank_01"}
        with pytest.raises(ValueError, match="join_ranks='yes': expected True, False or 'auto'"):
            xckpt.open(folder, join_ranks="yes")  # type: ignore[arg-type]

    def test_files_without_ranks_ignore_the_option(self, put: Put) -> None:
        folder = put({"m.pth": torch_files.checkpoint({"w": np.ones(3, "f4")})})
        assert list(xckpt.open(f"{folder}/m.pth", join_ranks=True)) == ["w"]

    def test_lists_and_globs(self, put: Put) -> None:
        llama = Llama()
        folder = put(llama.files(2))
        paths = [f"{folder}/consolidated.0{rank}.pth" for rank in "01"]
        for files in (paths, f"{folder}/consolidated.*"):
            assert_equal(xckpt.open(files), llama.model.tensors)

    def test_a_slice_reads_only_its_pieces(self) -> None:
        llama = Llama()
        files = llama.files(4)
        memory, folder = fsspec.filesystem("memory"), f"/{uuid4().hex}"
        memory.pipe({f"{folder}/{name}": data for name, data in files.items()})
        ds = xckpt.open(f"memory://{folder}")
        whole = llama.model.tensors
        for rank in (0, 2, 3):
            memory.rm(f"{folder}/consolidated.0{rank}.pth")
        rows, columns = ds["layers.0.attention.wq.weight"], ds["layers.0.attention.wo.weight"]
        np.testing.assert_array_equal(rows[16:32], whole[str(rows.name)][16:32])
        np.testing.assert_array_equal(columns[3:, 20:30], whole[str(columns.name)][3:, 20:30])
        with pytest.raises(OSError, match=r"consolidated\.02\.pth"):
            rows[30:34].compute()

    def test_pieces_of_a_gate_are_read_apart(self) -> None:
        model = Megatron()
        memory, folder = fsspec.filesystem("memory"), f"/{uuid4().hex}"
        memory.pipe({f"{folder}/{name}": data for name, data in model.files(2).items()})
        ds = xckpt.open(f"memory://{folder}")
        memory.rm(f"{folder}/mp_rank_01/model_optim_rng.pt")
        name = "model.decoder.layers.1.mlp.linear_fc1.weight"
        for start in (0, 96):
            rows = slice(start, start + 48)
            np.testing.assert_array_equal(ds[name][rows], model.whole()[name][rows])

    def test_copies_and_conversions_are_equal(self, put: Put, tmp_path: Path) -> None:
        model = Megatron(groups=4)
        folder = put(model.files(2))
        xckpt.save(xckpt.open(folder), tmp_path / "saved.safetensors")
        xckpt.convert(folder, tmp_path / "converted.npz")
        for name in ("saved.safetensors", "converted.npz"):
            assert_equal(xckpt.open(tmp_path / name), model.whole())
        status = xckpt.compare(folder, tmp_path / "saved.safetensors").ckpt.table()["status"]
        assert set(status) == {"same"}

    def test_statistics(self, put: Put) -> None:
        model = Megatron()
        table = xckpt.stats(put(model.files(2))).ckpt.table()
        name = "model.decoder.layers.0.mlp.linear_fc1.weight"
        assert table.loc[name, "mean"] == pytest.approx(model.whole()[name].mean(dtype="f8"))

    def test_verify_checks_every_piece(self, put: Put) -> None:
        folder = put(Megatron().files(2))
        report = xckpt.verify(folder)
        assert (report.status, report.findings) == ("ok", ())
        path = Path(folder, "mp_rank_01", "model_optim_rng.pt")
        data = bytearray(path.read_bytes())
        gate = Megatron().stage(0, 1).rank(1, 2)["decoder.layers.0.mlp.linear_fc1.weight"]
        data[data.index(gate[-1].tobytes())] ^= 1
        path.write_bytes(data)
        assert xckpt.verify(folder).status == "damaged"

    def test_the_description(self, put: Put, capsys: pytest.CaptureFixture[str]) -> None:
        folder = put(Llama().files(2))
        main(["info", folder, "--json"])
        files = json.loads(capsys.readouterr().out)["files"]
        assert (files["by"], files["joined_along"]) == ("ranks", "llama")

    def test_steps(self, put: Put) -> None:
        model = Megatron()
        folder = put(
            {
                f"iter_{step:07}/{name}": data
                for step in (100, 200)
                for name, data in model.files(2).items()
            }
        )
        run = xckpt.open_steps(folder)
        assert run["step"].values.tolist() == [100, 200]
        name = "model.decoder.layers.0.mlp.linear_fc1.weight"
        np.testing.assert_array_equal(run[name].sel(step=200), model.whole()[name])
        apart = xckpt.open_steps(folder, join_ranks=False)
        assert f"mp_rank_00.{name}" in apart
