"""Files made wrong: what their headers consist of changed item by item, and bytes of any kind."""

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
    """Makes new files of known ones; what it makes follows from its generator."""

    def __init__(self, random: Random) -> None:
        self.random = random
        #: Texts of all files, which get into one another's places.
        self._texts: dict[bytes, None] = dict.fromkeys(TEXTS)
        self._cut: OrderedDict[bytes, list[tuple[Frame, Stream]]] = OrderedDict()
        self._others: dict[type[Grammar], Stream] = {}

    def mutated(self, data: bytes) -> bytes:
        """Return a file that differs in one place or a few."""
        found = self._frames(data)
        if not found or self.random.random() < 0.3:
            return self._bytes(data)
        frame, stream = found[min(self.random.randrange(2 * len(found)) % len(found), 63)]
        made = b"".join(self._tokens(frame.grammar, stream))
        file = frame.put(made)
        return self._bytes(file) if self.random.random() < 0.05 else file

    def _frames(self, data: bytes) -> list[tuple[Frame, Stream]]:
        known = self._cut.get(data)
        if known is None:
            known = [(frame, frame.grammar.stream(frame.data)) for frame in frames(data)]
            self._cut[data] = known
            if len(self._cut) > _MOST_CUT:
                self._cut.popitem(last=False)
            for frame, stream in known:
                self._others[type(frame.grammar)] = stream
                for token, kind in zip(stream.tokens, stream.kinds, strict=True):
                    if kind == "t" and len(self._texts) < _MOST_TEXTS and len(token) < 80:
                        self._texts[token.strip(b"\"'")] = None
        return known

    def _tokens(self, grammar: Grammar, stream: Stream) -> list[bytes]:
        tokens = list(stream.tokens)
        times = 1 if self.random.random() < 0.6 else self.random.randint(2, 6)
        for number in range(times):
            # Spans are of the stream as it was: only the last change may move tokens.
            change = self._change if number == times - 1 else self._replace
            changed = change(grammar, stream, tokens)
            if len(tokens) == len(changed):
                tokens = changed
            else:
                return changed
        return tokens

    def _replace(self, grammar: Grammar, stream: Stream, tokens: list[bytes]) -> list[bytes]:
        """Spell another number or text, or put an item of another type."""
        random = self.random
        kind = random.choice("nnnntt.")
        places = [at for at, each in enumerate(stream.kinds) if each == kind]
        if not places:
            places = [*range(len(tokens))]
        at = random.choice(places)
        token = tokens[at]
        kind = stream.kinds[at] if stream.tokens[at] is token else "."
        if kind == "n" and token:
            tokens[at] = grammar.number(self._number(grammar, stream, grammar.value(token)), token)
        elif kind == "t" and token:
            tokens[at] = grammar.text(self._text(), token)
        elif kind == "h" and token:
            tokens[at] = grammar.grown(token, random.choice([-1, 1, 2, 1 << 16, 1 << 31]))
        elif grammar.items:
            tokens[at] = random.choice(grammar.items)
        return tokens

    def _number(self, grammar: Grammar, stream: Stream, value: int) -> int:
        random = self.random
        how = random.randrange(6)
        if how == 0:
            return value + random.choice([-8, -4, -1, 1, 4, 8, 64])
        if how == 1:
            return random.choice([value * 2, value // 2, -value, value << 32, value ^ 1 << 31])
        if how == 2:  # what another one says: offsets that overlap, sizes that add up
            others = [t for t, k in zip(stream.tokens, stream.kinds, strict=True) if k == "n"]
            return grammar.value(random.choice(others)) if others else 0
        if how == 3:
            return random.randrange(0, 40)
        return random.choice(NUMBERS)

    def _text(self) -> bytes:
        return self.random.choice([*self._texts])

    def _change(self, grammar: Grammar, stream: Stream, tokens: list[bytes]) -> list[bytes]:
        """Delete, repeat, swap, or replace items; their lists count them, or do not."""
        random = self.random
        how = random.randrange(10)
        if how < 4 or not stream.spans:
            return self._replace(grammar, stream, tokens)
        start, stop, head = random.choice(stream.spans)
        item = tokens[start:stop]
        counted = head >= 0 and random.random() < 0.9
        if how == 4:
            if counted:
                tokens[head] = grammar.grown(tokens[head], -1)
            return tokens[:start] + tokens[stop:]
        if how == 5:
            times = random.choice([1, 1, 1, 2, 16])
            if counted:
                tokens[head] = grammar.grown(tokens[head], times)
            return tokens[:stop] + item * times + tokens[stop:]
        if how == 6:
            levels = random.choice([2, 10, 31, 33, 64, 127, 500, 2000])
            return [*tokens[:start], grammar.nested(levels) or b"".join(item) * 3, *tokens[stop:]]
        if how == 7 and grammar.items:
            return [*tokens[:start], random.choice(grammar.items), *tokens[stop:]]
        other = self._others.get(type(grammar), stream) if how == 8 else stream
        if not other.spans:
            other = stream
        first, last, _ = random.choice(other.spans)
        moved = (tokens if other is stream else other.tokens)[first:last]
        return tokens[:start] + moved + tokens[stop:]

    def _bytes(self, data: bytes) -> bytes:
        """Change bytes, mostly near the ends, where headers are."""
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
            _WAYS[random.randrange(len(_WAYS))](changed, at, random)
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
    other, width = random.randrange(len(data)), random.choice([1, 4, 8])
    some = data[at : at + width], data[other : other + width]
    if len(some[0]) == len(some[1]):
        data[other : other + width], data[at : at + width] = some


_WAYS: Sequence[Callable[[bytearray, int, Random], None]] = (
    *(_flip, _flip, _set, _write, _write, _remove, _repeat, _insert, _end, _swap),
)
