"""Which files are one checkpoint: folders, indexes, parts, ranks, caches, wherever they are."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import fsspec
import numpy as np
import pytest

import xckpt
from tests.formats.safetensors_files import entry, safetensors_file
from tests.storage.hub_server import HubServer, Repository
from tests.storage.s3_server import BUCKET, S3Server, require_packages
from xckpt.cli import main
from xckpt.errors import CheckpointWarning, FormatError, MissingShardError
from xckpt.storage import hub, objects

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ONE, TWO = (np.full((2, 3), value, "<f4") for value in (1, 2))
PART_1, PART_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def written(**arrays: np.ndarray[Any, Any]) -> bytes:
    """Write a safetensors file of float32."""
    header, data = {}, b""
    for name, array in arrays.items():
        header[name] = entry("F32", list(array.shape), len(data), len(data) + array.nbytes)
        data += array.tobytes()
    return safetensors_file(header, data)


def index_of(weight_map: Mapping[str, str], **metadata: Any) -> bytes:
    return json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()


@dataclass
class Folder:
    """A folder on this machine, or on a server."""

    address: str
    options: dict[str, Any] | None = None
    server: Any = None
    files: dict[str, bytes] = field(default_factory=dict)

    def put(self, files: Mapping[str, bytes]) -> None:
        """Write files by their paths in the folder."""
        self.files |= files
        if isinstance(self.server, S3Server):
            prefix = self.address.removeprefix(f"s3://{BUCKET}/")
            self.server.put(**{f"{prefix}/{name}": data for name, data in files.items()})
        elif isinstance(self.server, HubServer):
            self.server.repositories["org/model"].push(self.files)
            forget_the_hub()
        elif self.address.startswith("memory://"):
            fsspec.filesystem("memory").pipe({f"{self.address}/{n}": d for n, d in files.items()})
        else:
            for name, data in files.items():
                path = Path(self.address, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def open(self, inside: str = "", **options: Any) -> Any:
        return xckpt.open(self.address + inside, storage_options=self.options, **options)

    def values(self, inside: str = "") -> dict[str, float]:
        """Open the folder, and return the largest element of each tensor."""
        return {str(n): float(v.max()) for n, v in self.open(inside).data_vars.items()}


def forget_the_hub() -> None:
    """Be as a new process."""
    for pool in (hub._commits, hub._folders, hub._small, objects._addresses):
        pool.clear()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    require_packages()
    with S3Server() as server:
        yield server


@pytest.fixture(params=["local", "memory", "s3", "hub"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Folder]:
    if request.param == "local":
        yield Folder(str(tmp_path / "model"))
    elif request.param == "memory":
        yield Folder(f"memory://{uuid4().hex}")
    elif request.param == "s3":
        server = request.getfixturevalue("s3")
        yield Folder(f"s3://{BUCKET}/{uuid4().hex}", server.options, server)
    else:
        pytest.importorskip("huggingface_hub")
        from huggingface_hub import constants

        with HubServer() as server:
            monkeypatch.setattr(constants, "ENDPOINT", server.url)
            monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
            server.repositories["org/model"] = Repository()
            yield Folder("hf://org/model", server=server)
            forget_the_hub()


@pytest.fixture
def local(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "model"))


class TestNumbers:
    """A name that states ``-of-N`` is believed."""

    def test_all_parts_are_one_checkpoint(self, folder: Folder) -> None:
        folder.put({PART_1: written(a=ONE), PART_2: written(b=TWO), "config.json": b"{}"})
        assert folder.values() == {"a": 1, "b": 2}
        assert folder.values("/") == {"a": 1, "b": 2}

    @pytest.mark.parametrize("name", [PART_1, PART_2, "m-00002-of-00005.gguf.safetensors"])
    def test_one_part_alone_is_not_a_checkpoint(self, folder: Folder, name: str) -> None:
        folder.put({name: written(a=ONE), "README.md": b"# Model"})
        with pytest.raises(MissingShardError, match=r"of \d shards these are missing: \d"):
            folder.open()

    def test_a_part_opens_by_its_own_name(self, folder: Folder) -> None:
        folder.put({PART_1: written(a=ONE)})
        ds = folder.open(f"/{PART_1}")
        assert list(ds) == ["a"]
        assert "part 1 of 2 of a checkpoint" in repr(ds.ckpt)

    def test_a_glob_that_matches_some_parts_warns(self, folder: Folder) -> None:
        folder.put({"m-00001-of-00003.zt.safetensors": written(a=ONE)})
        folder.put({"m-00003-of-00003.zt.safetensors": written(b=TWO)})
        with pytest.warns(CheckpointWarning, match="'m-00002-of-00003.zt.safetensors'"):
            ds = folder.open("/*.safetensors")
        assert list(ds) == ["a", "b"]

    def test_an_unfinished_download_is_named(self, folder: Folder) -> None:
        folder.put({PART_1: written(a=ONE), f"{PART_2}.incomplete": b"\0" * 9})
        with pytest.raises(MissingShardError, match=f"'{PART_2}.incomplete' did not arrive whole"):
            folder.open()

    def test_downloads_of_the_client_of_the_hub_are_named(self, local: Folder) -> None:
        local.put({PART_1: written(a=ONE), ".cache/huggingface/download/x.incomplete": b""})
        with pytest.raises(MissingShardError, match=r"x\.incomplete' did not arrive whole"):
            local.open()

    def test_variants_are_sets_of_their_own(self, folder: Folder) -> None:
        variant = "model.fp16-0000{}-of-00002.safetensors"
        folder.put({variant.format(1): written(a=TWO), variant.format(2): written(b=TWO)})
        folder.put({PART_1: written(a=ONE), PART_2: written(b=ONE), "config.json": b"{}"})
        assert folder.values() == {"a": 1, "b": 1}
        assert folder.values("/model.fp16-*") == {"a": 2, "b": 2}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


class TestDamagedParts:
    """A part that is there but is something else says what it is, and what to do."""

    @pytest.mark.parametrize("others", [{}, {PART_1: written(a=ONE)}])
    def test_pointers_of_git_lfs(self, folder: Folder, others: dict[str, bytes]) -> None:
        folder.put({PART_1: POINTER, PART_2: POINTER, "config.json": b"{}"} | others)
        with pytest.raises(FormatError, match=r"a Git LFS pointer .*git lfs pull"):
            folder.open()

    def test_a_pointer_among_the_shards_of_an_index(self, folder: Folder) -> None:
        folder.put({PART_1: written(a=ONE), PART_2: POINTER})
        folder.put({INDEX: index_of({"a": PART_1, "b": PART_2})})
        with pytest.warns(CheckpointWarning, match=r"'b'\): .* a Git LFS pointer .*git lfs pull"):
            ds = folder.open()
        assert float(ds["a"].max()) == 1

    def test_a_pointer_alone(self, local: Folder) -> None:
        local.put({"model.safetensors": POINTER})
        with pytest.raises(FormatError, match="git lfs pull"):
            local.open()

    def test_links_to_parts_that_are_gone(self, local: Folder) -> None:
        local.put({PART_1: written(a=ONE)})
        Path(local.address, PART_2).symlink_to("../blobs/0123")
        with pytest.raises(MissingShardError, match=f"the links '{PART_2}' lead to are gone"):
            local.open()


class TestIndex:
    """An index and its files are compared."""

    def test_a_tensor_that_its_shard_lacks(self, folder: Folder) -> None:
        folder.put({PART_1: written(a=ONE), PART_2: written(b=TWO)})
        folder.put({INDEX: index_of({"a": PART_1, "b": PART_2, "c": PART_2})})
        with pytest.warns(
            CheckpointWarning,
            match=rf"\('c'\): the index .* lists it in '{PART_2}', which lacks it",
        ):
            ds = folder.open()
        assert float(ds["b"].max()) == 2
        with pytest.raises(FormatError, match=r"'c'.*lacks it"):
            ds["c"].compute()

    def test_the_part_that_has_it_is_named(self, folder: Folder) -> None:
        folder.put({PART_1: written(a=ONE), PART_2: written(b=TWO)})
        folder.put({INDEX: index_of({"a": PART_1, "b": PART_1})})
        with pytest.warns(CheckpointWarning, match=rf"lacks it.* '{PART_2}', .* not list, has it"):
            folder.open()

    def test_a_tensor_in_another_listed_shard_is_opened(self, folder: Folder) -> None:
        folder.put({PART_1: written(a=ONE), PART_2: written(b=TWO, c=TWO)})
        folder.put({INDEX: index_of({"a": PART_1, "b": PART_2, "c": PART_1})})
        with pytest.warns(CheckpointWarning, match=f"lists 'c' in '{PART_1}', but it is in"):
            assert folder.values() == {"a": 1, "b": 2, "c": 2}

    def test_a_tensor_that_the_index_lacks_is_opened(self, folder: Folder) -> None:
        folder.put({PART_1: written(a=ONE), PART_2: written(b=TWO, c=TWO)})
        folder.put({INDEX: index_of({"a": PART_1, "b": PART_2})})
        with pytest.warns(CheckpointWarning, match=f"but in '{PART_2}', and opened: 'c'"):
            assert folder.values() == {"a": 1, "b": 2, "c": 2}

    @pytest.mark.parametrize("equal", [True, False])
    def test_of_two_copies_the_index_chooses(
        self, folder: Folder, equal: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder.put({PART_1: written(a=ONE), PART_2: written(b=TWO, a=ONE if equal else TWO)})
        folder.put({INDEX: index_of({"a": PART_1, "b": PART_2})})
        with pytest.warns(CheckpointWarning, match=f"'{PART_2}' has another copy of 'a'"):
            assert folder.values() == {"a": 1, "b": 2}
        report = xckpt.verify(folder.address, storage_options=folder.options)
        (message,) = [finding.message for finding in report.findings if finding.tensor == "a"]
        assert ("equals" in message) is equal
        assert report.ok
        capsys.readouterr()

    def test_a_wrong_total_size_is_a_note(self, local: Folder) -> None:
        local.put({PART_1: written(a=ONE), PART_2: written(b=TWO)})
        weight_map = {"a": PART_1, "b": PART_2}
        local.put({INDEX: index_of(weight_map, total_size=999)})
        assert "states 999 bytes as total_size, but its tensors have 48" in repr(local.open().ckpt)
        assert "999" in repr(xckpt.verify(local.address))
        local.put({INDEX: index_of(weight_map, total_size=48)})
        assert "total_size, but" not in repr(local.open().ckpt)

    def test_names_of_files_with_a_dot_and_a_slash(self, folder: Folder) -> None:
        folder.put({PART_1: written(a=ONE), INDEX: index_of({"a": f"./{PART_1}"})})
        assert folder.values() == {"a": 1}

    @pytest.mark.parametrize("name", ["model.safetensors.index.fp16.json", INDEX])
    def test_the_index_of_a_variant(self, folder: Folder, name: str) -> None:
        folder.put({PART_1: written(a=ONE), name: index_of({"a": PART_1})})
        assert folder.values() == {"a": 1}
        assert folder.values(f"/{name}") == {"a": 1}

    def test_an_index_without_tensors(self, folder: Folder) -> None:
        folder.put({INDEX: index_of({})})
        for inside in ("", f"/{INDEX}"):
            with pytest.raises(FormatError, match="lists no tensors"):
                folder.open(inside)


class TestSingleFileNextToAnIndex:
    """Libraries differ in which they take: one warning names both."""

    def test_the_single_file_counts_if_it_has_all_tensors(self, folder: Folder) -> None:
        folder.put({PART_1: written(a=ONE), INDEX: index_of({"a": PART_1})})
        folder.put({"model.safetensors": written(a=TWO, b=TWO)})
        with pytest.warns(
            CheckpointWarning, match="'model.safetensors' is opened, .*'model.*json'"
        ):
            assert folder.values() == {"a": 2, "b": 2}
        assert folder.values(f"/{INDEX}") == {"a": 1}

    def test_the_index_counts_if_the_single_file_lacks_tensors(self, folder: Folder) -> None:
        folder.put({PART_1: written(a=ONE, b=ONE), INDEX: index_of({"a": PART_1, "b": PART_1})})
        folder.put({"model.safetensors": written(a=TWO)})
        with pytest.warns(CheckpointWarning, match="'model.safetensors' lacks 'b'"):
            assert folder.values() == {"a": 1, "b": 1}

    @pytest.mark.parametrize("content", [b"", b"\0" * 100, b"{"])
    def test_a_damaged_single_file_does_not_count(self, local: Folder, content: bytes) -> None:
        local.put({PART_1: written(a=ONE), INDEX: index_of({"a": PART_1})})
        local.put({"model.safetensors": content})
        with pytest.warns(CheckpointWarning, match="'model.safetensors' lacks 'a'"):
            assert local.values() == {"a": 1}

    def test_a_stale_index_does_not_hide_a_single_file(self, folder: Folder) -> None:
        folder.put({INDEX: index_of({"a": "model-00001-of-00009.safetensors"})})
        folder.put({"model.safetensors": written(a=TWO)})
        with pytest.warns(CheckpointWarning, match=f"'{INDEX}' is ignored"):
            assert folder.values() == {"a": 2}

    def test_a_stale_index_does_not_hide_a_set(self, folder: Folder) -> None:
        folder.put({INDEX: index_of({"a": "model-00001-of-00030.safetensors"})})
        folder.put({PART_1: written(a=ONE), PART_2: written(b=TWO)})
        with pytest.warns(CheckpointWarning, match=f"'{INDEX}' is ignored"):
            assert folder.values() == {"a": 1, "b": 2}

    def test_an_index_whose_files_are_missing_names_the_present_ones(self, folder: Folder) -> None:
        folder.put({INDEX: index_of({"a": PART_1}), "notes.txt": b"", "config.json": b"{}"})
        with pytest.raises(MissingShardError, match=f"missing: '{PART_1}'.* 'notes.txt'"):
            folder.open()

    def test_pytorch_shards_give_way_to_safetensors(self, folder: Folder) -> None:
        folder.put({"model.safetensors": written(a=ONE), "config.json": b"{}"})
        folder.put({"pytorch_model.bin.index.json": index_of({"a": "pytorch_model-1.bin"})})
        folder.put({"pytorch_model-1.bin": b"\0" * 100})
        with pytest.warns(CheckpointWarning, match="'model.safetensors' is opened"):
            assert folder.values() == {"a": 1}


class TestSeveralCheckpoints:
    """A config, and the names that libraries load, choose one; the others are named."""

    def test_files_of_a_trainer(self, folder: Folder) -> None:
        folder.put({"adapter_model.safetensors": written(a=ONE), "adapter_config.json": b"{}"})
        folder.put({"optimizer.pt": b"x", "rng_state.pth": b"x", "scheduler.pt": b"x"})
        assert folder.values() == {"a": 1}

    def test_other_formats_of_a_model_are_named(self, local: Folder) -> None:
        local.put({"model.safetensors": written(a=ONE), "config.json": b"{}"})
        local.put({"other.safetensors": written(a=TWO)})
        ds = local.open()
        assert list(ds) == ["a"]
        assert "not opened, from the same folder: 'other.safetensors'" in repr(ds.ckpt)
        checkpoint = xckpt.read_index(local.address).checkpoint
        assert checkpoint is not None
        assert checkpoint.competing == ("other.safetensors",)

    def test_copies_for_macos_are_no_checkpoints(self, local: Folder) -> None:
        local.put({"model.safetensors": written(a=ONE), "._model.safetensors": b"\0\5\x16\7"})
        assert local.values() == {"a": 1}

    def test_temporary_files_are_no_checkpoints(self, folder: Folder) -> None:
        names = ["model.safetensors.tmp", "tmp_model.safetensors", "model.safetensors.part"]
        folder.put({name: written(b=TWO) for name in names} | {"m.safetensors": written(a=ONE)})
        assert folder.values() == {"a": 1}

    def test_two_checkpoints_are_an_error_that_lists_them(self, folder: Folder) -> None:
        folder.put({"a.safetensors": written(a=ONE), "b.safetensors": written(a=TWO)})
        with pytest.raises(IsADirectoryError, match=r"2 checkpoints .*'a.safetensors', 'b.safe"):
            folder.open()

    def test_other_weights_by_names_of_libraries_are_a_warning(self, folder: Folder) -> None:
        folder.put({"model.safetensors": written(a=ONE), "config.json": b"{}"})
        folder.put({"tf_model.safetensors": written(a=TWO), "x.safetensors": written(a=TWO)})
        if folder.address.startswith("hf://"):  # a commit has files that belong together
            assert folder.values() == {"a": 1}
            return
        with pytest.warns(
            CheckpointWarning, match=r"'model\.saf.* is opened; 'tf_model.* may diff"
        ):
            assert folder.values() == {"a": 1}

    def test_sets_count_as_one_checkpoint_each(self, folder: Folder) -> None:
        for count in (2, 3):
            for number in range(1, count + 1):
                name = f"m-{number:05}-of-{count:05}.safetensors"
                folder.put({name: written(**{f"w{count}{number}": ONE})})
        with pytest.raises(
            IsADirectoryError, match=r"2 checkpoints.*'m-\*-of-00002\.safet.*'m-\*-of-0"
        ):
            folder.open()
        with pytest.warns(CheckpointWarning, match="glob matches several checkpoints"):
            folder.open("/*.safetensors")

    def test_upper_case(self, folder: Folder) -> None:
        folder.put(
            {f"MODEL_0000{n}-OF-00002.SAFETENSORS": written(**{f"w{n}": ONE}) for n in (1, 2)}
        )
        assert folder.values() == {"w1": 1, "w2": 1}

    def test_the_state_of_a_trainer_without_a_config(self, folder: Folder) -> None:
        names = ["optimizer.bin", "scheduler.bin", "random_states_0.pkl"]
        folder.put({"model.safetensors": written(a=ONE)} | dict.fromkeys(names, b"\x80\4N."))
        assert folder.values() == {"a": 1}

    def test_an_unpacked_file_of_pytorch(self, local: Folder) -> None:
        local.put({"data.pkl": b"\x80\2}q\0.", "version": b"3\n", "data/0": b"\0" * 16})
        with pytest.raises(xckpt.FormatError, match=r"unpacked file of PyTorch.*zip -0 -r"):
            local.open()

    def test_a_link_in_a_circle(self, local: Folder) -> None:
        local.put({"a.safetensors": written(a=ONE)})
        Path(local.address, "last.safetensors").symlink_to("last.safetensors")
        assert local.values() == {"a": 1}

    def test_a_link_to_a_missing_file(self, local: Folder) -> None:
        local.put({"a.safetensors": written(a=ONE)})
        Path(local.address, "last.safetensors").symlink_to("/gone/b.safetensors")
        with pytest.raises(
            FileNotFoundError, match=r"a link to '/gone/b.safetensors', which is miss"
        ):
            local.open("/last.safetensors")

    def test_links_to_missing_files_are_named(self, local: Folder) -> None:
        local.put({"README.md": b""})
        Path(local.address, "model.safetensors").symlink_to("../blobs/0123")
        with pytest.raises(IsADirectoryError, match=r"links 'model\.safetensors' lead to are miss"):
            local.open()


class TestRanks:
    """Ranks are parts of one model side by side, and not steps of a run."""

    @pytest.mark.parametrize(
        ("names", "ranks"),
        [
            (
                ["consolidated.00.safetensors", "consolidated.01.safetensors"],
                ["rank_00", "rank_01"],
            ),
            (["model-tp0.safetensors", "model-tp1.safetensors"], ["tp0", "tp1"]),
            (["rank_0.safetensors", "rank_1.safetensors"], ["rank_0", "rank_1"]),
            (
                ["mp_rank_00/m.safetensors", "mp_rank_01/m.safetensors"],
                ["mp_rank_00", "mp_rank_01"],
            ),
            (
                [f"mp_rank_0{tp}_00{pp}/model_optim_rng.safetensors" for tp in "01" for pp in "01"],
                [f"mp_rank_0{tp}_00{pp}" for tp in "01" for pp in "01"],
            ),
            (
                [f"tp_rank_0{n}_pp_rank_000/m.safetensors" for n in "01"],
                [f"tp_rank_0{n}_pp_rank_000" for n in "01"],
            ),
        ],
    )
    def test_side_by_side(self, folder: Folder, names: list[str], ranks: list[str]) -> None:
        folder.put({name: written(w=np.full(3, n, "f4")) for n, name in enumerate(names)})
        with pytest.warns(CheckpointWarning, match="ranks of one model, opened side by side"):
            ds = folder.open()
        assert {name: float(ds[name][0]) for name in ds} == {
            f"{rank}.w": n for n, rank in enumerate(ranks)
        }
        with pytest.raises((ValueError, OSError)):
            xckpt.open_steps(folder.address, storage_options=folder.options)

    def test_the_newest_iteration_of_megatron(self, folder: Folder) -> None:
        for step in (100, 200):
            for rank in (0, 1):
                name = f"iter_{step:07}/mp_rank_0{rank}/model_optim_rng.safetensors"
                folder.put({name: written(w=np.full(3, step, "f4"))})
        folder.put({"latest_checkpointed_iteration.txt": b"200"})
        with pytest.warns(CheckpointWarning, match="side by side"):
            assert folder.values() == {"mp_rank_00.w": 200, "mp_rank_01.w": 200}
        with pytest.warns(CheckpointWarning, match="side by side"):
            run = xckpt.open_steps(folder.address, storage_options=folder.options)
        assert run["step"].values.tolist() == [100, 200]
        assert run["mp_rank_01.w"].values[:, 0].tolist() == [100, 200]

    def test_the_latest_step_beside_a_model(self, folder: Folder) -> None:
        folder.put({"model.safetensors": written(a=ONE), "config.json": b"{}"})
        folder.put({"latest": b"global_step5", "global_step5/m.safetensors": written(a=TWO)})
        with pytest.warns(
            CheckpointWarning, match="'global_step5', the latest step, is not opened"
        ):
            assert folder.values() == {"a": 1}

    def test_the_latest_step_is_missing_beside_a_model(self, folder: Folder) -> None:
        folder.put({"latest": b"global_step8", "model.safetensors": written(a=ONE)})
        with pytest.warns(CheckpointWarning, match="'global_step8', the latest step, is missing"):
            assert folder.values() == {"a": 1}

    def test_the_latest_step_is_missing(self, folder: Folder) -> None:
        folder.put({"latest": b"global_step8", "global_step7/m.safetensors": written(a=TWO)})
        with pytest.raises(
            IsADirectoryError, match=r"'global_step8', the latest step, is missing.*7'\)"
        ):
            folder.open()

    def test_a_missing_rank_is_an_error(self, folder: Folder) -> None:
        folder.put({f"consolidated.0{n}.safetensors": written(w=ONE) for n in (0, 1, 3)})
        with pytest.raises(MissingShardError, match="of 4 ranks these are missing: 2"):
            folder.open()

    def test_huge_numbers_of_ranks_take_no_memory(self, local: Folder) -> None:
        names = [f"tp_rank_{n}_pp_rank_{n}.safetensors" for n in (0, 999999)]
        local.put({name: written(w=ONE) for name in names})
        with pytest.raises(IsADirectoryError, match="2 checkpoints"):
            local.open()

    @pytest.mark.parametrize(
        "names",
        [
            ["lora_rank_8.safetensors", "lora_rank_16.safetensors"],
            ["a_top1.safetensors", "a_top2.safetensors"],
            ["ep_0.safetensors", "ep_1.safetensors"],
        ],
    )
    def test_other_numbers_are_no_ranks(self, local: Folder, names: list[str]) -> None:
        local.put({name: written(w=ONE) for name in names})
        with pytest.raises(IsADirectoryError, match="2 checkpoints"):
            local.open()

    def test_a_list_and_a_glob_of_ranks(self, local: Folder) -> None:
        names = ["consolidated.00.safetensors", "consolidated.01.safetensors"]
        local.put({name: written(w=ONE) for name in names})
        paths = [str(Path(local.address, name)) for name in names]
        for files in (paths, f"{local.address}/consolidated.*"):
            with pytest.warns(CheckpointWarning, match="side by side"):
                assert list(xckpt.open(files)) == ["rank_00.w", "rank_01.w"]
        with pytest.warns(CheckpointWarning, match="look like ranks of one model"):
            steps = xckpt.open_steps(paths)["step"]
        assert steps.values.tolist() == [0, 1]  # as the user says


class TestSteps:
    """Steps in a folder follow a word for steps or are all digits, and are finished."""

    @pytest.mark.parametrize(
        "form",
        [
            "checkpoint-{}/model.safetensors",
            "step_{:06}.safetensors",
            "global_step{}/model.safetensors",
            "iter_{:07}/model.safetensors",
            "{}/model.safetensors",
            "epoch=1-step={}.safetensors",
            "ckpt_{}_of_my_run.safetensors",
        ],
    )
    def test_names_of_steps(self, folder: Folder, form: str) -> None:
        steps = (5, 10, 20)
        folder.put({form.format(n): written(w=np.full(3, n, "f4")) for n in steps})
        run = xckpt.open_steps(folder.address, storage_options=folder.options)
        assert run["w"].values[:, 0].tolist() == run["step"].values.tolist() == [5, 10, 20]

    @pytest.mark.parametrize("form", ["model_v{}.safetensors", "shape{}x4.safetensors"])
    def test_other_numbers_are_no_steps(self, local: Folder, form: str) -> None:
        local.put({form.format(n): written(w=ONE) for n in (1, 2)})
        with pytest.raises(IsADirectoryError, match="2 checkpoints") as caught:
            local.open()
        assert "open_steps" not in str(caught.value)
        paths = f"{local.address}/*"
        assert xckpt.open_steps(paths)["step"].values.tolist() == [1, 2]  # as the user says

    def test_versions_of_a_step_are_not_steps(self, local: Folder) -> None:
        names = ["epoch=0-step=100", "epoch=0-step=100-v1", "epoch=1-step=200"]
        local.put({f"{name}.safetensors": written(w=ONE) for name in names})
        with pytest.raises(ValueError, match=r"different numbers .* \[100, 100, 200\]"):
            xckpt.open_steps(f"{local.address}/*")
        with pytest.warns(CheckpointWarning, match=r"no step: 'epoch=0-step=100-v1.safetensors'"):
            run = xckpt.open_steps(local.address)
        assert run["step"].values.tolist() == [100, 200]

    def test_two_series_are_an_error_that_names_both(self, folder: Folder) -> None:
        folder.put({f"{net}_epoch_{n}.safetensors": written(w=ONE) for net in "gd" for n in (1, 2)})
        with pytest.raises(
            ValueError, match=r"several series.*g_epoch_\*.*d_epoch_\*|d_epo.*g_epo"
        ):
            xckpt.open_steps(folder.address, storage_options=folder.options)
        with pytest.raises(
            IsADirectoryError, match=r"open_steps\('.*_epoch_\*.* or .*open_steps\("
        ):
            folder.open()

    def test_weights_one_folder_below_the_step(self, folder: Folder) -> None:
        for step in ("095000", "100000", "0150000"):
            folder.put({f"{step}/pretrained_model/model.safetensors": written(w=ONE)})
            folder.put({f"{step}/training_state/optimizer_state.safetensors": written(w=TWO)})
        run = xckpt.open_steps(folder.address, storage_options=folder.options)
        assert run["step"].values.tolist() == [95000, 100000, 150000]
        assert float(run["w"].max()) == 1

    @pytest.mark.parametrize("form", ["000010{}_adapters.safetensors", "x-00010{}.safetensors"])
    def test_numbers_of_single_libraries(self, local: Folder, form: str) -> None:
        local.put(
            {form.format(n): written(w=ONE) for n in (1, 2)} | {"x.safetensors": written(w=TWO)}
        )
        with (
            pytest.warns(CheckpointWarning, match=r"have no step: 'x.safetensors'")
            if form.startswith("x")
            else nullcontext()
        ):
            run = xckpt.open_steps(local.address)
        assert run["step"].values.tolist() == [101, 102]
        assert "x.safetensors" in str(run.ckpt.summary())

    @pytest.mark.parametrize("join", ["exact", "inner"])
    def test_parts_of_a_model_are_no_steps(self, local: Folder, join: Any) -> None:
        local.put({f"hf_model_000{n}_0.safetensors": written(**{f"w{n}": ONE}) for n in (1, 2)})
        with pytest.raises(ValueError, match=r"no tensor in common: .*open as one with xckpt.open"):
            xckpt.open_steps(f"{local.address}/*", join=join)

    def test_the_epochs_of_burn(self, local: Folder) -> None:
        local.put({f"{kind}-{n}.zt": written(w=ONE) for kind in ("model", "optim") for n in (1, 2)})
        assert xckpt.open_steps(local.address)["step"].values.tolist() == [1, 2]

    @pytest.mark.parametrize(
        "extra",
        [
            {"tmp-checkpoint-30/model.safetensors": written(w=ONE)},
            {"checkpoint-30/trainer_state.json": b"{}"},
            {"checkpoint-30/model.safetensors.tmp": b""},
            {"30.orbax-checkpoint-tmp-1700000000/default/x": b""},
        ],
    )
    def test_steps_that_are_not_finished_are_left_out(
        self, folder: Folder, extra: dict[str, bytes]
    ) -> None:
        folder.put({f"checkpoint-{n}/model.safetensors": written(w=ONE) for n in (10, 20)} | extra)
        with pytest.warns(CheckpointWarning, match="left out, because their writers did not end"):
            run = xckpt.open_steps(folder.address, storage_options=folder.options)
        assert run["step"].values.tolist() == [10, 20]

    def test_a_damaged_step_of_a_folder_is_left_out(self, local: Folder) -> None:
        local.put({f"step-{n}.safetensors": written(w=ONE) for n in (1, 2)})
        local.put({"step-3.safetensors": b""})
        for paths in (local.address, f"{local.address}/*"):
            with pytest.warns(CheckpointWarning, match="a step is left out: .*step-3"):
                assert xckpt.open_steps(paths)["step"].values.tolist() == [1, 2]
        with pytest.raises(FormatError, match="step-3"):
            xckpt.open_steps(sorted(map(str, Path(local.address).iterdir())))

    def test_a_tensor_twice_names_the_steps(self, local: Folder) -> None:
        local.put({f"step-{n}.safetensors": written(w=ONE) for n in (1, 2)})
        with pytest.raises(FormatError, match=r"in two files.*xckpt\.open_steps\('.*/\*'\)"):
            local.open("/*")


class TestCacheOfTheHub:
    """Folders in the Hub's cache lead to their snapshot."""

    @pytest.fixture
    def cache(self, local: Folder) -> Folder:
        repository = "models--org--model"
        for commit in ("aaa", "bbb"):
            local.put({f"{repository}/snapshots/{commit}/model.safetensors": written(w=ONE)})
        local.put({f"{repository}/snapshots/bbb/model.safetensors": written(w=TWO)})
        local.put({f"{repository}/refs/main": b"bbb", f"{repository}/blobs/x": b""})
        return local

    @pytest.mark.parametrize("inside", ["", "/snapshots", "/snapshots/bbb"])
    def test_the_snapshot_of_main(self, cache: Folder, inside: str) -> None:
        assert cache.values(f"/models--org--model{inside}") == {"w": 2}

    def test_a_download_that_did_not_end(self, cache: Folder) -> None:
        snapshot = Path(cache.address, "models--org--model/snapshots/bbb")
        (snapshot / "model.safetensors").unlink()
        (snapshot / "config.json").touch()
        cache.put({"models--org--model/blobs/abc.incomplete": b""})
        for inside in ("", "/model.safetensors"):
            with pytest.raises(
                OSError, match=r"abc\.incomplete.*download did not end|did not end.*abc"
            ):
                xckpt.open(f"{snapshot}{inside}")

    def test_several_snapshots_without_a_reference(self, cache: Folder) -> None:
        Path(cache.address, "models--org--model/refs/main").unlink()
        with pytest.raises(IsADirectoryError, match=r"2 snapshots .*'aaa', 'bbb'"):
            cache.open("/models--org--model")


