"""A safe interpreter of pickles, protocols 0 to 5, which imports and calls nothing.

It supports all 68 opcodes. Opcodes that would import or call create a record instead: a `Global`
consists of two texts, and a `Call` of another record and its arguments. Tables of names give
records their meaning (`xckpt.formats.torch.tensors` and `objects`). If a file names ``os.system``,
that name is a text.

Values are None, bool, int, float, str, bytes, tuple, list, and the records of
`xckpt.formats.pickles.records`. Memo and stack hold references, and the interpreter hashes,
compares and copies nothing, so time and memory are proportional to the size of the pickle. Some
opcodes of one byte create objects of a hundred bytes; their total is limited.

Specification: Lib/pickletools.py of CPython 3.13.
"""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from struct import Struct
from struct import error as StructError  # noqa: N812  "error" is too general
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, FormatError, TruncatedError, UnsupportedError, shown
from xckpt.formats.pickles.executing import CodeUses
from xckpt.formats.pickles.records import (
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
# Limit of memory for objects, in bytes, and its growth for each byte of the pickle.
_MEMORY, _MEMORY_PER_BYTE = 64 << 20, 16
_U16, _I32, _U32 = Struct("<H"), Struct("<i"), Struct("<I")
_PLACE, _PLACES = Struct("<xI"), Struct("<" + 7 * "xI")
_U64, _F64 = Struct("<Q"), Struct(">d")


class Machine:
    """An interpreter of the pickle at byte `at` of `data`, which is at byte `base` of a file."""

    __slots__ = (
        "_ints",
        "_marks",
        "at",
        "base",
        "data",
        "memo",
        "persistent",
        "stack",
        "uses",
    )

    def __init__(self, data: bytes, at: int = 0, base: int = 0) -> None:
        self.data = data
        self.at = at
        self.base = base
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self.memo: dict[int, Any] = {}
        #: All persistent ids, in order.
        self.persistent: list[Persistent] = []
        #: The functions and classes that the pickle imports and calls.
        self.uses = CodeUses()
        self._ints: dict[bytes, tuple[int, ...]] = {}

    def run(self) -> Any:
        """Interpret up to STOP, and return the top of the stack. Then `at` is the next byte.

        An error has the code that other programs run before they get there.
        """
        try:
            return self._run()
        except CheckpointError as error:
            error.executes = tuple(self.uses.executes)
            raise

    def _run(self) -> Any:
        data, size = self.data, len(self.data)
        handlers, start, costs = _HANDLERS, self.at, _COSTS
        memory = _MEMORY + _MEMORY_PER_BYTE * size
        while self.at < size:
            code = data[self.at]
            self.at += 1
            memory -= costs[code]
            if memory < 0:
                reason = "the pickle has implausibly many objects for its size"
                at = self.base + self.at
                raise UnsupportedError(reason, offset=at, rule="Objects")
            handler = handlers.get(code)
            if handler is not None:
                handler(self)
            elif code == _STOP:
                return self.pop()
            else:
                raise self.broken(f"{bytes((code,))!r} is not an opcode", "Opcode", self.at - 1)
        raise self.truncated(f"the pickle at byte {self.base + start} has no end")

    def broken(self, reason: str, rule: str, at: int | None = None) -> FormatError:
        """Return the error for offset `at`, by default the current one."""
        at = self.at if at is None else at
        return FormatError(reason, offset=self.base + min(at, len(self.data)), rule=rule)

    def truncated(self, reason: str, rule: str = "Truncated") -> TruncatedError:
        """Return the error for a pickle that more bytes may complete."""
        return TruncatedError(reason, offset=self.base + self.at, rule=rule)

    # --- bytes -----------------------------------------------------------------------------------

    def take(self, nbytes: int) -> bytes:
        """Read the next bytes."""
        at = self.at
        if not 0 <= nbytes <= len(self.data) - at:
            available = len(self.data) - at
            reason = f"{nbytes} bytes exceed the pickle, which has {available} more"
            raise self.truncated(reason)
        self.at = at + nbytes
        return self.data[at : self.at]

    def number(self, kind: Struct) -> Any:
        """Read a number."""
        return kind.unpack(self.take(kind.size))[0]

    def line(self, longest: int = _LONGEST_LINE) -> bytes:
        """Read to the end of the line."""
        end = self.data.find(b"\n", self.at, self.at + longest + 1)
        if end < 0:
            raise self.truncated(f"a line is longer than {longest} bytes", "Line")
        line, self.at = self.data[self.at : end], end + 1
        return line

    def text(self, data: bytes, errors: str = "strict") -> str:
        """Decode the bytes that were read last."""
        try:
            return data.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            at = self.at - len(data)
            raise self.broken(f"a text is not UTF-8: {error}", "Utf8", at) from error

    def long(self, nbytes: int) -> None:
        """Push an integer of `nbytes` bytes; a very large one as bytes."""
        data = self.take(nbytes)
        is_huge = nbytes > _LONGEST_INT
        self.stack.append(data if is_huge else int.from_bytes(data, "little", signed=True))

    # --- stack and memo --------------------------------------------------------------------------

    def pop(self) -> Any:
        """Remove and return the top of the stack, above the last mark."""
        if len(self.stack) <= (self._marks[-1] if self._marks else 0):
            raise self.broken("the stack is empty", "Stack", self.at - 1)
        return self.stack.pop()

    def top(self) -> Any:
        """Return the top of the stack."""
        value = self.pop()
        self.stack.append(value)
        return value

    def popped(self) -> list[Any]:
        """Remove and return all values above the last mark."""
        if not self._marks:
            raise self.broken("the stack has no mark", "Stack", self.at - 1)
        position = self._marks.pop()
        values = self.stack[position:]
        del self.stack[position:]
        return values

    def mark(self) -> None:
        """Put a mark on the stack."""
        self._marks.append(len(self.stack))

    def drop(self) -> None:
        """Remove the top of the stack, which may be a mark."""
        if self._marks and self._marks[-1] == len(self.stack):
            self._marks.pop()
        else:
            self.pop()

    def get(self, index: int) -> None:
        """Push an entry of the memo."""
        try:
            self.stack.append(self.memo[index])
        except KeyError:
            raise self.broken(f"the memo has no entry {index}", "Memo", self.at - 1) from None

    def named(self, module: str, name: str) -> None:
        """Push the name of an object in a module."""
        record = Global(module, name)
        self.stack.append(record)
        self.uses.imported(record)

    def extend(self, code: int) -> None:
        """Push an entry of the registry ``copyreg`` of the writing program, which is imported."""
        self.uses.computed(f"entry {code} of the extension registry")
        self.stack.append(Extension(code))

    def call(self, function: Any, args: Any) -> None:
        """Push the record of a call."""
        if type(args) is not tuple:
            self.uses.called(function, (args,))
            raise self.broken("the arguments of a call are not a tuple", "Call", self.at - 1)
        self.uses.called(function, args)
        self.stack.append(Call(function, args, self.at - 1))

    def reduce(self) -> None:
        """Replace a function and a tuple of arguments by the record of the call."""
        args = self.pop()
        self.call(self.pop(), args)

    def persist(self, words: Any) -> None:
        """Push the record of an object outside of the pickle."""
        record = Persistent(words)
        self.persistent.append(record)
        self.stack.append(record)

    def append(self, items: list[Any]) -> None:
        """Append to the list, or the instance that may be a list, on the stack."""
        target = self.top()
        if type(target) is Call:
            target.values = [] if target.values is None else target.values
            target.values += items
        elif type(target) is list or type(target) is PickledSet:
            target += items
        else:
            raise self.broken(f"{kind_of(target)} is not a list", "Append", self.at - 1)

    def set_items(self, items: list[Any]) -> None:
        """Set items of the mapping, or the instance that may be a mapping, on the stack."""
        target = self.top()
        if len(items) % 2:
            reason = f"{len(items)} keys and values, which is an odd number"
            raise self.broken(reason, "SetItems", self.at - 1)
        if type(target) is Call:
            target.pairs = Pairs() if target.pairs is None else target.pairs
            target.pairs += items
        elif type(target) is Pairs:
            target += items
        else:
            raise self.broken(f"{kind_of(target)} is not a mapping", "SetItems", self.at - 1)

    def build(self) -> None:
        """Set the state of an instance."""
        state, target = self.pop(), self.top()
        self.uses.built(target)
        if type(target) is not Call:
            raise self.broken(f"{kind_of(target)} has no state", "Build", self.at - 1)
        target.state, target.is_built = state, True

    # --- whole records ---------------------------------------------------------------------------

    def get_record(self, index: int) -> None:
        """Push an entry of the memo, and read a whole tensor of torch.save if one follows."""
        # A checkpoint has thousands of tensors with 32 opcodes each; one regular expression is much
        # faster, and leads to the same state.
        self.get(index)
        top = self.stack[-1]
        if type(top) is not Global or top != _REBUILD:
            return
        match = _RECORD.match(self.data, self.at)
        if match is None:
            return
        word, kind, key, put_key, location, numel, put_id, offset, *more = match.groups()
        size, put_size, stride, put_stride, flag, hooks, put_hooks, put_args, put = more
        memo = self.memo
        try:
            entries = [memo[_index(code)] for code in (word, kind, location, hooks)]
        except KeyError:
            return  # the opcodes raise the error
        puts = (put_key, put_id, put_size or put_id, put_stride or put_id, put_hooks, put_args, put)
        try:
            indices = _PLACES.unpack(b"".join(puts))
        except StructError:
            indices = tuple(map(_index, puts))
        # The record must not read entries of the memo that it writes itself.
        is_circular = _index(hooks) in indices[:4] or _index(location) == indices[0]
        if is_circular or key[0] != len(key) - 4 or entries[3] != _NO_HOOKS:
            return
        text = key[4:].decode()
        ints = self._ints
        count = ints.get(numel) or self._numbers(numel)
        words = (entries[0], entries[1], text, entries[2], *count)
        persistent = Persistent(words)
        self.persistent.append(persistent)
        sizes = ints.get(size) or self._numbers(size)
        strides = ints.get(stride) or self._numbers(stride)
        (first,) = ints.get(offset) or self._numbers(offset)
        no_hooks = Call(entries[3], (), self.at)
        args = (persistent, first, sizes, strides, flag == b"\x88", no_hooks)
        tensor = Call(_REBUILD, args, self.at)
        memo[indices[0]] = text
        memo[indices[1]] = words
        if put_size:
            memo[indices[2]] = sizes
        if put_stride:
            memo[indices[3]] = strides
        memo[indices[4]] = no_hooks
        memo[indices[5]] = args
        memo[indices[6]] = tensor
        self.stack[-1] = tensor
        self.at = match.end()

    def _numbers(self, code: bytes) -> tuple[int, ...]:
        """Return the integers that opcodes push; cached, since few different ones occur."""
        numbers = self._ints.get(code)
        if numbers is None:
            matches = list(_INT_OPCODE.finditer(code))
            data = [next(filter(None, match.groups())) for match in matches]
            numbers = self._ints[code] = tuple(
                int.from_bytes(digits, "little", signed=match[0][0] not in b"KM")
                for match, digits in zip(matches, data, strict=True)
            )
        return numbers


def _index(code: bytes) -> int:
    """Return the index in the memo that follows an opcode."""
    return code[1] if len(code) == 2 else _PLACE.unpack(code)[0]


# --- opcodes --------------------------------------------------------------------------------------


def _protocol(m: Machine) -> None:
    version = m.take(1)[0]
    if version > 5:
        reason = f"the pickle has protocol {version}; 0 to 5 are supported"
        raise UnsupportedError(reason, offset=m.base + m.at - 1, rule="Protocol")


def _frame(m: Machine) -> None:
    nbytes, available = m.number(_U64), len(m.data) - m.at
    if nbytes > available:
        reason = f"a frame has {nbytes} bytes, but only {available} follow"
        raise m.truncated(reason)


def _digits(m: Machine, text: bytes, *bases: int) -> int:
    # Python reads the prefixes of its literals, and octal digits after a 0.
    if re.fullmatch(rb"\s*[-+]?[0-9][0-9a-zA-Z_]*+\s*", text) is not None:
        for base in bases or (10,):
            with suppress(ValueError):  # digits of another base, or more than Python converts
                return int(text, base)
    raise m.broken(f"{shown(text[:99].decode('latin-1'))} is not an integer", "Number")


def _int(m: Machine) -> None:
    text = m.line(_LONGEST_DIGITS)
    booleans = {b"00": False, b"01": True}
    m.stack.append(booleans[text] if text in booleans else _digits(m, text, 0, 8))


def _float(m: Machine) -> None:
    text = m.line()
    try:
        m.stack.append(float(text))
    except ValueError as error:
        raise m.broken(f"not a number: {error}", "Number") from error


def _string(m: Machine) -> None:
    text = m.line(len(m.data))
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in {b"'", b'"'}:
        raise m.broken("a text has no quotes", "Text")
    try:
        data = codecs.escape_decode(text[1:-1])[0]
    except ValueError as error:
        raise m.broken(f"a text does not decode: {error}", "Text") from error
    m.stack.append(data.decode("latin-1"))


def _unicode(m: Machine) -> None:
    try:
        m.stack.append(m.line(len(m.data)).decode("raw-unicode-escape"))
    except UnicodeDecodeError as error:
        raise m.broken(f"a text does not decode: {error}", "Text") from error


def _global(m: Machine) -> None:
    module, name = m.line(), m.line()
    m.named(m.text(module), m.text(name))


def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    if type(name) is not str or type(module) is not str:
        m.uses.computed("an import with a computed name")
        raise m.broken("a name is not text", "Global", m.at - 1)
    m.named(module, name)


def _inst(m: Machine) -> None:
    _global(m)
    function = m.pop()
    m.call(function, tuple(m.popped()))


def _obj(m: Machine) -> None:
    function, *args = m.popped() or [None]
    if function is None:
        raise m.broken("the stack has no class", "Stack", m.at - 1)
    m.call(function, tuple(args))


def _newobj_ex(m: Machine) -> None:
    keywords, args = m.pop(), m.pop()
    m.call(m.pop(), args)
    m.top().state = keywords  # not joined with args, which other calls may share


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
        data = m.take(m.take(1)[0] if kind is None else m.number(kind))
        m.stack.append(data.decode("latin-1") if latin else data)

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
# Opcodes by handler, the most frequent ones first.
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
    ord("b"): lambda m: m.build(),
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
    ord("L"): lambda m: m.stack.append(_digits(m, m.line(_LONGEST_DIGITS).removesuffix(b"L"), 0)),
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
    0x82: lambda m: m.extend(m.take(1)[0]),
    0x83: lambda m: m.extend(m.number(_U16)),
    0x84: lambda m: m.extend(m.number(_I32)),
    0x97: lambda m: m.stack.append(Extension(-1)),
    0x98: Machine.top,  # READONLY_BUFFER
}

