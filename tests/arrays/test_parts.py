"""Verification of parts of tensors, and its error messages."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from tests.sources import CountingSource
from xckpt.arrays.parts import PartReader
from xckpt.errors import FormatError, IntegrityError
from xckpt.index import Part
from xckpt.storage import digests, open_source
from xckpt.storage.seekable import new_encoder


@pytest.mark.parametrize(
    ("digest", "error"), [("crc32:00000000", IntegrityError), ("crc32:0", FormatError)]
)
def test_a_wrong_digest_is_reported_with_its_position(
    digest: str, error: type[FormatError | IntegrityError]
) -> None:
    part = Part("uint8", (4,), offset=8, nbytes=4, digest=digest)
    reader = PartReader(open_source(b"\0" * 8 + b"data"), part, verify=True)
    with pytest.raises(error) as info:
        reader.check(4)
    assert info.value.offset == 8


def test_the_digest_of_a_raw_part_is_verified_on_request() -> None:
    part = Part("uint8", (4,), offset=8, nbytes=4, digest="crc32:00000000")
    reader = PartReader(open_source(b"\0" * 8 + b"data"), part)
    assert b"".join(reader.blocks(4, 3)) == b"data"
    with pytest.raises(IntegrityError) as info:
        list(reader.blocks(4, 3, compare=True))
    assert info.value.offset == 8


@pytest.mark.parametrize("consumer", ["read", "blocks"])
@pytest.mark.parametrize("encoding", ["zstd", "zstd-seekable", "deflate"])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_stored_bytes_with_a_digest_are_read_once(
    encoding: str, consumer: str, is_damaged: bool
) -> None:
    values = np.random.default_rng(0).bytes(1 << 21)
    encoder = new_encoder(encoding, len(values), level=3)
    stored = encoder.add(memoryview(values)) + encoder.end()
    digest = f"sha256:{sha256(stored + b'?' * is_damaged).hexdigest()}"
    source = CountingSource(stored)
    part = Part("uint8", (len(values),), 0, len(stored), encoding=encoding, digest=digest)
    reader = PartReader(source, part)
    with pytest.raises(IntegrityError) if is_damaged else nullcontext():
        if consumer == "read":
            assert reader.read(0, len(values), len(values)) == values
        else:
            assert b"".join(map(bytes, reader.blocks(len(values), 1 << 16))) == values
    table_nbytes = 4096 if encoding == "zstd-seekable" and consumer == "blocks" else 0
    assert len(stored) <= source.nbytes_read <= len(stored) + table_nbytes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_checks_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = b"of a tensor"
    part = Part("uint8", (len(data),), 0, len(data), digest=f"sha256:{sha256(data).hexdigest()}")
    reader = PartReader(open_source(data), part, verify=True)
    checking, done = threading.Event(), threading.Event()
    checked, parent = digests.checked, os.getpid()

    def slow(*args: Any) -> Any:
        if os.getpid() == parent:
            checking.set()
            done.wait(30)
        return checked(*args)

    monkeypatch.setattr(digests, "checked", slow)
    thread = threading.Thread(target=reader.read, args=(0, len(data), len(data)))
    thread.start()
    checking.wait(10)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(bytes(reader.read(0, len(data), len(data))) != data)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done.set()
    thread.join()
