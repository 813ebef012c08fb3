"""S3 over its protocol: how many requests there are, and what happens when they fail."""

from __future__ import annotations

import pickle
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

from tests.storage.s3_server import BUCKET, S3Server
from tests.test_stacking import zt
from xckpt.errors import FileChangedError
from xckpt.storage import open_source
from xckpt.storage.requests import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

for package in ("s3fs", "moto", "flask", "flask_cors"):
    pytest.importorskip(package, reason=f"needs {package}: pip install s3fs 'moto[server]'")

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
    server.forbid = lambda _query: False
    server.forget()
    return server


def opened(s3: S3Server, url: str = KEY, **options: Any) -> xr.Dataset:
    return xr.open_dataset(url, engine="ztensor", storage_options=s3.options, **options)


def test_ten_thousand_tensors_are_three_requests_and_then_one(s3: S3Server) -> None:
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
    asked = sorted(tuple(map(int, r[6:].split("-"))) for _, _, r in s3.requests if r is not None)
    assert all(a[1] < b[0] for a, b in pairwise(asked))
    # Between small tensors are a few bytes that align them.
    assert len(asked) < 4
    assert ds.nbytes <= s3.nbytes_sent < 1.02 * ds.nbytes
    for name, values in ARRAYS.items():
        np.testing.assert_array_equal(ds.variables[name], values)


def test_requests_that_fail_now_and_then_do_not_show(s3: S3Server) -> None:
    s3.failing, before = 0.1, s3.faults
    ds = opened(s3)
    for name, values in list(ARRAYS.items())[:120]:  # one by one: all of them are one request
        np.testing.assert_array_equal(ds.variables[name], values)
    assert s3.faults - before > 5


def test_a_range_that_is_never_there_is_an_error(s3: S3Server) -> None:
    ds = opened(s3)
    s3.refuse = lambda _path, asked: asked is not None
    with pytest.raises(OSError, match=r"m\.zt") as caught:
        ds["big"].compute()
    assert not isinstance(caught.value, FileChangedError | FileNotFoundError)


def test_where_signed_addresses_are_refused_none_is_used_again(s3: S3Server) -> None:
    name, data = "refused", bytes(range(256))
    s3.put(**{name: data})
    s3.forbid = lambda _query: True
    source = open_source(f"s3://{BUCKET}/{name}", storage_options=s3.options)
    s3.forget()
    for start in range(0, 40, 10):
        assert source.read(start, 10) == data[start : start + 10]
    assert len(s3.requests) == 5


def test_a_signed_address_that_is_no_longer_valid_is_replaced(s3: S3Server) -> None:
    name, data = "expired", bytes(range(256))
    s3.put(**{name: data})
    source = open_source(f"s3://{BUCKET}/{name}", storage_options=s3.options)
    assert source.read(0, 10) == data[:10]
    s3.forget()
    left = iter([True])
    s3.forbid = lambda _query: next(left, False)
    for start in range(0, 40, 10):
        assert source.read(start, 10) == data[start : start + 10]
    assert len(s3.requests) == 5


def test_an_object_that_changed(s3: S3Server) -> None:
    name = "changing.zt"
    s3.put(**{name: zt({"a": np.zeros(1000, "<f4")})})
    ds = opened(s3, f"s3://{BUCKET}/{name}")
    pickled = pickle.dumps(ds)
    s3.put(**{name: zt({"a": np.ones(1000, "<f4")})})
    for each in (ds, pickle.loads(pickled)):
        with pytest.raises(FileChangedError, match="ETag"):
            each["a"].compute()
    np.testing.assert_array_equal(opened(s3, f"s3://{BUCKET}/{name}")["a"], np.ones(1000))


def test_a_store_that_is_silent_is_a_time_out(s3: S3Server) -> None:
    source: Any = open_source(KEY, storage_options=s3.options, first=100)
    source.limits = Limits(timeout=0.6, min_rate=1000)
    s3.latency = 5
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"m\.zt|'timeout'"):
        source.read(0, 100)
    assert time.monotonic() - start < 4


def test_what_is_no_object(s3: S3Server) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.zt"):
        opened(s3, f"s3://{BUCKET}/none.zt")
    assert open_source(f"s3://{BUCKET}/empty", storage_options=s3.options, first=100).size == 0
    with pytest.raises(ValueError, match="empty"):
        opened(s3, f"s3://{BUCKET}/empty")


def test_a_glob_of_objects(s3: S3Server) -> None:
    s3.put(**{"g-2.zt": zt({"a": np.zeros(2)}), "g-10.zt": zt({"b": np.ones(2)})})
    ds = opened(s3, f"s3://{BUCKET}/g-*.zt")
    assert list(ds) == ["a", "b"]
    np.testing.assert_array_equal(ds["b"], [1, 1])