# Approximate memory in bytes of the objects that an opcode creates. Numbers, texts and bytes are
# not counted, because they take little more than in the pickle.
_COSTS = [0] * 256
for _cost, _codes in (
    (64, b"\x85\x86\x87tQP\x82\x83\x84\x97"),  # tuples, persistent ids, extensions
    (80, b"]}\x8f\x91ld"),  # lists, mappings, sets
    (112, b"rp\x94"),  # entries of the memo
    (128, b"Ro\x81\x92"),  # calls
    (256, b"c\x93i"),  # names, and calls by name
):
    for _code in _codes:
        _COSTS[_code] = _cost

# The opcodes after ``_rebuild_tensor_v2`` from the memo: ("storage", class, key, location, numel),
# offset, size, stride, requires_grad, OrderedDict().
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_NO_HOOKS = Global("collections", "OrderedDict")
_GOT, _PUT = rb"(h.|j.{4})", rb"(q.|r.{4})"
_LONG = rb"|".join(b"\\x8a" + bytes((n,)) + b".{%d}" % n for n in range(1, 9))
_INT = rb"(?:K.|M..|J.{4}|" + _LONG + rb")"
_SIZES = rb"(\)|(?:%b\x85|%b{2}\x86|%b{3}\x87|\((?:%b){4,64}t))" % ((_INT,) * 4) + _PUT + b"?"
_RECORD = re.compile(
    rb"\(\(%b%bX([\x01-\x09]\0\0\0[0-9]{1,9})%b%b(%b)t%bQ(%b)%b%b([\x88\x89])%b\)R%bt%bR%b"
    % (_GOT, _GOT, _PUT, _GOT, _INT, _PUT, _INT, _SIZES, _SIZES, _GOT, _PUT, _PUT, _PUT),
    re.DOTALL,
)
_INT_OPCODE = re.compile(
    rb"K(.)|M(..)|J(.{4})|"
    + rb"|".join(b"\\x8a" + bytes((n,)) + b"(.{%d})" % n for n in range(1, 9)),
    re.DOTALL,
)
