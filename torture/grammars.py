"""Grammars of headers: tokens of CBOR, JSON, MessagePack, pickles and binary tables.

A `Stream` is a list of tokens that join to the bytes they came from, and which of them belong
together.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import struct
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BINARY", "CBOR", "JSON", "MSGPACK", "PICKLE", "Grammar", "Span", "Stream"]

# Of larger streams only the beginning is cut into tokens.
_MOST_TOKENS = 4000


def _hex(text: str) -> tuple[bytes, ...]:
    return tuple(map(bytes.fromhex, text.split()))


class Span(NamedTuple):
    """An item: its first token, the token after it, and the token that counts items, or -1."""

    start: int
    stop: int
    head: int = -1


class Stream(NamedTuple):
    """Tokens, their kinds (number, text, head or other), and the items that they form."""

    tokens: list[bytes]
    kinds: str  # a character for each: n, t, h or .
    spans: list[Span]


class Grammar:
    """The syntax of a kind of header. Methods that make a token take the one to replace."""

    def stream(self, data: bytes) -> Stream:
        """Cut bytes into tokens."""
        raise NotImplementedError

    def number(self, value: int, like: bytes) -> bytes:
        """Spell a number."""
        raise NotImplementedError

    def value(self, token: bytes) -> int:
        """Return the value of a number token."""
        raise NotImplementedError

    def text(self, value: bytes, like: bytes) -> bytes:
        """Spell a text."""
        raise NotImplementedError

    def grown(self, head: bytes, more: int) -> bytes:
        """Return the head with its count of items increased."""
        return head

    def nested(self, levels: int) -> bytes:
        """Return an item nested to a depth."""
        return b""

    #: Items of every type there is.
    items: tuple[bytes, ...] = ()


class _Cbor(Grammar):
    items = _hex(
        "f6 f5 f4 f7 80 a0 40 60 00 20 1bffffffffffffffff 3bffffffffffffffff "
        "1b7fffffffffffffff f97e00 fb7ff0000000000000 9fff bfff 5fff 7fff c060 "
        "c249010000000000000000 d81c80 d81d00 d9d9f700 f820 1800 190001 81818100 a10000 "
        "9bffffffffffffffff bbffffffffffffffff 7bffffffffffffffff 62ffff d8236128 "
    )

    def stream(self, data: bytes) -> Stream:  # noqa: C901
        tokens: list[bytes] = []
        kinds: list[str] = []
        spans: list[Span] = []

        def head(at: int) -> tuple[int, int, int]:
            major, info = data[at] >> 5, data[at] & 31
            if info < 24:
                return major, info, at + 1
            width = {24: 1, 25: 2, 26: 4, 27: 8}[info]
            return major, int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 1 + width

        def item(at: int, parent: int, *, is_value: bool) -> int:
            start = len(tokens)
            major, count, after = head(at)
            if major in {2, 3}:
                tokens.append(data[at : after + count])
                kinds.append("t" if major == 3 else ".")
                after += count
            elif major in {4, 5}:
                tokens.append(data[at:after])
                kinds.append("h")
                for number in range(count * (major - 3)):
                    if len(tokens) > _MOST_TOKENS:
                        raise ValueError(at)
                    key = len(tokens)
                    after = item(after, start, is_value=major == 4 or bool(number % 2))
                    if major == 5 and number % 2:  # the key as well
                        before = _previous(spans, key)
                        spans.append(Span(before, len(tokens), start))
            elif major == 6:
                tokens.append(data[at:after])
                kinds.append(".")
                after = item(after, -1, is_value=True)
            else:
                tokens.append(data[at:after])
                kinds.append("n" if major < 2 else ".")
            spans.append(
                Span(start, len(tokens), parent if is_value and _is_list(tokens, parent) else -1)
            )
            return after

        try:
            end = item(0, -1, is_value=True)
        except (ValueError, KeyError, IndexError, RecursionError):
            return _as_one(data)
        return Stream([*tokens, data[end:]], "".join(kinds) + ".", spans)

    def number(self, value: int, like: bytes) -> bytes:
        if value < 0:
            return _cbor_head(1, -1 - value)
        return _cbor_head(0, value) if value < 1 << 64 else b"\xc2" + self.blob(value)

    @staticmethod
    def blob(value: int) -> bytes:
        data = value.to_bytes((value.bit_length() + 7) // 8, "big")
        return _cbor_head(2, len(data)) + data

    def value(self, token: bytes) -> int:
        info = token[0] & 31
        number = info if info < 24 else int.from_bytes(token[1:], "big")
        return -1 - number if token[0] >> 5 else number

    def text(self, value: bytes, like: bytes) -> bytes:
        return _cbor_head(3, len(value)) + value

    def grown(self, head: bytes, more: int) -> bytes:
        info = head[0] & 31
        count = info if info < 24 else int.from_bytes(head[1:], "big")
        return _cbor_head(head[0] >> 5, max(0, count + more))

    def nested(self, levels: int) -> bytes:
        return b"\x81" * levels + b"\x00"


def _previous(spans: list[Span], stop: int) -> int:
    return next(span.start for span in reversed(spans) if span.stop == stop)


def _is_list(tokens: list[bytes], parent: int) -> bool:
    return parent >= 0 and tokens[parent][0] >> 5 == 4


def _cbor_head(major: int, count: int) -> bytes:
    count = min(count, (1 << 64) - 1)
    if count < 24:
        return bytes([major << 5 | count])
    code, width = next((c, w) for c, w in ((24, 1), (25, 2), (26, 4), (27, 8)) if count < 256**w)
    return bytes([major << 5 | code]) + count.to_bytes(width, "big")


class _Json(Grammar):
    """JSON, and Python literals as in the headers of numpy."""

    items = (
        *(b"null true false [] {} 0 -1 1.5 1e999 -0 NaN Infinity 01 [1,] 'x' None True".split()),
        *(b'9007199254740993 18446744073709551615 18446744073709551616 0x10 {"a":1,"a":2}'.split()),
        b'""',
        *(b'"\\ud800" "\\u0000" [["a"]] (1,) () 3L 1_0 "\xff" \xef\xbb\xbf'.split()),
        b"1" * 400,
    )
    _TOKEN = re.compile(
        rb'"(?:[^"\\]|\\.)*"|\'[^\'\\]*\'|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[A-Za-z]+|[][{}(),:]'
        rb"|\s+|[^][{}(),:\s]",
        re.DOTALL,
    )

    def stream(self, data: bytes) -> Stream:
        tokens = self._TOKEN.findall(data)
        if len(tokens) > 2 * _MOST_TOKENS or b"".join(tokens) != data:
            return _as_one(data)
        kinds = "".join(
            "t" if each[:1] in b"\"'" else "n" if each.isdigit() else "." for each in tokens
        )
        spans = []
        open_at: list[int] = []
        starts: list[int] = []
        for at, token in enumerate(tokens):
            if token in b"[{(" and len(token) == 1:
                open_at.append(at)
                starts.append(at + 1)
            elif token in b"]})" and len(token) == 1 and open_at:
                spans += [Span(starts.pop(), at), Span(open_at.pop(), at + 1)]
            elif token == b",":
                if starts:
                    spans.append(Span(starts[-1], at + 1))  # with its comma
                    starts[-1] = at + 1
            elif not token.isspace() and token != b":":
                spans.append(Span(at, at + 1))
        return Stream(tokens, kinds, [span for span in spans if span.stop > span.start])

    def number(self, value: int, like: bytes) -> bytes:
        return str(value).encode()

    def value(self, token: bytes) -> int:
        return int(token) if len(token) < 100 else 0

    def text(self, value: bytes, like: bytes) -> bytes:
        if like[:1] == b"'":
            return b"'" + value + b"'"
        return json.dumps(value.decode("utf-8", "surrogateescape")).encode()

    def nested(self, levels: int) -> bytes:
        return b"[" * levels + b"]" * levels


class _Msgpack(Grammar):
    """MessagePack, one value after another."""

    items = _hex(
        "c0 c1 c2 c3 00 ff 80 90 a0 c400 ce00000000 ceffffffff cfffffffffffffffff "
        "d3ffffffffffffffff ca7f800000 cb0000000000000000 ddffffffff dfffffffff dbffffffff "
        "c6ffffffff d40000 c70000 a1ff "
    )
    _WIDTHS: ClassVar = dict(zip(range(0xCA, 0xD4), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True))
    _LENGTHS: ClassVar = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
    _COUNTS: ClassVar = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}

    def stream(self, data: bytes) -> Stream:
        tokens: list[bytes] = []
        kinds: list[str] = []
        spans: list[Span] = []
        at = 0

        def item(at: int, parent: int) -> int:
            start, code, stop = len(tokens), data[at], at + 1
            kind, count = ".", 0
            if code in self._WIDTHS:
                stop, kind = stop + self._WIDTHS[code], "n" if code >= 0xCC else "."
            elif code in self._LENGTHS or 0xA0 <= code < 0xC0:
                width = self._LENGTHS.get(code, 0)
                nbytes = int.from_bytes(data[stop : stop + width], "big") if width else code & 31
                stop, kind = stop + width + nbytes, "t" if code >= 0xD9 or code < 0xC0 else "."
            elif code in self._COUNTS or 0x80 <= code < 0xA0:
                width = self._COUNTS.get(code, 0)
                count = int.from_bytes(data[stop : stop + width], "big") if width else code & 15
                count *= 2 if code in {0xDE, 0xDF} or code < 0x90 else 1
                stop, kind = stop + width, "h"
            if stop > len(data) or len(tokens) > _MOST_TOKENS:
                raise ValueError(at)
            tokens.append(data[at:stop])
            kinds.append(kind)
            for _ in range(count):
                stop = item(stop, start)
            spans.append(Span(start, len(tokens), parent))
            return stop

        try:
            while at < len(data):
                at = item(at, -1)
        except (ValueError, IndexError, RecursionError):
            rest = len(b"".join(tokens))
            tokens.append(data[rest:])
            kinds.append(".")
        return Stream(tokens, "".join(kinds), spans)

    def number(self, value: int, like: bytes) -> bytes:
        width = self._WIDTHS.get(like[0], 4)
        return like[:1] + (value % (1 << 8 * width)).to_bytes(width, "big")

    def value(self, token: bytes) -> int:
        return int.from_bytes(token[1:], "big")

    def text(self, value: bytes, like: bytes) -> bytes:
        if len(value) < 32:
            return bytes([0xA0 | len(value)]) + value
        return b"\xdb" + struct.pack(">I", len(value)) + value

    def grown(self, head: bytes, more: int) -> bytes:
        if len(head) == 1:
            return bytes([head[0] & 0xF0 | (head[0] + more) & 15])
        count = int.from_bytes(head[1:], "big") + more
        return head[:1] + (count % (1 << 8 * (len(head) - 1))).to_bytes(len(head) - 1, "big")

    def nested(self, levels: int) -> bytes:
        return b"\x91" * levels + b"\0"


class _Binary(Grammar):
    """Tables of little-endian numbers, and texts with a length in front, as in bincode."""

    items = tuple(
        struct.pack(code, number)
        for code in ("<I", "<Q")
        for number in (0, 1, 2, 8, 9, 10, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
    )
    _TEXT = re.compile(rb"[\x20-\x7e]{1,400}")

    def stream(self, data: bytes) -> Stream:
        tokens: list[bytes] = []
        kinds: list[str] = []
        starts: list[int] = []
        done = 0
        for match in self._TEXT.finditer(data):
            begin, limit = match.span()
            width = next(
                (
                    w
                    for w in (8, 4, 1)
                    if begin - w >= done
                    and 0 < int.from_bytes(data[begin - w : begin], "little") <= limit - begin
                ),
                0,
            )
            # Printable bytes after a text may be numbers.
            nbytes = int.from_bytes(data[begin - width : begin], "little") if width else 0
            if not width or len(tokens) > _MOST_TOKENS:
                continue
            self._numbers(data[done : begin - width], tokens, kinds)
            starts.append(len(tokens))
            tokens.append(data[begin - width : begin + nbytes])
            kinds.append("t")
            done = begin + nbytes
        self._numbers(data[done : done + 256], tokens, kinds)
        tokens.append(data[done + 256 :])
        kinds.append(".")
        spans = [Span(at, at + 1) for at in range(len(tokens))]
        spans += [Span(a, b) for a, b in zip(starts, [*starts[1:], len(tokens) - 1], strict=False)]
        return Stream(tokens, "".join(kinds), spans)

    @staticmethod
    def _numbers(data: bytes, tokens: list[bytes], kinds: list[str]) -> None:
        whole = min(len(data) // 4 * 4, 256)
        for at in range(0, whole, 4):
            tokens.append(data[at : at + 4])
            kinds.append("n")
        if len(data) > whole:
            tokens.append(data[whole:])
            kinds.append(".")

    def number(self, value: int, like: bytes) -> bytes:
        return (value % (1 << 8 * len(like))).to_bytes(len(like), "little")

    def value(self, token: bytes) -> int:
        return int.from_bytes(token, "little")

    def text(self, value: bytes, like: bytes) -> bytes:
        widths = (8, 4, 1)
        width = next((w for w in widths if int.from_bytes(like[:w], "little") == len(like) - w), 1)
        return (len(value) % (1 << 8 * width)).to_bytes(width, "little") + value


class _Pickle(Grammar):
    """Pickles, opcode by opcode; numbers and texts are their arguments."""

    items = (
        *(bytes([code]) for code in range(256)),
        *_hex(
            "4b00 4dffff 4affffffff 8a08ffffffffffffffff 8bffffff7f 6800 7100 72ffffffff 58ffffffff"
        ),
        *_hex("42ffffff7f 2952 2874 8c00 95ffffffffffffffff 4e62"),
        *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"ccollections\nOrderedDict\n"),
        b"ctorch._utils\n_rebuild_tensor_v2\n",
    )

    def stream(self, data: bytes) -> Stream:
        tokens: list[bytes] = []
        kinds: list[str] = []
        file, before = io.BytesIO(data), 0
        try:
            while before < len(data) and len(tokens) < _MOST_TOKENS:
                # The chain of an old file, and what follows it.
                for opcode, argument, at in pickletools.genops(file):
                    stop = file.tell()
                    tokens.append(data[at:stop])
                    is_number = type(argument) is int and opcode.name not in {"PROTO", "FRAME"}
                    is_text = type(argument) is str and opcode.name not in {"GLOBAL", "INST"}
                    kinds.append("n" if is_number else "t" if is_text else ".")
                    before = stop
        except (ValueError, IndexError, KeyError, OverflowError, EOFError):
            pass
        tokens.append(data[before:])
        kinds.append(".")
        spans = [Span(at, at + 1) for at in range(len(tokens) - 1)]
        return Stream(tokens, "".join(kinds), [*spans, *_marked(tokens)])

    def number(self, value: int, like: bytes) -> bytes:
        if like[:1] in {b"h", b"q"}:
            return like[:1] + bytes([value % 256])
        if like[:1] in {b"j", b"r"}:
            return like[:1] + struct.pack("<I", value % (1 << 32))
        if 0 <= value < 256:
            return b"K" + bytes([value])
        return b"\x8a\x09" + (value % (1 << 71)).to_bytes(9, "little", signed=True)

    def value(self, token: bytes) -> int:
        return int.from_bytes(token[2 if token[:1] == b"\x8a" else 1 :], "little")

    def text(self, value: bytes, like: bytes) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value

    def nested(self, levels: int) -> bytes:
        return b"]" * levels + b"a" * (levels - 1)


def _marked(tokens: list[bytes]) -> Iterator[Span]:
    marks: list[int] = []
    for at, token in enumerate(tokens):
        if token == b"(":
            marks.append(at)
        elif token in {b"t", b"u", b"e", b"d", b"l"} and marks:
            yield Span(marks.pop(), at + 1)


def _as_one(data: bytes) -> Stream:
    return Stream([data], ".", [Span(0, 1)])


CBOR, JSON, MSGPACK, BINARY, PICKLE = _Cbor(), _Json(), _Msgpack(), _Binary(), _Pickle()
