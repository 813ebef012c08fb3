from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.errors import FormatError, IntegrityError, UnsupportedError
from xckpt.storage.digests import Hasher, check, is_known, parse

# Of b"123456789": the check value of the CRC catalogue, FIPS 180-4, and the reference programs
# xxhsum -H3 and b3sum.
KNOWN = [
    "crc32:cbf43926",
    "crc32c:0xE3069283",
    "crc32c:0Xe3069283",
    "sha256:15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225",
    "sha256:15E2B0D3C33891EBB0F1EF609EC419420C20E320CE94C65FBC8C3312448EB225",
    "xxh3:72dcb18b67a17dff",
    "blake3:b7d65b48420d1033cb2595293263b6f72eabee20d55e699d0df1973b3c9deed1",
]
ALGORITHMS = ["crc32", "crc32c", "sha256", "xxh3", "blake3"]


@pytest.mark.parametrize("digest", KNOWN)
def test_known_values(digest: str) -> None:
    check(digest, b"123456789")
    with pytest.raises(IntegrityError, match=r"have the digest .*, but the file states") as caught:
        check(digest, b"123456780")
    assert caught.value.rule == "Digest"
    assert digest in str(caught.value)


@pytest.mark.parametrize(
    "digest",
    [
        "",
        "crc32c",
        "crc32c:",
        ":0x12",
        "crc32c:12345678",
        "crc32c:0x",
        "crc32c:0x123456789",
        "crc32c:0x1234567g",
        "crc32c:0x12 ",
        "crc32c:0x12\n",
        "crc32c:0x1_2",
        "crc32c:0x٣",  # a digit, but none of ASCII
        "CRC32C:0x12",
        "sha256:" + "0" * 63,
        "sha256:" + "0" * 65,
        "sha256:0x" + "0" * 62,
        "xxh3:0011223344556677" * 2,
        "xxh3:001122334455667",
        "xxh3:00112233445566AA",
        "blake3:" + "g" * 64,
        "sha 256:00",
    ],
)
def test_malformed_digests(digest: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse(digest)
    assert caught.value.rule == "Digest"


@given(st.text())
def test_any_text_parses_or_is_malformed(text: str) -> None:
    try:
        algorithm, value = parse(text)
    except FormatError:
        return
    assert (value is not None) == is_known(text) == (algorithm in ALGORITHMS)


def test_unknown_and_malformed_algorithms_are_distinguished() -> None:
    assert parse("md5:00") == ("md5", None)
    assert not is_known("md5:00")
    assert not is_known("crc16")
    assert all(map(is_known, [*ALGORITHMS, "xxh3:0011223344556677"]))
    with pytest.raises(UnsupportedError, match="md5"):
        check("md5:00", b"")


def test_short_crcs_are_padded() -> None:
    assert parse("crc32c:0x1") == ("crc32c", b"\0\0\0\1")
    check("crc32c:0x0", b"")


@given(st.sampled_from(ALGORITHMS), st.binary(max_size=100), st.integers(0, 100))
def test_parts_hash_as_the_whole(algorithm: str, data: bytes, at: int) -> None:
    at_once, parts = Hasher(algorithm), Hasher(algorithm)
    at_once.update(data)
    parts.update(data[:at])
    parts.update(memoryview(data)[at:])
    assert at_once.digest() == parts.digest()
    assert parse(at_once.digest()) == (algorithm, at_once.value())
    check(parts.digest(), data)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_blocks_hash_as_the_whole(algorithm: str) -> None:
    data = np.random.default_rng(0).bytes(17_000_001)  # three blocks
    at_once = Hasher(algorithm)
    at_once.update(data)
    check(at_once.digest(), memoryview(bytearray(data)))


def test_typed_memory_is_hashed_by_its_bytes() -> None:
    array = np.arange(100, dtype="f4").reshape(10, 10)
    check("sha256:" + hashlib.sha256(array.tobytes()).hexdigest(), array.data)


def test_the_pure_python_crc_does_not_warn() -> None:
    code = (
        "import sys; sys.modules['google_crc32c.cext'] = None\n"
        "from xckpt.storage.digests import check\n"
        "check('crc32c:0xE3069283', b'123456789')\n"
        "import google_crc32c, warnings; print(google_crc32c.implementation)\n"
        "warnings.warn('still an error', RuntimeWarning)\n"
    )
    run = subprocess.run(  # noqa: S603
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert run.stdout == "python\n", run.stderr
    assert "RuntimeWarning: still an error" in run.stderr
