"""S3 over its protocol: numbers of requests, and their failures.

Google Cloud Storage has the same protocol, with other credentials.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.request import OpenerDirector

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.storage.s3_server import BUCKET, S3Server, require_packages
from tests.test_stacking import zt
from xckpt.errors import FileChangedError
from xckpt.storage import objects, open_source, stores
from xckpt.storage.objects import Bucket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

require_packages()

BIG = np.arange(1 << 18, dtype="<f4").reshape(512, 512)
ARRAYS = {"big": BIG} | {f"layers.{n}.w": np.full((3, 40), n, "<f4") for n in range(300)}
KEY = f"s3://{BUCKET}/m.zt"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        server.put(**{"m.zt": zt(ARRAYS), "empty": b""})
        yield server


@pytest.fixture
def s3(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    monkeypatch.setenv("XCKPT_CACHE_DIR", str(tmp_path))
    server.latency = server.failing = 0
    server.refuse = lambda _path, _range: False
    server.region, server.says_region = None, True
    stores.regions.clear()
    server.forget()
    return server


def opened(s3: S3Server, url: str = KEY, **options: Any) -> xr.Dataset:
    return xr.open_dataset(url, engine="ztensor", storage_options=s3.options, **options)


def test_ten_thousand_tensors_take_three_requests_and_then_one(s3: S3Server) -> None:
    arrays = {f"t{n}": np.full((2, 2), n, "<f4") for n in range(10_000)}
    s3.put(**{"many.zt": zt(arrays)})
    ds = opened(s3, f"s3://{BUCKET}/many.zt")
    assert len(ds.variables) == 10_000
    assert [method for method, _, _ in s3.requests] == ["GET"] * 3
    s3.forget()
    again = opened(s3, f"s3://{BUCKET}/many.zt")
    assert s3.requests == [("GET", f"/{BUCKET}/many.zt", "bytes=0-65535")]
    assert [v.data.name for v in again.variables.values()] == [
        v.data.name for v in ds.variables.values()
    ]


def test_a_row_is_a_request_for_its_bytes(s3: S3Server) -> None:
    ds = opened(s3)
    s3.forget()
    np.testing.assert_array_equal(ds["big"][77], BIG[77])
    assert len(s3.requests) == 1
    assert s3.nbytes_sent == BIG[77].nbytes


def test_reading_all_reads_each_byte_once(s3: S3Server) -> None:
    ds = opened(s3)
    s3.forget()
    ds.load()
    ranges = sorted(tuple(map(int, r[6:].split("-"))) for _, _, r in s3.requests if r is not None)
    assert all(a[1] < b[0] for a, b in pairwise(ranges))
    # Between small tensors are a few bytes that align them.
    assert len(ranges) < 4
    assert ds.nbytes <= s3.nbytes_sent < 1.02 * ds.nbytes
    for name, values in ARRAYS.items():
        np.testing.assert_array_equal(ds.variables[name], values)


def test_occasional_failures_are_retried(s3: S3Server) -> None:
    s3.failing, before = 0.1, s3.faults
    ds = opened(s3)
    for name, values in list(ARRAYS.items())[:120]:  # one by one: all of them are one request
        np.testing.assert_array_equal(ds.variables[name], values)
    assert s3.faults - before > 5


def test_a_range_that_always_fails_is_an_error(s3: S3Server) -> None:
    ds = opened(s3)
    s3.refuse = lambda _path, byte_range: byte_range is not None
    with pytest.raises(OSError, match=r"m\.zt") as caught:
        ds["big"].compute()
    assert not isinstance(caught.value, FileChangedError | FileNotFoundError)


def test_an_object_that_changed(s3: S3Server) -> None:
    name = "changing.zt"
    s3.put(**{name: zt({"a": np.zeros(1000, "<f4")})})
    ds = opened(s3, f"s3://{BUCKET}/{name}")
    pickled = pickle.dumps(ds)
    s3.put(**{name: zt({"a": np.ones(1000, "<f4")})})
    for dataset in (ds, pickle.loads(pickled)):
        with pytest.raises(FileChangedError, match="ETag"):
            dataset["a"].compute()
    np.testing.assert_array_equal(opened(s3, f"s3://{BUCKET}/{name}")["a"], np.ones(1000))


def test_a_store_that_is_silent_is_a_time_out(s3: S3Server) -> None:
    options = {**s3.options, "timeout": 0.6}
    source = open_source(KEY, storage_options=options)
    s3.latency = 5
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"'timeout'.*m\.zt"):
        source.read(0, 100)
    assert time.monotonic() - start < 4


def test_a_missing_bucket_is_named_as_one(s3: S3Server) -> None:
    with pytest.raises(FileNotFoundError, match="no such bucket; check its name"):
        open_source("s3://no-such-bucket/m.zt", storage_options=s3.options)


def test_missing_objects_are_errors(s3: S3Server) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.zt"):
        opened(s3, f"s3://{BUCKET}/none.zt")
    assert open_source(f"s3://{BUCKET}/empty", storage_options=s3.options).size == 0
    with pytest.raises(ValueError, match="empty"):
        opened(s3, f"s3://{BUCKET}/empty")
    s3.put(**{"folder/m.zt": b"x"})
    for url in (f"s3://{BUCKET}/folder", f"s3://{BUCKET}/folder/"):
        with pytest.raises(IsADirectoryError, match=rf"its files are s3://{BUCKET}/folder/\*"):
            open_source(url, storage_options=s3.options)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("g-*.zt", ["a", "b"]),
        ("*/g-3.zt", ["c"]),
        ("r/**/*.zt", ["c", "d"]),
        ("**/g-*.zt", ["a", "b", "c", "d"]),
    ],
)
def test_globs_of_objects(s3: S3Server, pattern: str, names: list[str]) -> None:
    places = {"g-2.zt": "a", "g-10.zt": "b", "r/g-3.zt": "c", "r/x/g-4.zt": "d"}
    s3.put(**{path: zt({name: np.ones(2)}) for path, name in places.items()})
    ds = opened(s3, f"s3://{BUCKET}/{pattern}")
    assert sorted(map(str, ds)) == names
    np.testing.assert_array_equal(ds[names[-1]], [1, 1])


@pytest.mark.parametrize(
    "key", ["a b", "a%20b", "a?b", "a#b", "a//b/c", "/a", "//a", "a+b=c", "\u00fc.zt", "a\\b", "'"]
)
def test_odd_names_of_objects(s3: S3Server, key: str) -> None:
    s3.put(**{key: key.encode(), "a/b/c": b"wrong", "a": b"wrong", "b/c": b"wrong"})
    source = open_source(f"s3://{BUCKET}/{key}", storage_options=s3.options)
    assert bytes(source.read(0, source.size)) == key.encode()


@pytest.mark.parametrize("key", ["a/../b", "a/./b"])
def test_names_that_lead_elsewhere_are_errors(s3: S3Server, key: str) -> None:
    s3.put(**{"b": b"wrong", "a/b": b"wrong"})
    with pytest.raises(ValueError, match=key):
        open_source(f"s3://{BUCKET}/{key}", storage_options=s3.options)


class TestOptions:
    def test_options_of_other_libraries_are_accepted(self, s3: S3Server) -> None:
        endpoint = {"endpoint_url": s3.url}
        credentials = {"key": "test", "secret": "test", "token": None}
        for options in (
            {**credentials, **endpoint, "use_listings_cache": False},
            {**credentials, "client_kwargs": {**endpoint, "region_name": "eu-west-1"}},
            {"anon": True, **endpoint},
            {"aws_access_key_id": "test", "aws_secret_access_key": "test", **endpoint},
            {"skip_signature": True, "endpoint": s3.url, "config_kwargs": {"retries": {}}},
            {"client_kwargs": {"aws_access_key_id": "a", "aws_secret_access_key": "b"}, **endpoint},
        ):
            assert open_source(KEY, storage_options=options).size > 0

    def test_an_unknown_option_lists_the_known_ones(self, s3: S3Server) -> None:
        with pytest.raises(ValueError, match=r"unknown key 'seceret' .* s3.*secret.*S3Config"):
            open_source(KEY, storage_options={**s3.options, "seceret": "x"})

    def test_the_environment(self, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
        assert open_source(KEY).size > 0

    @pytest.mark.parametrize("source", ["option", "variable", "default"])
    def test_a_profile(
        self, s3: S3Server, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        name = "default" if source == "default" else "mine"
        path = tmp_path / "credentials"
        path.write_text(f"[{name}]\naws_access_key_id = AKIDMINE\naws_secret_access_key = x\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
        options: dict[str, Any] = {"endpoint_url": s3.url}
        if source == "option":
            options["profile"] = "mine"
        elif source == "variable":
            monkeypatch.setenv("AWS_PROFILE", "mine")
        assert open_source(KEY, storage_options=options).size > 0
        assert "AKIDMINE" in s3.authorizations[-1]
        with pytest.raises(ValueError, match="profile"):
            open_source(KEY, storage_options={**options, "profile": "none"})
        monkeypatch.setitem(sys.modules, "boto3", None)
        stores._stores.clear()
        objects._addresses.clear()
        if source != "default":
            with pytest.raises(ImportError, match="pip install boto3"):
                open_source(KEY, storage_options={**options, "retries": 2})

    def test_a_bucket_in_another_region(
        self, s3: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        s3.region = "eu-north-1"
        assert open_source(KEY, storage_options=s3.options).size > 0
        assert "/eu-north-1/s3/" in s3.authorizations[-1]
        s3.forget()
        assert open_source(KEY, storage_options=s3.options).size > 0
        assert len(s3.requests) == 1, "the region is remembered"
        # Where the answer does not contain it, the bucket is asked for.
        stores.regions.clear()
        connect = OpenerDirector.open

        def at_home(self: OpenerDirector, request: Any, *args: Any, **options: Any) -> Any:
            assert request.full_url.startswith("https://s3.amazonaws.com/")
            request.full_url = s3.url + request.full_url[len("https://s3.amazonaws.com") :]
            return connect(self, request, *args, **options)

        monkeypatch.setattr(OpenerDirector, "open", at_home)
        s3.says_region = False
        assert open_source(KEY, storage_options=s3.options).size > 0


class TestWriting:
    def test_a_checkpoint(self, s3: S3Server) -> None:
        ds = opened(s3)[["big"]]
        url = f"s3://{BUCKET}/written/m.safetensors"
        xckpt.save(ds, url, storage_options=s3.options, progress=False)
        again = xr.open_dataset(url, engine="safetensors", storage_options=s3.options)
        np.testing.assert_array_equal(again["big"], BIG)
        with pytest.raises(FileExistsError, match="overwrite=True"):
            xckpt.save(ds, url, storage_options=s3.options, progress=False)
        xckpt.save(ds + 1, url, storage_options=s3.options, progress=False, overwrite=True)
        again = xr.open_dataset(url, engine="safetensors", storage_options=s3.options)
        np.testing.assert_array_equal(again["big"], BIG + 1)

    def test_shards_that_are_replaced(self, s3: S3Server) -> None:
        url = f"s3://{BUCKET}/shards/m.safetensors"
        ds = opened(s3)[["big", "layers.0.w"]]
        for number in range(2):
            xckpt.save(
                ds + number,
                url,
                storage_options=s3.options,
                progress=False,
                overwrite=True,
                max_shard_size=1 << 19,
            )
            again = xr.open_dataset(
                f"{url}.index.json", engine="safetensors", storage_options=s3.options
            )
            np.testing.assert_array_equal(again["big"], BIG + number)
        remaining = Bucket(url, s3.options).glob(f"{BUCKET}/shards/*")
        assert not [path for path in remaining if "xckpt" in path]

    @pytest.mark.skipif(sys.platform == "win32", reason="a process cannot send SIGINT to itself")
    @pytest.mark.parametrize("moment", range(1, 9))
    def test_ctrl_c_leaves_no_object_or_comes_too_late(self, s3: S3Server, moment: int) -> None:
        """Requests of an upload in parts: the beginning, two parts, and the end."""
        ds = xr.Dataset({"w": ("x", np.zeros(9 << 18))})  # 18 MiB
        url = f"s3://{BUCKET}/interrupted/{moment}.zt"
        options = {**s3.options, "retries": 0}
        s3.latency = 0.1
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.12 * moment, os.kill, (os.getpid(), signal.SIGINT))
        is_saved = False
        try:
            timer.start()
            xckpt.save(ds, url, storage_options=options, progress=False)
            is_saved = True
            timer.join()
            time.sleep(0.1)
        except KeyboardInterrupt:
            pass
        finally:
            timer.cancel()
            signal.signal(signal.SIGINT, before)
        time.sleep(0.5)  # what an abandoned upload would need
        s3.latency = 0
        assert Bucket(url, s3.options).exists(url.partition("://")[2]) == is_saved
        if is_saved:
            again = xr.open_dataset(url, engine="ztensor", storage_options=s3.options)
            np.testing.assert_array_equal(again["w"], ds["w"])

    def test_a_refusal_names_the_url(self, s3: S3Server) -> None:
        s3.refuse = lambda path, _range: "refused" in path
        with pytest.raises(OSError, match=r"refused\.zt"):
            xckpt.save(
                opened(s3)[["big"]],
                f"s3://{BUCKET}/refused.zt",
                storage_options={**s3.options, "retries": 0},
                progress=False,
            )


class TestSignedAddresses:
    def test_an_object_without_credentials(self, s3: S3Server) -> None:
        import boto3

        credentials = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        client = boto3.client("s3", "us-east-1", endpoint_url=s3.url, **credentials)
        url = client.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": "m.zt"})
        ds = xr.open_dataset(url, engine="ztensor")
        np.testing.assert_array_equal(ds["big"][7], BIG[7])
        assert {method for method, _, _ in s3.requests} == {"GET"}
        assert not any(s3.authorizations)


class TestGoogle:
    def options(self, s3: S3Server) -> dict[str, Any]:
        return {"token": "ya29.token", "endpoint_url": s3.url}

    def test_reading_and_writing(self, s3: S3Server) -> None:
        options = self.options(s3)
        ds = xckpt.open(f"gs://{BUCKET}/m.zt", storage_options=options)
        np.testing.assert_array_equal(ds["big"][7], BIG[7])
        assert set(s3.authorizations) == {"Bearer ya29.token"}
        url = f"gs://{BUCKET}/google/m.safetensors"
        xckpt.save(ds[["big"]], url, storage_options=options, progress=False)
        again = xckpt.open(f"gs://{BUCKET}/google/*.safetensors", storage_options=options)
        np.testing.assert_array_equal(again["big"], BIG)
        with pytest.raises(FileNotFoundError, match=r"gs://bucket/none\.zt"):
            xckpt.open(f"gs://{BUCKET}/none.zt", storage_options=options)

    @pytest.mark.parametrize("source", ["token", "variable", "account"])
    def test_emulators(self, s3: S3Server, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
        account = {"gcs_base_url": s3.url, "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        options: dict[str, Any] = {"token": account if source == "account" else "anon"}
        if source == "token":
            options["endpoint_url"] = s3.url
        if source == "variable":
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", s3.url.removeprefix("http://"))
        assert open_source(f"gs://{BUCKET}/m.zt", storage_options=options).size > 0
