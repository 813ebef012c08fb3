"""``hf://organisation/model@revision/file``, against a server that answers as the Hub does."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.storage.hub_server import TOKEN, HubServer, Repository
from xckpt.cli import main
from xckpt.errors import FileChangedError
from xckpt.storage import hub as storage_hub
from xckpt.storage import hub_url, objects, open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: pip install 'xckpt[remote]'")
save = pytest.importorskip("safetensors.numpy").save

MODEL = "hf://org/model"
WIDTH = 256


def shards(count: int, width: int = WIDTH) -> dict[str, bytes]:
    """Return the files of a model: shards, their index, and what lies next to them."""
    files: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    numbers = np.random.default_rng(count)
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        weights = {
            f"model.layers.{number}.{module}.weight": numbers.standard_normal(
                (32, width), dtype=np.float32
            )
            for module in ("down", "up")
        }
        files[name] = save(weights)
        weight_map |= dict.fromkeys(weights, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    return {
        ".gitattributes": b"*.safetensors filter=lfs",
        "README.md": b"# A model",
        "config.json": b'{"model_type": "llama"}',
        **files,
        "model.safetensors.index.json": json.dumps(index).encode(),
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    from huggingface_hub import constants

    with HubServer() as server:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        server.repositories["org/model"] = Repository()
        yield server
        forget()


@pytest.fixture
def files(hub: HubServer) -> dict[str, bytes]:
    contents = shards(4)
    hub.repositories["org/model"].push(contents)
    return contents


@pytest.fixture
def folder(files: dict[str, bytes], tmp_path: Path) -> Path:
    """The same model on this machine."""
    for name, data in files.items():
        path = tmp_path / "model" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "model"


def forget() -> None:
    """Be as a new process, which has only what is kept on disk."""
    for pool in (
        storage_hub._commits,
        storage_hub._folders,
        storage_hub._small,
        objects._addresses,
    ):
        pool.clear()


def opened(url: str = MODEL, **options: Any) -> xr.Dataset:
    return xr.open_dataset(url, engine="safetensors", **options)


class TestRequests:
    @pytest.mark.parametrize(("count", "width"), [(4, 8192), (163, WIDTH)])
    def test_a_model_opens_with_two_requests_per_shard(
        self, hub: HubServer, count: int, width: int
    ) -> None:
        hub.repositories["org/model"].push(shards(count, width))
        assert len(opened().variables) == 2 * count
        # The commit, the listing, and two small files, to which the Hub redirects.
        small = 4 if count < 10 else 3
        assert hub.count("hub") == 2 + small + count
        assert hub.count("copies") == count + (small == 3)
        assert hub.nbytes_sent <= count * (128 << 10) + 100_000

    def test_cached_answers_are_not_requested(
        self, hub: HubServer, files: dict[str, bytes]
    ) -> None:
        opened()
        forget()
        hub.requests.clear()
        opened()
        assert (hub.count("hub"), hub.count("copies")) == (2, 0)
        forget()
        hub.requests.clear()
        opened(f"{MODEL}@{hub.repositories['org/model'].revisions['main']}")
        assert (hub.count("hub"), hub.count("copies")) == (1, 0)

    def test_a_row_is_one_request_for_its_bytes(
        self, hub: HubServer, files: dict[str, bytes]
    ) -> None:
        ds = opened()
        hub.requests.clear()
        hub.nbytes_sent = 0
        ds["model.layers.2.up.weight"][3].compute()
        assert [request.host for request in hub.requests] == ["copies"]
        assert hub.nbytes_sent == 4 * WIDTH

    def test_a_long_listing_comes_in_pages(self, hub: HubServer, files: dict[str, bytes]) -> None:
        hub.behaviour.page = 3
        assert len(opened().variables) == 8

    def test_another_process_lists_nothing(self, hub: HubServer, files: dict[str, bytes]) -> None:
        source = pickle.dumps(open_source(f"{MODEL}/model-00001-of-00004.safetensors"))
        forget()
        hub.requests.clear()
        data = pickle.loads(source).read(10, 20)
        assert data == files["model-00001-of-00004.safetensors"][10:30]
        assert (hub.count("hub"), hub.count("copies")) == (1, 1)


class TestOpening:
    def test_values_equal_the_local_ones(self, hub: HubServer, folder: Path) -> None:
        xr.testing.assert_equal(opened().compute(), xr.open_dataset(folder).compute())
        remote = xckpt.stats(MODEL, progress=False)
        xr.testing.assert_equal(remote, xckpt.stats(folder, progress=False))
        table = xckpt.compare(folder, MODEL, progress=False).ckpt.table()
        assert set(table["status"]) == {"same"}

    @pytest.mark.parametrize(
        ("path", "count"),
        [
            ("", 8),
            ("/", 8),
            ("@main", 8),
            ("@refs/pr/1", 8),
            ("@a%2Fb/model.safetensors.index.json", 8),
            ("@main/model-00001-of-00004.safetensors", 2),
            ("/model-*.safetensors", 8),
        ],
    )
    def test_every_spelling_of_a_location(
        self, hub: HubServer, files: dict[str, bytes], path: str, count: int
    ) -> None:
        for revision in ("refs/pr/1", "a/b"):
            hub.repositories["org/model"].push(files, revision)
        ds = xr.open_dataset(MODEL + path)  # the engine is found
        assert len(ds.variables) == count
        commit = hub.repositories["org/model"].revisions["main"]
        assert ds.encoding["source"].startswith(f"{MODEL}@")
        assert (commit in ds.encoding["source"]) == ("refs" not in path and "%" not in path)

    @pytest.mark.parametrize(
        ("page", "url"),
        [
            ("org/model", "org/model@main"),
            ("org/model/?library=transformers#files", "org/model@main"),
            ("org/model/tree/v1.0", "org/model@v1.0"),
            ("org/model/tree/refs%2Fpr%2F1/a/b", "org/model@refs%2Fpr%2F1/a/b"),
            ("org/model/blob/main/a/b%20c.gguf?x=1", "org/model@main/a/b c.gguf"),
            ("datasets/org/data/tree/main", "datasets/org/data@main"),
            ("org/model/resolve/main/model.gguf", None),
            ("org", None),
        ],
    )
    def test_pages_of_a_browser(self, page: str, url: str | None) -> None:
        assert hub_url(f"https://huggingface.co/{page}") == (url and f"hf://{url}")

    def test_a_folder_of_a_repository(self, hub: HubServer) -> None:
        inside = {f"text_encoder/{name}": data for name, data in shards(2).items()}
        hub.repositories["org/model"].push({"model_index.json": b"{}", **inside})
        ds = xr.open_dataset(f"{MODEL}/text_encoder")
        assert len(ds.variables) == 4
        assert ds.attrs["config"] == {"model_type": "llama"}

    def test_other_kinds_of_repositories(self, hub: HubServer) -> None:
        hub.repositories["datasets/org/data"] = Repository()
        hub.repositories["datasets/org/data"].push(shards(2))
        ds = opened("hf://datasets/org/data")
        assert ds.encoding["source"].startswith("hf://datasets/org/data@")
        assert len(ds.compute().variables) == 4

    def test_small_files_in_git_itself(self, hub: HubServer) -> None:
        data = {"w": np.arange(100, dtype=np.float32)}
        hub.repositories["org/model"].push({"a b#%20.safetensors": save(data)})
        np.testing.assert_array_equal(opened()["w"][50:], data["w"][50:])
        assert hub.count("copies") == 0

    def test_the_engine_chooses_among_several(self, hub: HubServer) -> None:
        few = {"model.npz": b"", "weights.safetensors": save({"w": np.ones(2)})}
        hub.repositories["org/model"].push({**few, "other.zt": b""})
        with pytest.raises(IsADirectoryError, match=r"3 checkpoints .* open one"):
            xckpt.stats(MODEL)
        assert list(opened()) == ["w"]

    @pytest.mark.parametrize(
        "name", ["awq_gemm_group32", "bnb_nf4_nested", "fp8_block_deepseek_shards"]
    )
    def test_quantized_models(self, hub: HubServer, golden: Path, name: str) -> None:
        path = golden / "hf-quantized" / name
        hub.repositories["org/model"].push(
            {file.name: file.read_bytes() for file in path.iterdir() if "expected" not in file.name}
        )
        xr.testing.assert_identical(
            opened().compute().drop_attrs(),
            xr.open_dataset(path, engine="safetensors").compute().drop_attrs(),
        )
        forget()
        hub.requests.clear()
        opened()  # also the parts that describe others
        assert (hub.count("hub"), hub.count("copies")) == (2, 0)


class TestRevisions:
    def test_a_branch_that_moves(
        self, hub: HubServer, files: dict[str, bytes], later: Callable[[float], None]
    ) -> None:
        before = opened()
        hub.repositories["org/model"].push(shards(2))
        assert len(opened().variables) == len(before.variables)
        later(20)
        assert len(opened().variables) == 4
        # Open files stay at their commit.
        shard = save({key: before[key].values for key in list(before)[:2]})
        assert shard == files["model-00001-of-00004.safetensors"]

    def test_a_commit_that_is_gone(self, hub: HubServer, files: dict[str, bytes]) -> None:
        ds = opened()
        hub.repositories["org/model"].commits.clear()
        objects._addresses.clear()
        with pytest.raises(FileChangedError, match="no longer there"):
            ds["model.layers.0.up.weight"].compute()

    @pytest.mark.parametrize("header", ["X-Repo-Commit", "X-Linked-ETag", "X-Linked-Size"])
    def test_another_file_than_was_listed(
        self, hub: HubServer, files: dict[str, bytes], header: str
    ) -> None:
        hub.behaviour.tampered = {header: "0" * 64}
        with pytest.raises(FileChangedError, match=header):
            open_source(f"{MODEL}/model-00001-of-00004.safetensors").read(0, 8)


class TestRedirects:
    def test_addresses_that_expire_are_renewed(self, hub: HubServer, folder: Path) -> None:
        hub.behaviour.lasting = 2
        ds = opened()
        for name, expected in xr.open_dataset(folder).variables.items():
            for row in (0, 9, 31):
                np.testing.assert_array_equal(ds.variables[name][row], expected[row])
        assert all(used <= 2 for used in hub.signed.values())

    def test_many_readers_share_a_renewal(self, hub: HubServer, files: dict[str, bytes]) -> None:
        name = "model-00001-of-00004.safetensors"
        source = open_source(f"{MODEL}/{name}")
        with ThreadPoolExecutor(16) as threads:
            read = list(threads.map(lambda at: bytes(source.read(at, 100)), range(0, 16000, 500)))
        assert read == [files[name][at : at + 100] for at in range(0, 16000, 500)]
        assert sum("/resolve/" in request.path for request in hub.requests) == 1

    @pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://a/?Signature=s3cret", "//["])
    def test_unsafe_addresses(self, hub: HubServer, files: dict[str, bytes], location: str) -> None:
        hub.behaviour.location = location
        with pytest.raises(OSError, match="not safe") as caught:
            open_source(f"{MODEL}/model-00001-of-00004.safetensors").read(0, 8)
        assert "s3cret" not in str(caught.value)

    def test_circular_redirects(self, hub: HubServer, files: dict[str, bytes]) -> None:
        name = "model-00001-of-00004.safetensors"
        commit = hub.repositories["org/model"].revisions["main"]
        hub.behaviour.location = f"/org/model/resolve/{commit}/{name}"
        with pytest.raises(OSError, match="circles"):
            open_source(f"{MODEL}/{name}").read(0, 8)


class TestToken:
    @pytest.mark.parametrize("source", ["environment", "file", "option"])
    def test_the_token_is_sent_to_the_hub_only(
        self, hub: HubServer, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.repositories["org/model"].private = True
        hub.repositories["org/model"].push(shards(2))
        options = {}
        if source == "environment":
            monkeypatch.setenv("HF_TOKEN", TOKEN)
        elif source == "file":
            (tmp_path / "token").write_text(TOKEN)
        else:
            options = {"token": TOKEN}
        hub.behaviour.lasting = 1
        ds = opened(storage_options=options)
        ds.compute()
        assert {r.token for r in hub.requests if r.host == "hub"} == {f"Bearer {TOKEN}"}
        assert {r.token for r in hub.requests if r.host == "copies"} == {None}
        assert TOKEN not in repr(ds.encoding) + repr(ds.attrs) + ds._repr_html_()
        if source != "option":
            assert TOKEN.encode() not in pickle.dumps(ds)
        cache_files = Path(os.environ["XCKPT_CACHE_DIR"]).rglob("*")
        assert not any(
            TOKEN.encode() in path.read_bytes() for path in cache_files if path.is_file()
        )


class TestRefusals:
    @pytest.mark.parametrize(
        ("place", "error", "text"),
        [
            ("org/none", FileNotFoundError, "org/none cannot be found: check its name; if it is"),
            ("org/private", FileNotFoundError, "if it is private, log in with `hf auth login`"),
            ("org/gated", PermissionError, "gated: ask for access at http.*/org/gated, and log in"),
            ("org/model@v2", FileNotFoundError, "no revision 'v2': see http.*/branches"),
            ("org/model/config.jsn", FileNotFoundError, "did you mean 'config.json'"),
            ("org/model/a/b", FileNotFoundError, "org/model has no 'a'"),
            ("gpt2", ValueError, "a repository is hf://organisation/name"),
        ],
    )
    def test_refusals_explain_what_to_do(
        self, hub: HubServer, files: dict[str, bytes], place: str, error: type, text: str
    ) -> None:
        hub.repositories |= {
            "org/private": Repository(hub.repositories["org/model"].commits, private=True),
            "org/gated": Repository(gated=True),
        }
        hub.repositories["org/gated"].push(files)
        for open_it in (opened, xr.open_dataset, xckpt.stats):
            with pytest.raises(error, match=text):
                open_it(f"hf://{place}")

    def test_a_wrong_token(self, hub: HubServer, files: dict[str, bytes]) -> None:
        with pytest.raises(PermissionError, match="token is not valid") as caught:
            opened(storage_options={"token": "hf_wrong"})
        assert "hf_wrong" not in str(caught.value)

    def test_writing_is_refused(self, hub: HubServer) -> None:
        with pytest.raises(xckpt.UnsupportedError, match=r"cannot write.*hf upload"):
            xckpt.save(xr.Dataset({"w": ("x", np.ones(3))}), f"{MODEL}/w.safetensors")
        assert not hub.requests

    def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        for open_it in (opened, xr.open_dataset):
            with pytest.raises(ImportError, match=r"pip install 'xckpt\[remote\]'"):
                open_it(MODEL)

    def test_offline(
        self, hub: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from huggingface_hub import errors, utils

        def refuse(*_: Any, **__: Any) -> None:
            raise errors.OfflineModeIsEnabled("offline")

        session: Any = type(utils.get_session())  # of httpx, and earlier of requests
        method = "request" if session.__module__.startswith("requests") else "stream"
        monkeypatch.setattr(session, method, refuse)
        with pytest.raises(OSError, match="HF_HUB_OFFLINE is set"):
            opened()

    @pytest.mark.parametrize("answer", ["{}", "[1]", '[{"path": "a", "type": "file"}]', "<html>"])
    def test_invalid_answers(self, hub: HubServer, files: dict[str, bytes], answer: str) -> None:
        hub.behaviour.listing = answer
        with pytest.raises(OSError, match=r"the Hub (lists .* as a file|does not answer)"):
            opened()


def _begin(handler: Any, **headers: str) -> None:
    handler.send_response(200)
    for name, text in headers.items():
        handler.send_header(name.replace("_", "-"), text)
    handler.end_headers()


def _endless(handler: Any) -> None:
    _begin(handler, Transfer_Encoding="chunked")
    while True:
        handler.wfile.write(b"10000\r\n" + b" " * (1 << 16) + b"\r\n")


def _bomb(handler: Any) -> None:
    body = gzip.compress(bytes(64 << 20), 9)
    _begin(handler, Content_Encoding="gzip", Content_Length=str(len(body)))
    handler.wfile.write(body)


def _deep(handler: Any) -> None:
    body = b"[" * 200_000 + b"]" * 200_000
    _begin(handler, Content_Length=str(len(body)))
    handler.wfile.write(body)


def _slow(handler: Any) -> None:
    _begin(handler, Content_Length="1000")
    for _ in range(1000):
        handler.wfile.write(b" ")
        time.sleep(0.1)


def _same_page(handler: Any) -> None:
    listed = [{"type": "file", "path": "a.zt", "size": 1, "oid": "0" * 40}]
    _page(handler, listed)


def _new_page(handler: Any) -> None:
    _send_page(handler, _many_files().replace(b"@", str(time.monotonic_ns()).encode()))


@cache
def _many_files() -> bytes:
    files = ",".join(
        [f'{{"type":"file","path":"@{n}","size":1,"oid":"0"}}' for n in range(260_000)]
    )
    return f"[{files}]".encode()


def _page(handler: Any, listed: Any) -> None:
    _send_page(handler, json.dumps(listed).encode())


def _send_page(handler: Any, body: bytes) -> None:
    link = f'<http://127.0.0.1{handler.path}>; rel="next"'
    _begin(handler, Content_Length=str(len(body)), Link=link)
    handler.wfile.write(body)


class TestHostileAnswers:
    COMMIT = f"{MODEL}@{'a' * 40}"

    @pytest.mark.parametrize(
        ("url", "answer", "text"),
        [
            (MODEL, _endless, "sends more than 67108864 bytes"),
            (COMMIT, _endless, "sends more than 67108864 bytes"),
            (MODEL, _bomb, "sends its answer compressed"),
            (MODEL, _deep, "does not answer in JSON"),
            (COMMIT, _deep, "does not answer in JSON"),
            (COMMIT, _same_page, "lists a folder without end; 1 files so far"),
            (COMMIT, _new_page, "lists a folder without end; 1040000 files so far"),
        ],
    )
    def test_hostile_answers_are_errors_in_bounded_time_and_memory(
        self, hub: HubServer, url: str, answer: Any, text: str
    ) -> None:
        hub.behaviour.hostile = answer
        start = time.monotonic()
        with pytest.raises(OSError, match=text) as caught:
            opened(url)
        assert url in str(caught.value)
        assert time.monotonic() - start < 20

    def test_a_slow_answer_is_a_time_out(self, hub: HubServer) -> None:
        hub.behaviour.hostile = _slow
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=MODEL):
            opened(storage_options={"timeout": 0.5})
        assert time.monotonic() - start < 5

    def test_redirects_to_another_host_are_not_followed(self, hub: HubServer) -> None:
        def redirect(handler: Any) -> None:
            handler.send_response(302)
            handler.send_header("Location", f"{hub.copies}{handler.path}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        hub.behaviour.hostile = redirect
        with pytest.raises(OSError, match="does not answer in JSON"):
            opened(storage_options={"token": TOKEN})
        assert hub.count("copies") == 0


class TestBusyServers:
    @pytest.mark.parametrize("host", ["hub", "copies"])
    def test_busy_servers_are_retried(self, hub: HubServer, folder: Path, host: str) -> None:
        hub.behaviour.busy[host] = 3
        ds = opened()
        hub.behaviour.busy[host] = 3
        objects._addresses.clear()
        xr.testing.assert_equal(ds.compute(), xr.open_dataset(folder).compute())

    def test_retry_after_is_obeyed(self, hub: HubServer, files: dict[str, bytes]) -> None:
        hub.behaviour.busy["hub"] = 1
        hub.behaviour.retry_after = "1"
        before = time.monotonic()
        opened()
        assert time.monotonic() - before >= 1

    @pytest.mark.parametrize("commit", ["main", "known"])
    @pytest.mark.parametrize("header", ["retry_after", "rate_limit"])
    def test_a_long_retry_after_is_not_obeyed(
        self, hub: HubServer, files: dict[str, bytes], header: str, commit: str
    ) -> None:
        if commit == "known":
            commit = hub.repositories["org/model"].revisions["main"]
        hub.behaviour.busy["hub"] = 100
        setattr(hub.behaviour, header, {"retry_after": "240"}.get(header, '"api";r=0;t=240'))
        with pytest.raises(TimeoutError, match=r"429.*with a token.*240 seconds: try again"):
            opened(f"{MODEL}@{commit}")

    def test_truncated_bodies_are_retried(self, hub: HubServer, folder: Path) -> None:
        hub.behaviour.cut = 6
        xr.testing.assert_equal(opened().compute(), xr.open_dataset(folder).compute())
        assert hub.behaviour.cut == 0


class TestCommands:
    def test_commands_in_this_process(
        self, hub: HubServer, files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["info", f"{MODEL}@main", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["tensors"]) == 8

    def test_a_killed_command(self, hub: HubServer, folder: Path, tmp_path: Path) -> None:
        hub.repositories["org/model"].private = True
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        target = tmp_path / "copy.zt"
        command = [sys.executable, "-m", "xckpt", "convert", MODEL, str(target)]
        hub.behaviour.stuck_after = 6
        with subprocess.Popen(command, env=environment) as process:  # noqa: S603
            while not hub.is_stuck.wait(0.05):
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
        assert not target.exists()
        hub.behaviour.stuck_after = None
        hub.closing.set()
        xckpt.convert(MODEL, target, storage_options={"token": TOKEN}, progress=False)
        xr.testing.assert_equal(xr.open_dataset(target), xr.open_dataset(folder))
