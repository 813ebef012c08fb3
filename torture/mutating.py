"""Random damage of files: changes of single items of their headers, and of bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from torture.framing import Frame, frames

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from torture.grammars import Grammar, Stream

__all__ = ["Mutator"]

NUMBERS = (
    *(0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535),
    *(65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, 1 << 61, (1 << 62) - 1),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 99, -1, -2, -(1 << 31), -(1 << 63)),
)
TEXTS = (
    *(b"", b".", b"..", b"/", b"../m", b"/etc/passwd", b"a/b", b"a.b", b"a:data", b"\0", b"\n"),
    *(b"\xed\xa0\x80", b"\xff", b"http://127.0.0.1/m", b"file:///m", b"__metadata__", b"w" * 300),
    *("größe".encode(), b"\xe2\x80\xae", b"<b>", b"%s{}$x$", b"\\", b"C:\\m", b"0", b"-1", b"nan"),
)
_MOST_TEXTS = 2000
_MOST_CUT = 64


class Mutator:
    """Generator of damaged files, reproducible by its random numbers."""

    def __init__(self, random: Random) -> None:
        self.random = random
        #: Texts of all files so far, which replace one another.
        self._texts: dict[bytes, None] = dict.fromkeys(TEXTS)
        self._cut: OrderedDict[bytes, list[tuple[Frame, Stream]]] = OrderedDict()
        self._others: dict[type[Grammar], Stream] = {}

    def mutated(self, data: bytes) -> bytes:
        """Return the file with one or a few changes."""
        headers = self._frames(data)
        if not headers or self.random.random() < 0.3:
            return self._bytes(data)
        frame, stream = headers[min(self.random.randrange(2 * len(headers)) % len(headers), 63)]
        changed = b"".join(self._tokens(frame.grammar, stream))
        file = frame.put(changed)
        return self._bytes(file) if self.random.random() < 0.05 else file

    def _frames(self, data: bytes) -> list[tuple[Frame, Stream]]:
        cached = self._cut.get(data)
        if cached is None:
            cached = [(frame, frame.grammar.stream(frame.data)) for frame in frames(data)]
            self._cut[data] = cached
            if len(self._cut) > _MOST_CUT:
                self._cut.popitem(last=False)
            for frame, stream in cached:
                self._others[type(frame.grammar)] = stream
                for token, kind in zip(stream.tokens, stream.kinds, strict=True):
                    if kind == "t" and len(self._texts) < _MOST_TEXTS and len(token) < 80:
                        self._texts[token.strip(b"\"'")] = None
        return cached

    def _tokens(self, grammar: Grammar, stream: Stream) -> list[bytes]:
        tokens = list(stream.tokens)
        times = 1 if self.random.random() < 0.6 else self.random.randint(2, 6)
        for number in range(times):
            # Spans refer to the unchanged stream, so only the last change may move tokens.
            change = self._change if number == times - 1 else self._replace
            changed = change(grammar, stream, tokens)
            if len(tokens) == len(changed):
                tokens = changed
            else:
                return changed
        return tokens

    def _replace(self, grammar: Grammar, stream: Stream, tokens: list[bytes]) -> list[bytes]:
        """Replace a number, a text, or an item by one of another type."""
        random = self.random
        kind = random.choice("nnnntt.")
        places = [
            position for position, token_kind in enumerate(stream.kinds) if token_kind == kind
        ]
        if not places:
            places = [*range(len(tokens))]
        position = random.choice(places)
        token = tokens[position]
        kind = stream.kinds[position] if stream.tokens[position] is token else "."
        if kind == "n" and token:
            tokens[position] = grammar.number(
                self._number(grammar, stream, grammar.value(token)), token
            )
        elif kind == "t" and token:
            tokens[position] = grammar.text(self._text(), token)
        elif kind == "h" and token:
            tokens[position] = grammar.grown(token, random.choice([-1, 1, 2, 1 << 16, 1 << 31]))
        elif grammar.items:
            tokens[position] = random.choice(grammar.items)
        return tokens

    def _number(self, grammar: Grammar, stream: Stream, value: int) -> int:
        random = self.random
        kind = random.randrange(6)
        if kind == 0:
            return value + random.choice([-8, -4, -1, 1, 4, 8, 64])
        if kind == 1:
            return random.choice([value * 2, value // 2, -value, value << 32, value ^ 1 << 31])
        if kind == 2:  # another number of the file, such as an offset, so that ranges overlap
            numbers = [t for t, k in zip(stream.tokens, stream.kinds, strict=True) if k == "n"]
            return grammar.value(random.choice(numbers)) if numbers else 0
        if kind == 3:
            return random.randrange(0, 40)
        return random.choice(NUMBERS)

    def _text(self) -> bytes:
        return self.random.choice([*self._texts])

    def _change(self, grammar: Grammar, stream: Stream, tokens: list[bytes]) -> list[bytes]:
        """Delete, repeat, swap, or replace items; their lists mostly get the new count."""
        random = self.random
        kind = random.randrange(10)
        if kind < 4 or not stream.spans:
            return self._replace(grammar, stream, tokens)
        start, stop, head = random.choice(stream.spans)
        item = tokens[start:stop]
        counted = head >= 0 and random.random() < 0.9
        if kind == 4:
            if counted:
                tokens[head] = grammar.grown(tokens[head], -1)
            return tokens[:start] + tokens[stop:]
        if kind == 5:
            times = random.choice([1, 1, 1, 2, 16])
            if counted:
                tokens[head] = grammar.grown(tokens[head], times)
            return tokens[:stop] + item * times + tokens[stop:]
        if kind == 6:
            levels = random.choice([2, 10, 31, 33, 64, 127, 500, 2000])
            return [*tokens[:start], grammar.nested(levels) or b"".join(item) * 3, *tokens[stop:]]
        if kind == 7 and grammar.items:
            return [*tokens[:start], random.choice(grammar.items), *tokens[stop:]]
        source = self._others.get(type(grammar), stream) if kind == 8 else stream
        if not source.spans:
            source = stream
        first, last, _ = random.choice(source.spans)
        moved = (tokens if source is stream else source.tokens)[first:last]
        return tokens[:start] + moved + tokens[stop:]

    def _bytes(self, data: bytes) -> bytes:
        """Change bytes, mostly near both ends, where headers are."""
        random = self.random
        changed = bytearray(data)
        for _ in range(random.choice([1, 1, 1, 2, 4])):
            size = len(changed)
            if not size:
                break
            reach = random.choice([16, 64, 512, size])
            at = random.randrange(min(size, reach))
            if random.random() < 0.4:
                at = size - 1 - at
            _BYTE_CHANGES[random.randrange(len(_BYTE_CHANGES))](changed, at, random)
        return bytes(changed)


def _flip(data: bytearray, at: int, random: Random) -> None:
    data[at] ^= 1 << random.randrange(8)


def _set(data: bytearray, at: int, random: Random) -> None:
    data[at] = random.choice([0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)])


def _write(data: bytearray, at: int, random: Random) -> None:
    width = random.choice([2, 4, 8])
    value = random.choice([*NUMBERS, len(data), at, at + 8]) % (1 << 8 * width)
    data[at : at + width] = value.to_bytes(width, random.choice(["little", "big"]))


def _remove(data: bytearray, at: int, random: Random) -> None:
    del data[at : at + random.choice([1, 2, 8, random.randrange(1, 64)])]


def _repeat(data: bytearray, at: int, random: Random) -> None:
    data[at:at] = data[at : at + random.choice([1, 4, 16, 64])]


def _insert(data: bytearray, at: int, random: Random) -> None:
    data[at:at] = random.randbytes(random.choice([1, 2, 8]))


def _end(data: bytearray, at: int, random: Random) -> None:
    del data[at : at + random.choice([len(data), 4096])]


def _swap(data: bytearray, at: int, random: Random) -> None:
    partner, width = random.randrange(len(data)), random.choice([1, 4, 8])
    ranges = data[at : at + width], data[partner : partner + width]
    if len(ranges[0]) == len(ranges[1]):
        data[partner : partner + width], data[at : at + width] = ranges


_BYTE_CHANGES: Sequence[Callable[[bytearray, int, Random], None]] = (
    *(_flip, _flip, _set, _write, _write, _remove, _repeat, _insert, _end, _swap),
)