class TestAddresses:
    """A folder with marks of globs in its name is a folder."""

    @pytest.mark.parametrize("name", ["my [v2] models", "a*b", "what?", "[a]/[b]"])
    def test_a_glob_in_such_a_folder(self, local: Folder, name: str) -> None:
        local.put({f"{name}/a.safetensors": written(w=ONE)})
        assert local.values(f"/{name}/*.safetensors") == {"w": 1}
        assert local.values(f"/{name}") == {"w": 1}

    def test_a_pattern_still_matches_others(self, local: Folder) -> None:
        local.put({f"{name}/x.safetensors": written(**{name: ONE}) for name in "ab"})
        assert local.values("/[ab]/*.safetensors") == {"a": 1, "b": 1}


class TestDescription:
    """Summaries, ``info`` and the Index describe the files alike."""

    def test_every_view_has_it(self, local: Folder, capsys: pytest.CaptureFixture[str]) -> None:
        local.put({"model.safetensors": written(a=ONE), "config.json": b"{}"})
        local.put({"other.safetensors": written(a=TWO), "x.tmp": b""})
        sentence = "not opened, from the same folder: 'other.safetensors'"
        ds = local.open()
        index = xckpt.read_index(local.address)
        assert main(["info", local.address]) == 0
        views = [repr(ds.ckpt), ds.ckpt._repr_html_().replace("&#x27;", "'"), repr(index)]
        assert all(sentence in view for view in [*views, capsys.readouterr().out])
        assert sentence in repr(xckpt.verify(local.address))
        assert main(["info", "--json", local.address]) == 0
        files = json.loads(capsys.readouterr().out)["files"]
        assert files["by"] == "single"
        assert files["competing"] == ["other.safetensors"]
        assert files["unfinished"] == ["x.tmp"]
