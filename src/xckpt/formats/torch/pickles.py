"""Pickles, read as data: a closed interpreter of protocols 0 to 5 that has nothing to run.

It knows all 68 opcodes. Those that make Python import or call something make a record instead: a
`Global` is two texts, a `Call` a function that is a record too, with its arguments. What records
mean is decided by a table of names in `xckpt.formats.torch.objects`. So a file may name
``os.system``; it is shown as text.

Values are None, bool, int, float, str, bytes, tuple, list, and those of
`xckpt.formats.torch.records`. Memo and stack hold references and nothing is hashed, compared or
copied, so that time and memory are those of the pickle's own size. An opcode of one byte can make
an object of a hundred, of which real pickles have few: these are counted.

Reference: Lib/pickletools.py of CPython 3.13.
"""

from __future__ import annotations

import codecs
import re
from struct import Struct
from struct import error as StructError  # noqa: N812  the name says nothing
from typing import TYPE_CHECKING, Any

from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats.torch.records import (
    Call,
    Extension,
    Global,
    Pairs,
    Persistent,
    PickledSet,
    kind_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_INT = 1 << 10  # in bytes; Python has a limit of its own for digits
_LONGEST_DIGITS = 4300
_LONGEST_LINE = 1 << 10  # of a name
# Bytes of memory that objects may take, and how many more for each byte of the pickle.
_MEMORY, _MEMORY_PER_BYTE = 64 << 20, 16
_U16, _I32, _U32 = Struct("<H"), Struct("<i"), Struct("<I")
_PLACE, _PLACES = Struct("<xI"), Struct("<" + 7 * "xI")
_U64, _F64 = Struct("<Q"), Struct(">d")


class Machine:
    """Reads the pickle at byte `at` of some bytes, which are at byte `base` of the file."""

    __slots__ = ("_ints", "_marks", "at", "base", "data", "memo", "persistent", "stack")

    def __init__(self, data: bytes, at: int = 0, base: int = 0) -> None:
        self.data = data
        self.at = at
        self.base = base
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self.memo: dict[int, Any] = {}
        #: All persistent ids, in order.
        self.persistent: list[Persistent] = []
        self._ints: dict[bytes, tuple[int, ...]] = {}

    def run(self) -> Any:
        """Read to STOP, and return what is on the stack; `at` is after it then."""
        data, size = self.data, len(self.data)
        handlers, start, costs = _HANDLERS, self.at, _COSTS
        memory = _MEMORY + _MEMORY_PER_BYTE * size
        while self.at < size:
            code = data[self.at]
            self.at += 1
            memory -= costs[code]
            if memory < 0:
                reason = "it makes more objects than a pickle of its size should have"
                at = self.base + self.at
                raise UnsupportedError(reason, offset=at, rule="Objects")
            handler = handlers.get(code)
            if handler is not None:
                handler(self)
            elif code == _STOP:
                return self.pop()
            else:
                raise self.broken(f"{bytes((code,))!r} is not an opcode", "Opcode", self.at - 1)
        raise self.broken(f"the pickle from byte {self.base + start} on does not end", "Truncated")

    def broken(self, reason: str, rule: str, at: int | None = None) -> FormatError:
        """Make the error for a place, by default where reading is."""
        at = self.at if at is None else at
        return FormatError(reason, offset=self.base + min(at, len(self.data)), rule=rule)

    # --- bytes -----------------------------------------------------------------------------------

    def take(self, nbytes: int) -> bytes:
        """Read the next bytes."""
        at = self.at
        if not 0 <= nbytes <= len(self.data) - at:
            left = len(self.data) - at
            raise self.broken(f"{nbytes} bytes, but {left} are left of the pickle", "Truncated")
        self.at = at + nbytes
        return self.data[at : self.at]

    def number(self, kind: Struct) -> Any:
        """Read the next number."""
        return kind.unpack(self.take(kind.size))[0]

    def line(self, longest: int = _LONGEST_LINE) -> bytes:
        """Read to the end of the line."""
        end = self.data.find(b"\n", self.at, self.at + longest + 1)
        if end < 0:
            raise self.broken(f"no end of a line within {longest} bytes", "Line")
        found, self.at = self.data[self.at : end], end + 1
        return found

    def text(self, data: bytes, errors: str = "strict") -> str:
        """Decode text of the bytes before."""
        try:
            return data.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            at = self.at - len(data)
            raise self.broken(f"a text is not UTF-8: {error}", "Utf8", at) from error

    def long(self, nbytes: int) -> None:
        """Push an integer of some bytes; one that is very large as bytes."""
        found = self.take(nbytes)
        is_huge = nbytes > _LONGEST_INT
        self.stack.append(found if is_huge else int.from_bytes(found, "little", signed=True))

    # --- stack and memo --------------------------------------------------------------------------

    def pop(self) -> Any:
        """Take the top of the stack, after the last mark."""
        if len(self.stack) <= (self._marks[-1] if self._marks else 0):
            raise self.broken("nothing is on the stack", "Stack", self.at - 1)
        return self.stack.pop()

    def top(self) -> Any:
        """Return the top of the stack."""
        value = self.pop()
        self.stack.append(value)
        return value

    def popped(self) -> list[Any]:
        """Take all after the last mark."""
        if not self._marks:
            raise self.broken("no mark is on the stack", "Stack", self.at - 1)
        at = self._marks.pop()
        found = self.stack[at:]
        del self.stack[at:]
        return found

    def mark(self) -> None:
        """Put a mark on the stack."""
        self._marks.append(len(self.stack))

    def drop(self) -> None:
        """Take the top of the stack away, which may be a mark."""
        if self._marks and self._marks[-1] == len(self.stack):
            self._marks.pop()
        else:
            self.pop()

    def get(self, index: int) -> None:
        """Push what the memo has."""
        try:
            self.stack.append(self.memo[index])
        except KeyError:
            raise self.broken(f"the memo has no {index}", "Memo", self.at - 1) from None

    def named(self, module: str, name: str) -> None:
        """Push the name of something in a module."""
        self.stack.append(Global(module, name))

    def call(self, function: Any, args: Any) -> None:
        """Push what a call would give."""
        if type(args) is not tuple:
            raise self.broken("the arguments of a call are not a tuple", "Call", self.at - 1)
        self.stack.append(Call(function, args, self.at - 1))

    def reduce(self) -> None:
        """Push what a function would return for a tuple of arguments."""
        args = self.pop()
        self.call(self.pop(), args)

    def persist(self, words: Any) -> None:
        """Push what lies outside."""
        found = Persistent(words)
        self.persistent.append(found)
        self.stack.append(found)

    def append(self, items: list[Any]) -> None:
        """Append to the list, or what may be one, on the stack."""
        target = self.top()
        if type(target) is Call:
            target.values = [] if target.values is None else target.values
            target.values += items
        elif type(target) is list or type(target) is PickledSet:
            target += items
        else:
            raise self.broken(f"{kind_of(target)} is not a list", "Append", self.at - 1)

    def set_items(self, items: list[Any]) -> None:
        """Set items of the mapping, or what may be one, on the stack."""
        target = self.top()
        if len(items) % 2:
            raise self.broken(f"{len(items)} keys and values", "SetItems", self.at - 1)
        if type(target) is Call:
            target.pairs = Pairs() if target.pairs is None else target.pairs
            target.pairs += items
        elif type(target) is Pairs:
            target += items
        else:
            raise self.broken(f"{kind_of(target)} is not a mapping", "SetItems", self.at - 1)

    def build(self) -> None:
        """Keep the state of an instance; who sets state twice adds to it."""
        state, target = self.pop(), self.top()
        if type(target) is not Call:
            raise self.broken(f"{kind_of(target)} has no state", "Build", self.at - 1)
        target.state = state

    # --- whole records ---------------------------------------------------------------------------

    def get_record(self, index: int) -> None:
        """Push what the memo has; if a tensor as torch.save writes it follows, all of that.

        A checkpoint has thousands of these, of 32 opcodes each. The result is that of the opcodes.
        """
        self.get(index)
        top = self.stack[-1]
        if type(top) is not Global or top != _REBUILD:
            return
        found = _RECORD.match(self.data, self.at)
        if found is None:
            return
        word, kind, key, put_key, place, numel, put_id, offset, *rest = found.groups()
        size, put_size, stride, put_stride, flag, hooks, put_hooks, put_args, put = rest
        memo = self.memo
        try:
            known = [memo[_index(each)] for each in (word, kind, place, hooks)]
        except KeyError:
            return  # which the loop tells
        puts = (put_key, put_id, put_size or put_id, put_stride or put_id, put_hooks, put_args, put)
        try:
            places = _PLACES.unpack(b"".join(puts))
        except StructError:
            places = tuple(map(_index, puts))
        # What it gets must not be what it puts itself.
        own = _index(hooks) in places[:4] or _index(place) == places[0]
        if own or key[0] != len(key) - 4:
            return
        text = key[4:].decode()
        ints = self._ints
        words = (known[0], known[1], text, known[2], *(ints.get(numel) or self._numbers(numel)))
        persistent = Persistent(words)
        self.persistent.append(persistent)
        sizes = ints.get(size) or self._numbers(size)
        strides = ints.get(stride) or self._numbers(stride)
        (first,) = ints.get(offset) or self._numbers(offset)
        made = Call(known[3], (), self.at)
        args = (persistent, first, sizes, strides, flag == b"\x88", made)
        tensor = Call(_REBUILD, args, self.at)
        memo[places[0]] = text
        memo[places[1]] = words
        if put_size:
            memo[places[2]] = sizes
        if put_stride:
            memo[places[3]] = strides
        memo[places[4]] = made
        memo[places[5]] = args
        memo[places[6]] = tensor
        self.stack[-1] = tensor
        self.at = found.end()

    def _numbers(self, code: bytes) -> tuple[int, ...]:
        """Return the integers that some opcodes push, of which there are few different ones."""
        known = self._ints.get(code)
        if known is None:
            found = []
            for one in _INT_OPCODE.finditer(code):
                data = next(filter(None, one.groups()))
                found.append(int.from_bytes(data, "little", signed=one[0][0] not in b"KM"))
            known = self._ints[code] = tuple(found)
        return known


def _index(code: bytes) -> int:
    """Return the place in the memo that an opcode has after it."""
    return code[1] if len(code) == 2 else _PLACE.unpack(code)[0]


# --- opcodes --------------------------------------------------------------------------------------


def _protocol(m: Machine) -> None:
    version = m.take(1)[0]
    if version > 5:
        reason = f"a pickle of protocol {version}; 0 to 5 are read"
        raise UnsupportedError(reason, offset=m.base + m.at - 1, rule="Protocol")


def _frame(m: Machine) -> None:
    nbytes, left = m.number(_U64), len(m.data) - m.at
    if nbytes > left:
        raise m.broken(f"a frame of {nbytes} bytes, but {left} are left", "Truncated")


def _digits(m: Machine, text: bytes) -> int:
    if re.fullmatch(rb"\s*[-+]?[0-9]+\s*", text) is None or len(text) > _LONGEST_DIGITS:
        raise m.broken(f"{shown(text[:99].decode('latin-1'))} is not an integer", "Number")
    return int(text)


def _int(m: Machine) -> None:
    text = m.line(_LONGEST_DIGITS)
    booleans = {b"00": False, b"01": True}
    m.stack.append(booleans[text] if text in booleans else _digits(m, text))


def _float(m: Machine) -> None:
    text = m.line()
    try:
        m.stack.append(float(text))
    except ValueError as error:
        raise m.broken(f"not a number: {error}", "Number") from error


def _string(m: Machine) -> None:
    text = m.line(len(m.data))
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in {b"'", b'"'}:
        raise m.broken("a text without quotes", "Text")
    try:
        data = codecs.escape_decode(text[1:-1])[0]
    except ValueError as error:
        raise m.broken(f"a text: {error}", "Text") from error
    m.stack.append(data.decode("latin-1"))


def _unicode(m: Machine) -> None:
    try:
        m.stack.append(m.line(len(m.data)).decode("raw-unicode-escape"))
    except UnicodeDecodeError as error:
        raise m.broken(f"a text: {error}", "Text") from error


def _global(m: Machine) -> None:
    module, name = m.line(), m.line()
    m.named(m.text(module), m.text(name))


def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    if type(name) is not str or type(module) is not str:
        raise m.broken("a name is not text", "Global", m.at - 1)
    m.named(module, name)


def _inst(m: Machine) -> None:
    _global(m)
    function = m.pop()
    m.call(function, tuple(m.popped()))


def _obj(m: Machine) -> None:
    function, *args = m.popped() or [None]
    if function is None:
        raise m.broken("no class is on the stack", "Stack", m.at - 1)
    m.call(function, tuple(args))


def _newobj_ex(m: Machine) -> None:
    keywords, args = m.pop(), m.pop()
    m.call(m.pop(), args)
    m.top().state = keywords  # not put together: args may be there many times


def _tuple(count: int) -> Callable[[Machine], None]:
    def make(m: Machine) -> None:
        m.stack.append(tuple([m.pop() for _ in range(count)][::-1]))

    return make


def _texts(kind: Struct | None) -> Callable[[Machine], None]:
    def push(m: Machine) -> None:
        nbytes = m.take(1)[0] if kind is None else m.number(kind)
        m.stack.append(m.text(m.take(nbytes), "surrogatepass"))

    return push


def _bytes(kind: Struct | None, *, latin: bool = False) -> Callable[[Machine], None]:
    def push(m: Machine) -> None:
        found = m.take(m.take(1)[0] if kind is None else m.number(kind))
        m.stack.append(found.decode("latin-1") if latin else found)

    return push


def _constant(value: Any) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(value)


def _put(m: Machine, index: int) -> None:
    m.memo[index] = m.top()


def _item(m: Machine) -> None:
    value = m.pop()
    m.set_items([m.pop(), value])


def _mapping(m: Machine) -> None:
    items = m.popped()
    m.stack.append(Pairs())
    m.set_items(items)


_STOP = ord(".")
# Those that come often first: a dict keeps its order, and this is how pickles look.
_HANDLERS: dict[int, Callable[[Machine], object]] = {
    ord("q"): lambda m: _put(m, m.take(1)[0]),
    ord("r"): lambda m: _put(m, m.number(_U32)),
    ord("h"): lambda m: m.get_record(m.take(1)[0]),
    ord("j"): lambda m: m.get_record(m.number(_U32)),
    ord("X"): _texts(_U32),
    ord("K"): lambda m: m.stack.append(m.take(1)[0]),
    ord("M"): lambda m: m.stack.append(m.number(_U16)),
    ord("J"): lambda m: m.stack.append(m.number(_I32)),
    ord("("): Machine.mark,
    ord("t"): lambda m: m.stack.append(tuple(m.popped())),
    ord(")"): _constant(()),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    0x88: _constant(True),  # noqa: FBT003
    0x89: _constant(False),  # noqa: FBT003
    ord("N"): _constant(None),
    ord("R"): Machine.reduce,
    ord("Q"): lambda m: m.persist(m.pop()),
    ord("c"): _global,
    ord("G"): lambda m: m.stack.append(m.number(_F64)),
    0x8A: lambda m: m.long(m.take(1)[0]),
    0x8B: lambda m: m.long(m.number(_I32)),
    ord("}"): lambda m: m.stack.append(Pairs()),
    ord("]"): lambda m: m.stack.append([]),
    ord("u"): lambda m: m.set_items(m.popped()),
    ord("s"): _item,
    ord("e"): lambda m: m.append(m.popped()),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("b"): Machine.build,
    0x80: _protocol,
    0x95: _frame,
    0x8C: _texts(None),
    0x8D: _texts(_U64),
    0x93: _stack_global,
    0x94: lambda m: _put(m, len(m.memo)),
    0x81: Machine.reduce,  # NEWOBJ has a class and its arguments
    0x92: _newobj_ex,
    ord("C"): _bytes(None),
    ord("B"): _bytes(_U32),
    0x8E: _bytes(_U64),
    0x96: _bytes(_U64),
    ord("U"): _bytes(None, latin=True),
    ord("T"): _bytes(_I32, latin=True),
    0x8F: lambda m: m.stack.append(PickledSet()),
    0x90: lambda m: m.append(m.popped()),
    0x91: lambda m: m.stack.append(PickledSet(m.popped())),
    ord("I"): _int,
    ord("L"): lambda m: m.stack.append(_digits(m, m.line(_LONGEST_DIGITS).removesuffix(b"L"))),
    ord("F"): _float,
    ord("S"): _string,
    ord("V"): _unicode,
    ord("P"): lambda m: m.persist(m.text(m.line(), "replace")),
    ord("p"): lambda m: _put(m, _digits(m, m.line(20))),
    ord("g"): lambda m: m.get(_digits(m, m.line(20))),
    ord("i"): _inst,
    ord("o"): _obj,
    ord("d"): _mapping,
    ord("l"): lambda m: m.stack.append(m.popped()),
    ord("0"): Machine.drop,
    ord("1"): Machine.popped,
    ord("2"): lambda m: m.stack.append(m.top()),
    0x82: lambda m: m.stack.append(Extension(m.take(1)[0])),
    0x83: lambda m: m.stack.append(Extension(m.number(_U16))),
    0x84: lambda m: m.stack.append(Extension(m.number(_I32))),
    0x97: lambda m: m.stack.append(Extension(-1)),
    0x98: Machine.top,  # what is there is read-only
}

# About how many bytes of memory the objects take that an opcode makes. Numbers, texts and bytes are
# left out: they take little more than in the pickle.
_COSTS = [0] * 256
for _cost, _codes in (
    (64, b"\x85\x86\x87tQP\x82\x83\x84\x97"),  # tuples, persistent ids, extensions
    (80, b"]}\x8f\x91ld"),  # lists, mappings, sets
    (112, b"rp\x94"),  # entries of the memo
    (128, b"Ro\x81\x92"),  # calls
    (256, b"c\x93i"),  # names, and calls of them
):
    for _code in _codes:
        _COSTS[_code] = _cost

# After ``_rebuild_tensor_v2`` from the memo: ("storage", class, key, location, numel), offset,
# size, stride, requires_grad, OrderedDict().
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_GOT, _PUT = rb"(h.|j.{4})", rb"(q.|r.{4})"
_LONG = rb"|".join(b"\\x8a" + bytes((n,)) + b".{%d}" % n for n in range(1, 9))
_INT = rb"(?:K.|M..|J.{4}|" + _LONG + rb")"
_SIZES = rb"(\)|(?:%b\x85|%b{2}\x86|%b{3}\x87|\((?:%b){4,64}t))" % ((_INT,) * 4) + _PUT + b"?"
_RECORD = re.compile(
    rb"\(\(%b%bX([\x01-\x09]\0\0\0[0-9]{1,9})%b%b(%b)t%bQ(%b)%b%b([\x88\x89])%b\)R%bt%bR%b"
    % (*(_GOT, _GOT, _PUT, _GOT, _INT, _PUT, _INT, _SIZES, _SIZES, _GOT), *(_PUT,) * 3),
    re.DOTALL,
)
_INT_OPCODE = re.compile(
    rb"K(.)|M(..)|J(.{4})|"
    + rb"|".join(b"\\x8a" + bytes((n,)) + b"(.{%d})" % n for n in range(1, 9)),
    re.DOTALL,
)
