"""Secrets in URLs: no text shows them, and what a Dataset holds opens the file again."""

from __future__ import annotations

import json
import logging
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.storage.web_server import WebServer
from tests.test_stacking import zt
from xckpt.addresses import hidden, hiding, real
from xckpt.errors import CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("obstore", reason="needs obstore: pip install 'xckpt[remote]'")

ARRAYS = {"w": np.ones((8, 8), "<f4")}
SECRET = "hunter2"  # noqa: S105  it opens nothing


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer(**{"m.zt": zt(ARRAYS)}) as web:
        yield web


@pytest.fixture(params=["user", "X-Amz-Signature", "X-Amz-Security-Token", "sig", "api_key"])
def url(request: pytest.FixtureRequest, web: WebServer) -> str:
    if request.param == "user":
        return f"{web.url.replace('://', f'://me:{SECRET}@')}/m.zt"
    return f"{web.url}/m.zt?part=1&{request.param}={SECRET}"


def test_no_text_of_a_dataset_shows_a_secret(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "xckpt")
    ds = xckpt.open(url)
    report, saved = tmp_path / "m.html", tmp_path / "m.zt"
    ds.ckpt.report(report, overwrite=True)
    result = xckpt.stats(url, cache=False, progress=False)
    xckpt.save(ds, saved, progress=False)
    texts = [
        *(repr(ds), repr(ds.ckpt), ds._repr_html_(), f"{ds.encoding} {ds['w'].encoding}"),
        *(repr(result.attrs), repr(xckpt.read_index(url)), repr(xckpt.open([url]).encoding)),
        *(report.read_text(), saved.read_bytes().decode("latin-1"), caplog.text),
        json.dumps(result.attrs, default=repr),
    ]
    assert not [text for text in texts if SECRET in text]
    assert "REDACTED" in ds.encoding["source"]


@pytest.mark.parametrize("fault", ["missing", "refused", "changed", "broken"])
def test_no_error_shows_a_secret(web: WebServer, url: str, fault: str) -> None:
    ds = xckpt.open(url)
    match fault:
        case "missing":
            url = url.replace("m.zt", "none.zt")
        case "refused":
            web.behaviour.status = 403
        case "changed":
            web.behaviour.etag = '"second"'
        case "broken":
            web.behaviour.files["/m.zt"] = b"nothing"
    messages = []
    for call in (lambda: xckpt.open(url), lambda: ds["w"].values, lambda: xckpt.stats(url)):
        try:
            call()
        except Exception:  # noqa: BLE001  any of them
            messages.append("".join(traceback.format_exc()))
    assert messages
    assert not [text for text in messages if SECRET in text]


def test_no_warning_shows_a_secret(web: WebServer, url: str) -> None:
    web.behaviour.etag = None
    with pytest.warns(CheckpointWarning, match="neither ETag") as caught:
        xckpt.open(url)
    assert not [warning for warning in caught if SECRET in str(warning.message)]


def test_what_a_dataset_holds_opens_the_file_again(web: WebServer, url: str) -> None:
    ds, index = xckpt.open(url), xckpt.read_index(url)
    source = ds.encoding["source"]
    copies: list[Any] = [source, pickle.loads(pickle.dumps(source)), index]
    copies += [pickle.loads(pickle.dumps(index)), pickle.loads(pickle.dumps(ds)).encoding["source"]]
    for copy in copies:
        np.testing.assert_array_equal(xckpt.open(copy)["w"], ARRAYS["w"])
    sent = [path for _, path, _ in web.requests] + [str(headers) for headers in web.headers]
    assert any(SECRET in text for text in sent) or "me:" in url
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(ds))["w"], ARRAYS["w"])


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:pw@host/m.zt", "https://me:REDACTED@host/m.zt"),
        ("https://token@host/m.zt", "https://REDACTED@host/m.zt"),
        ("ftp://me:p@w@host/m.zt", "ftp://me:REDACTED@host/m.zt"),
        ("https://host/m?se=1&sig=a%3D&x=2", "https://host/m?se=1&sig=REDACTED&x=2"),
        ("https://host/m?AWSAccessKeyId=a", "https://host/m?AWSAccessKeyId=REDACTED"),
        ("https://host/m?X-Goog-Credential=a", "https://host/m?X-Goog-Credential=REDACTED"),
        ("https://host/m?key=a&Key-Pair-Id=b", "https://host/m?key=REDACTED&Key-Pair-Id=REDACTED"),
        ("zip://m.zt::https://a:b@host/z", "zip://m.zt::https://a:REDACTED@host/z"),
        ("s3://bucket/m.zt", "s3://bucket/m.zt"),
        ("abfss://box@account.dfs.net/m.zt", "abfss://box@account.dfs.net/m.zt"),
        ("https://host/m?part=1&monkey=2", "https://host/m?part=1&monkey=2"),
        ("models/a?token=b", "models/a?token=b"),
    ],
)
def test_what_is_hidden(url: str, shown: str) -> None:
    assert hiding(url) == shown
    assert real(hiding(url)) == url
    assert hidden(f"cannot open {url}: no") == f"cannot open {shown}: no"
