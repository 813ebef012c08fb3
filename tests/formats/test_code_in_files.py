"""Code that runs when another program loads a file, found without running it."""

from __future__ import annotations

import array
import builtins
import bz2
import gzip
import io
import json
import lzma
import marshal
import os
import pickle
import re
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from contextlib import redirect_stdout
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from functools import partial
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from uuid import UUID

import ml_dtypes
import numpy as np
import pytest

import xckpt
from tests.conftest import golden_files
from tests.formats import torch_files as files
from tests.formats.deepspeed_files import Run
from tests.formats.gguf_files import gguf_file, text
from xckpt.cli import main
from xckpt.formats.pickles.executing import is_accepted
from xckpt.formats.pickles.records import Global

if TYPE_CHECKING:
    from collections.abc import Callable

MKDIR = files.name(os.mkdir.__module__, "mkdir")
CANARY = files.text("canary")
EVAL = "__import__('os').mkdir('canary')"
NAMESPACE = files.name("argparse", "Namespace")


def builtin(name: str) -> bytes:
    return files.name("builtins", name)


def state(function: bytes) -> bytes:
    return files.mapping({"__setstate__": function})


def instance(kind: bytes, *args: bytes) -> bytes:
    return kind + files.several(*args) + b"\x81"


def short(text: str) -> bytes:
    return b"\x8c" + bytes((len(text),)) + text.encode()


REDUCE = files.called(MKDIR, CANARY)
MAP = builtin("map"), MKDIR, b"](" + CANARY + b"e"
CODE = marshal.dumps(compile(EVAL, "f", "eval"))
PARTIAL = files.called(files.name("functools", "partial"), MKDIR)
NAME = os.mkdir.__module__
# Values of pickles that make a folder when Python unpickles them.
PICKLES: dict[str, bytes] = {
    "REDUCE": REDUCE,
    "REDUCE, with opcodes of protocol 0": f"c{NAME}\nmkdir\n(S'canary'\ntR".encode(),
    "REDUCE, with UNICODE and TUPLE1": f"c{NAME}\nmkdir\nVcanary\n\x85R".encode("latin-1"),
    "INST": f"(S'canary'\ni{NAME}\nmkdir\n".encode(),
    "OBJ": b"(" + MKDIR + CANARY + b"o",
    "NEWOBJ": instance(builtin("tuple"), instance(*MAP)),
    "NEWOBJ_EX": builtin("tuple")
    + files.several(MAP[0] + files.several(*MAP[1:]) + b"}\x92")
    + b"}\x92",
    "EXT1": b"\x82\xf0" + CANARY + b"\x85R",
    "EXT2": b"\x83\xf0\0" + CANARY + b"\x85R",
    "EXT4": b"\x84\xf0\0\0\0" + CANARY + b"\x85R",
    "STACK_GLOBAL": short(NAME) + short("mkdir") + b"\x93" + CANARY + b"\x85R",
    "STACK_GLOBAL through MEMOIZE": short(NAME)
    + b"\x940"
    + short("mkdir")
    + b"\x940h\0h\1\x93"
    + CANARY
    + b"\x85R",
    "STACK_GLOBAL through LONG_BINPUT": files.text("mkdir")
    + b"r\x09\0\0\0000"
    + files.text(NAME)
    + b"j\x09\0\0\0\x93"
    + CANARY
    + b"\x85R",
    "GLOBAL through PUT and GET": MKDIR + b"p7\n0" + b"g7\n" + CANARY + b"\x85R",
    "GLOBAL through DUP": MKDIR + b"2" + CANARY + b"\x85R",
    "STACK_GLOBAL with a computed name": files.text(NAME)
    + files.called(builtin("str"), files.text("mkdir"))
    + b"\x93"
    + CANARY
    + b"\x85R",
    "a name with dots": short("os") + short("path.os.mkdir") + b"\x93" + CANARY + b"\x85R",
    "a name with dots in an accepted module": short("argparse")
    + short("_os.mkdir")
    + b"\x93"
    + CANARY
    + b"\x85R",
    "BUILD twice, with __setstate__": instance(NAMESPACE) + state(MKDIR) + b"b" + CANARY + b"b",
    "BUILD twice, with __setstate__ in slots": instance(NAMESPACE)
    + files.several(b"N", state(MKDIR))
    + b"b"
    + CANARY
    + b"b",
    "BUILD of a class": files.name("collections", "UserDict")
    + files.several(b"N", state(MKDIR))
    + b"b0"
    + instance(files.name("collections", "UserDict"))
    + CANARY
    + b"b",
    "a class made with __setstate__": instance(
        files.called(builtin("type"), short("C"), files.several(NAMESPACE), state(MKDIR))
    )
    + CANARY
    + b"b",
    "a base that is called": files.called(
        files.name("copyreg", "_reconstructor"),
        *(files.name("logging", "FileHandler"),) * 2,
        CANARY,
    ),
    "copyreg.__newobj__": instance(
        builtin("tuple"), files.called(files.name("copyreg", "__newobj__"), *MAP)
    ),
    "copyreg of Python 2": instance(
        builtin("tuple"), files.called(files.name("copy_reg", "__newobj__"), *MAP)
    ),
    "a call of functools.partial": PARTIAL + CANARY + b"\x85R",
    "functools.partial in __setstate__": instance(NAMESPACE)
    + state(PARTIAL)
    + b"b"
    + CANARY
    + b"b",
    "builtins.eval": files.called(builtin("eval"), files.text(EVAL)),
    "builtins.eval of Python 2": files.called(files.name("__builtin__", "eval"), files.text(EVAL)),
    "getattr of a module": files.called(
        files.called(
            builtin("getattr"),
            files.called(files.name("importlib", "import_module"), files.text("os")),
            files.text("mkdir"),
        ),
        CANARY,
    ),
    "operator.methodcaller": files.called(
        files.called(files.name("operator", "methodcaller"), files.text("mkdir"), CANARY),
        files.called(files.name("importlib", "import_module"), files.text("os")),
    ),
    "timeit": files.called(files.name("timeit", "timeit"), files.text(EVAL)),
    "pickle.loads": files.called(
        files.name("pickle", "loads"), b"B" + struct.pack("<I", len(REDUCE) + 1) + REDUCE + b"."
    ),
    "marshal": files.called(
        builtin("eval"),
        files.called(files.name("marshal", "loads"), b"B" + struct.pack("<I", len(CODE)) + CODE),
    ),
    "Counter of a map": files.called(files.name("collections", "Counter"), instance(*MAP)),
    "a constructor of NumPy": files.called(
        files.name("numpy.random._pickle", "__generator_ctor"), CANARY, MKDIR
    ),
    "a generator of NumPy": files.called(
        files.name("numpy.random._pickle", "__bit_generator_ctor"), MKDIR
    ),
    "a function of a package": files.called(
        files.name("numpy.testing._private.utils", "runstring"), files.text(EVAL), b"}"
    ),
    "a result that is dropped": REDUCE + b"0}",
    "before an error": REDUCE + b"0\xff",
    "before a wrong frame": REDUCE + b"0\x95" + struct.pack("<Q", 1 << 40),
    "arguments in a computed tuple": files.name("numpy.testing._private.utils", "runstring")
    + files.called(builtin("tuple"), b"](" + files.text(EVAL) + b"}e")
    + b"R",
    "after an integer of base 16": b"I0x10\n0" + REDUCE,
    "after an integer with underscores": b"L1_0L\n0" + REDUCE,
    "after an item of a list": b"]K\1aK\0K\2s0" + REDUCE,
    "bytes of torch.save": files.called(
        files.name("torch.storage", "_load_from_bytes"),
        b"B" + struct.pack("<I", len(REDUCE) + 1) + REDUCE + b".",
    ),
    "a key": b"}" + REDUCE + b"Ns",
    "deep": b"](" * 900 + REDUCE + b"e" * 900,
}
# These stop with an error before they call it, as their functions do not take the argument.
FAILING = {"a generator of NumPy", "a constructor of NumPy"}
FAILING |= {"bytes of torch.save"}  # without PyTorch


def pickled(value: bytes) -> bytes:
    protocol = b"\2" if b"__builtin__" in value or b"copy_reg" in value else b"\4"
    return b"\x80" + protocol + value + b"."


@pytest.fixture
def unpickled(tmp_path: Path) -> dict[str, bool]:
    """Unpickle all values in a process of its own, and return whether they made a folder."""
    program = (
        "import copyreg, os, pickle, sys\n"
        "copyreg.add_extension(os.mkdir.__module__, 'mkdir', 240)\n"
        "done = {}\n"
        "for name, data in pickle.load(sys.stdin.buffer).items():\n"
        "    os.mkdir(name.replace(' ', '-').replace(',', '')); os.chdir(name.replace(' ', '-')"
        ".replace(',', ''))\n"
        "    try: pickle.loads(data)\n"
        "    except BaseException: pass\n"
        "    done[name] = os.path.exists('canary'); os.chdir('..')\n"
        "sys.stdout.buffer.write(pickle.dumps(done))"
    )
    data = pickle.dumps({name: pickled(value) for name, value in PICKLES.items()})
    command = [sys.executable, "-c", program]
    result = subprocess.run(  # noqa: S603  our own
        command, input=data, cwd=tmp_path, capture_output=True, check=True
    )
    done: dict[str, bool] = pickle.loads(result.stdout)
    return done


def test_the_pickles_run_code_elsewhere(unpickled: dict[str, bool]) -> None:
    assert {name for name, is_run in unpickled.items() if not is_run} <= FAILING
    assert len(PICKLES) - len(FAILING) >= 40


def found(path: str | Path) -> list[str]:
    """Return the rules of the findings of `verify`, which must be errors."""
    report = xckpt.verify(path)
    assert report.status in {"unsafe", "damaged"}
    return [f.message for f in report.findings if f.severity == "error" and f.rule == "executes"]


class TestPickles:
    @pytest.mark.parametrize("name", PICKLES)
    def test_code_is_found_and_not_run(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        path = tmp_path / "m.pt"
        members = {"m/data.pkl": pickled(PICKLES[name]), "m/version": b"3\n"}
        path.write_bytes(files.zipped(members))
        assert found(path)
        assert not (tmp_path / "canary").exists()

    @pytest.mark.parametrize("protocol", [2, 4])
    @pytest.mark.parametrize("function", [os.system, builtins.eval, partial(os.remove, "x")])
    def test_verify_fails_and_names_the_function(
        self, function: Any, protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Evil:
            def __reduce__(self) -> Any:
                return function, ("1",)

        value = {"note": "x", "deep": [{"value": Evil()}]}
        path = tmp_path / "evil.pt"
        data = pickle.dumps(value, protocol)
        path.write_bytes(files.zipped({"m/data.pkl": data, "m/version": b"3\n"}))
        called = getattr(function, "func", function)
        name = f".{called.__name__}"
        assert any(code.endswith(name) for code in xckpt.read_index(path).executes)
        assert main(["verify", str(path)]) == 1
        out = capsys.readouterr().out
        assert "UNSAFE" in out
        assert name in out

    def test_errors_keep_it_when_they_are_pickled(self, tmp_path: Path) -> None:
        path = tmp_path / "m.pt"
        data = pickled(PICKLES["before an error"])
        path.write_bytes(files.zipped({"m/data.pkl": data, "m/version": b"3\n"}))
        with pytest.raises(xckpt.FormatError) as caught:
            xckpt.read_index(path)
        assert pickle.loads(pickle.dumps(caught.value)).executes == (f"{NAME}.mkdir",)

    def test_a_class_without_arguments_is_an_import(self, tmp_path: Path) -> None:
        path = tmp_path / "module.pt"
        path.write_bytes(files.archive(instance(files.name("torch.nn.modules.linear", "Linear"))))
        index = xckpt.read_index(path)
        assert (index.executes, index.imports) == ((), ("torch.nn.modules.linear.Linear",))
        findings = [(f.severity, f.rule) for f in xckpt.verify(path).findings]
        assert ("warning", "imports") in findings


def npy(value: bytes, descr: str = "|O") -> bytes:
    head = repr({"descr": descr, "fortran_order": False, "shape": (1,)}).encode() + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + pickled(value)


def legacy(position: int) -> bytes:
    parts = [pickled(b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"), pickled(b"M\xe9\x03")]
    parts += [pickled(files.mapping({"little_endian": b"\x88"})), pickled(b"}"), pickled(b"]")]
    parts[position] = pickled(REDUCE + b"0" + parts[position][2:-1])
    return b"".join(parts)


def inner_zip(level: int) -> bytes:
    data = pickled(REDUCE)
    for _ in range(level):
        data = files.zipped({"inner.pkl": data})
    return data


GOOD = {"m/data.pkl": files.pickled(b"}"), "m/version": b"3\n"}


def joblib_array(dtype: bytes, data: bytes, shape: int = 2) -> bytes:
    """Return an array as joblib writes it: its values follow, in the middle of the pickle."""
    entries = {
        "subclass": files.name("numpy", "ndarray"),
        "shape": files.several(b"K" + bytes((shape,))),
        "order": files.text("C"),
        "dtype": files.called(files.name("numpy", "dtype"), dtype, b"\x89", b"\x88"),
        "numpy_array_alignment_bytes": b"K\x10",
    }
    wrapper = instance(files.name("joblib.numpy_pickle", "NumpyArrayWrapper"))
    return wrapper + files.mapping(entries) + b"b" + data


NUMBERS = joblib_array(files.text("f8"), b"\3xxx" + b"\xff" * 16)


def tar(**members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def two_members() -> bytes:
    """Return an archive of which PyTorch reads another member than Python does."""
    evil = files.archive(REDUCE)
    out = io.BytesIO(evil)
    with zipfile.ZipFile(out, "a") as target:
        target.writestr("m/data.pkX", GOOD["m/data.pkl"])
    return out.getvalue().replace(b"data.pkX", b"data.pkl")


# Of PyTorch before 0.2; a storage is a pickle, a count, and raw values.
OLD = {"sys_info": pickled(b"}"), "storages": pickled(b"K\0"), "tensors": pickled(b"K\0")}
OLD |= {"pickle": pickled(b"}")}
RAW = pickled(b"K\1") + pickled(b"N") + b"\1" + bytes(7) + b"\xff" * 4

ARRAYS = {"w": np.ones(3, np.float32)}
# Names and contents of files.
CONTAINERS: dict[str, tuple[str, bytes]] = {
    "zip": ("m.pt", files.archive(REDUCE)),
    "a deflated zip": ("m.pt", files.archive(REDUCE, method=zipfile.ZIP_DEFLATED)),
    "constants": ("m.pt", files.zipped(GOOD | {"m/constants.pkl": pickled(REDUCE)})),
    "another pickle": ("m.pth", files.zipped(GOOD | {"m/extra/more.pkl": pickled(REDUCE)})),
    "an array of objects": ("m.pth", files.zipped(GOOD | {"m/extra/a.npy": npy(REDUCE)})),
    "a zip in it": ("m.ckpt", files.zipped(GOOD | {"m/inner.zip": inner_zip(1)})),
    "a zip in a zip in it": ("m.ckpt", files.zipped(GOOD | {"m/inner.zip": inner_zip(2)})),
    "legacy, object": ("m.pt", legacy(3)),
    "legacy, information": ("m.pt", legacy(2)),
    "legacy, version": ("m.pt", legacy(1)),
    "legacy, keys": ("m.bin", legacy(4)),
    "npy": ("m.npy", npy(REDUCE)),
    "npy, spelled otherwise": ("m.npy", npy(REDUCE, "object")),
    "npz": ("m.npz", files.zipped({"a.npy": npy(REDUCE)})),
    "npz, deflated": ("m.npz", files.zipped({"a.npy": npy(REDUCE)}, zipfile.ZIP_DEFLATED)),
    "npz, records": ("m.npz", files.zipped({"a.npy": npy(REDUCE, "i4,O")})),
    "a pickle alone": ("m.pkl", pickled(REDUCE)),
    "a pickle alone, named otherwise": ("m.pt", pickled(REDUCE)),
    "a pickle of protocol 0": ("m.pkl", REDUCE + b"."),
    "a pickle that begins with a mark": ("m.pkl", f"(S'canary'\ni{NAME}\nmkdir\n.".encode()),
    "a pickle in gzip": ("m.pkl.gz", gzip.compress(pickled(REDUCE))),
    "a pickle in bzip2": ("m.pkl.bz2", bz2.compress(pickled(REDUCE))),
    "a pickle in xz": ("m.joblib", lzma.compress(pickled(REDUCE))),
    "a pickle in lzma": ("m.joblib", lzma.compress(pickled(REDUCE), lzma.FORMAT_ALONE)),
    "a pickle in zlib": ("m.joblib", zlib.compress(pickled(REDUCE))),
    "a pickle in gzip that is cut off": ("m.pkl.gz", gzip.compress(pickled(REDUCE))[:-8]),
    "pickles in two parts of gzip": (
        "m.pkl.gz",
        gzip.compress(pickled(b"}")) + gzip.compress(pickled(REDUCE)),
    ),
    "joblib": ("m.joblib", pickled(b"]" + NUMBERS + b"a" + REDUCE + b"a")),
    "joblib, compressed": ("m.joblib", zlib.compress(pickled(b"]" + NUMBERS + b"a" + REDUCE))),
    "joblib, objects": (
        "m.joblib",
        pickled(NUMBERS + joblib_array(files.text("O8"), pickled(REDUCE)) + b"0"),
    ),
    "joblib, fields with objects": (
        "m.joblib",
        pickled(NUMBERS + joblib_array(files.text("V16"), pickled(REDUCE)) + b"0"),
    ),
    "two members of one name": ("m.pt", two_members()),
    "another name in the local header": (
        "m.pt",
        files.zipped(
            {"m/data.pkl": f"c{NAME}\nmkdir\n(S'canary'\ntR.".encode()} | {"m/version": b"3"}
        ).replace(b"data.pkl", b"data.pkX", 1),
    ),
    "a package of code": (
        "m.pt",
        files.zipped({"m/.data/extern_modules": b"", "m/model/model.pkl": pickled(REDUCE)}),
    ),
    "bytes of torch.save": (
        "m.pkl",
        pickled(
            files.called(
                files.name("torch.storage", "_load_from_bytes"),
                b"B" + struct.pack("<I", len(files.archive(REDUCE))) + files.archive(REDUCE),
            )
        ),
    ),
    "tar": ("m.pt", tar(**OLD | {"pickle": pickled(REDUCE)})),
    "tar, information": ("m.tar", tar(**OLD | {"sys_info": pickled(REDUCE)})),
    "tar, storages": ("m.pt", tar(**OLD | {"storages": RAW + pickled(REDUCE)})),
    "tar, tensors": ("m.pth", tar(**OLD | {"tensors": RAW + pickled(REDUCE)})),
}


class TestContainers:
    @pytest.mark.parametrize("name", CONTAINERS)
    def test_code_is_found(self, name: str, tmp_path: Path) -> None:
        file_name, data = CONTAINERS[name]
        (tmp_path / file_name).write_bytes(data)
        (message,) = found(tmp_path / file_name)
        assert f"{NAME}.mkdir" in message

    def test_in_the_metadata_of_a_distributed_checkpoint(self, tmp_path: Path) -> None:
        folder = files.distributed({"w": {(0,): ARRAYS["w"]}}, {"w": (3,)})
        folder[".metadata"] = folder[".metadata"][:2] + REDUCE + b"0" + folder[".metadata"][2:]
        for name, data in folder.items():
            (tmp_path / name).write_bytes(data)
        assert found(tmp_path)

    def test_in_an_item_of_a_distributed_checkpoint(self, tmp_path: Path) -> None:
        folder = files.distributed({"w": {(0,): ARRAYS["w"]}}, {"w": (3,)})
        item = folder["__0_0.distcp"]
        value = files.whole("0", ARRAYS["w"])
        evil = files.archive(REDUCE + b"0" + value, {"0": ARRAYS["w"].tobytes()})
        length = files.number64(len(item))
        folder[".metadata"] = folder[".metadata"].replace(length, files.number64(len(evil)))
        folder["__0_0.distcp"] = evil
        for name, data in folder.items():
            (tmp_path / name).write_bytes(data)
        assert found(tmp_path)

    @pytest.mark.parametrize("rank", [None, 0, 1])
    def test_in_a_file_of_deepspeed(self, rank: int | None, tmp_path: Path) -> None:
        changes = {"extra": REDUCE}
        groups = [{"a": np.ones((2, 3), np.float32)}]
        run = Run(groups, changes={"model" if rank is None else rank: changes})
        run.write(tmp_path)
        assert found(tmp_path)


HARMLESS = {
    "Namespace": Namespace(lr=0.1),
    "datetime": datetime.now(UTC),
    "path": PurePosixPath("x"),
    "path of the system": Path("x"),
    "OrderedDict": OrderedDict(a={1}),
    "defaultdict": defaultdict(list, a=[1]),
    "deque": deque([1]),
    "complex": 1j,
    "bytes": b"x",
    "bytearray": bytearray(b"x"),
    "frozenset": frozenset({1}),
    "slice": slice(1, 2),
    "range": range(3),
    "Decimal": Decimal("0.1"),
    "Fraction": Fraction(1, 3),
    "UUID": UUID(int=1),
    "NoneType": type(None),
    "partial": partial(dict, a=1),
    "array": np.arange(3.0),
    "array in Fortran order": np.ones((2, 3), order="F"),
    "array of text": np.array(["x"]),
    "array of objects": np.array([None, {"a": 1}], dtype=object),
    "number of NumPy": np.float32(3),
    "dtype": np.dtype("<f4"),
    "masked array": np.ma.masked_array([1.0, 2.0], [True, False]),
    "state of a generator": np.random.RandomState(0).get_state(),
    "RandomState": np.random.RandomState(0),
    "Generator": np.random.default_rng(0),
    "bfloat16": np.ones(2, ml_dtypes.bfloat16),
    "records": np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    "array of Python": array.array("d", [1.0]),
    "pattern": re.compile("a+"),
    "status": HTTPStatus.OK,
    "time": time.localtime(0),
}


@pytest.mark.parametrize("protocol", [0, 2, 3, 4, 5])
@pytest.mark.parametrize("name", HARMLESS)
def test_values_are_harmless(name: str, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "good.pt"
    data = pickle.dumps({"value": HARMLESS[name]}, protocol)
    path.write_bytes(files.zipped({"m/data.pkl": data, "m/version": b"3\n"}))
    index = xckpt.read_index(path)
    assert (index.executes, index.imports) == ((), ())


def test_arrays_of_objects_are_harmless(tmp_path: Path) -> None:
    array: Any = HARMLESS["array of objects"]
    np.savez(tmp_path / "m.npz", a=array, b=np.ones(2))
    np.save(tmp_path / "m.npy", array)
    for name in ("m.npz", "m.npy"):
        assert xckpt.read_index(tmp_path / name).executes == ()


# They name functions where other files have types, and call classes of unknown packages.
EVIL = {"quantised_scheme.pt", "v3_dtype_evil.pt", "objects.pt"}
# It encodes a text; and a class of a package is made without arguments.
GOOD_FILES = {"exec_codecs_exec.pt", "exec_ordereddict_subclass.pt"}


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("path", golden_files("torch/**/*.pt"), ids=lambda path: path.name)
def test_golden_files(path: Path) -> None:
    try:
        executes = xckpt.read_index(path).executes
    except xckpt.CheckpointError as error:
        executes = error.executes
    is_evil = path.name.startswith("exec_") or path.name in EVIL
    assert bool(executes) == (is_evil and path.name not in GOOD_FILES)


# --- texts ----------------------------------------------------------------------------------------

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "attribute": "{{ ''.__class__ }}",
    "spaces": "{{ '' . __class__ }}",
    "statement": "{% set x = messages.__init__.__globals__ %}",
    "subscript": "{{ ''['__class__'] }}",
    "escaped subscript": r"{{ ''['\x5f\x5fclass\x5f\u005f'] }}",
    "joined subscript": "{{ ''[('_' * 2) ~ 'class' ~ ('_' * 2)] }}",
    "filter": "{{ '' | attr('x') }}",
    "map": "{{ [''] | map(attribute='__class__') | list }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "global": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "frame": "{{ f.gi_frame.f_back }}",
    "include": "{%- include '/etc/passwd' %}",
    "after a mapping": "{{ {'a': {'b': 1}} }}{{ ''.__class__ }}",
    "inside a mapping": "{{ {'a': {'b': ''.__class__}} }}",
    "after a text with braces": "{{ '}}' ~ ''.__class__ }}",
    "after a comment": "{# x #}{{ ''.__class__ }}",
    "pieces of a name": "{% set c = '__cl' ~ 'ass__' %}{{ ''[c] }}",
    "the first piece of a name": "{{ strftime_now['__glob' + x] }}",
    "capital letters": "{{ messages['__CLASS__' | lower] }}",
}


def gguf(template: str, key: str = "tokenizer.chat_template") -> bytes:
    return gguf_file({key: text(template)}, [("w", [8], 0, 0)], bytes(32))


class TestTemplates:
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_more_than_formatting_is_found(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(gguf(PLAIN + TEMPLATES[name]))
        assert xckpt.read_index(path).executes
        assert found(path)

    @pytest.mark.parametrize(
        "template",
        [
            PLAIN,
            "{# ''.__class__ #}{% raw %}{{ ''.__class__ }}{% endraw %} __class__",
            "{%- set ns = namespace(found=false, _x=1) -%}{{- ns.found }}{{ m['tool_calls'] }}",
            "{{ 'a__b' ~ tools | tojson(indent=4) ~ {'a': {'b': 1}} | tojson }}",
            "{{ raise_exception('No __name') }}{{ strftime_now('%d %b %Y') }}",
            "{{ 'mcp__' ~ tool.name ~ '__run' }}",
            "{% unfinished",
            "{{ 'unfinished",
        ],
    )
    def test_formatting_is_harmless(self, template: str, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(gguf(template))
        assert xckpt.read_index(path).executes == ()

    def test_other_templates_are_examined(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(gguf(TEMPLATES["attribute"], "tokenizer.chat_template.tools"))
        (text,) = xckpt.read_index(path).executes
        assert text.startswith("tokenizer.chat_template.tools")


def layer(kind: str, config: Any, **more: Any) -> dict[str, Any]:
    return {"class_name": kind, "config": config, "name": "x", **more}


DENSE = {"module": "keras.layers", "registered_name": None}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "lambda": (layer("Lambda", {"function": layer("__lambda__", {"code": "4wA="})}), "executes"),
    "lambda of Keras 2": (
        layer("Lambda", {"name": "l", "function": ["4wA=", None, None]}),
        "executes",
    ),
    "module of Python": (layer("function", "system", module="os"), "executes"),
    "function of a module of Python": (
        layer("Lambda", {"function": "system", "function_type": "function", "module": "os"}),
        "executes",
    ),
    "module of PyTorch": (layer("TorchModuleWrapper", {"module": "eA=="}, **DENSE), "executes"),
    "function of Python": (layer("function", "exec", module="builtins"), "executes"),
    "call of Python": (layer("exec", {"x": "1"}, module="builtins"), "executes"),
    "tool of Keras": (layer("function", "get_file", module="keras.utils"), "executes"),
    "module of a package": (layer("Mine", {}, module="mine.layers"), "imports"),
    "custom object": (layer("Mine", {}, module=None, registered_name="mine>Mine"), "imports"),
    "layer": (layer("Dense", {"units": 3}, **DENSE), ""),
    "function": (layer("function", "relu", module="builtins", registered_name="relu"), ""),
}


class TestKeras:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_code_of_a_configuration(self, name: str, tmp_path: Path) -> None:
        config, rule = CONFIGS[name]
        h5py = pytest.importorskip("h5py")
        weights = io.BytesIO()
        with h5py.File(weights, "w") as file:
            file["layers/dense/vars/0"] = np.ones(3, np.float32)
        root = layer("Sequential", {"layers": [layer("Dense", {}, **DENSE), config]}, **DENSE)
        members = {"metadata.json": b"{}", "config.json": json.dumps(root).encode()}
        path = tmp_path / "m.keras"
        path.write_bytes(files.zipped(members | {"model.weights.h5": weights.getvalue()}))
        index = xckpt.read_index(path)
        assert bool(index.executes) == (rule == "executes")
        assert bool(index.imports) == (rule == "imports")
        rules = {f.rule for f in xckpt.verify(path).findings}
        assert (rules & {"executes", "imports"}) == ({rule} if rule else set())


def printed(command: str, path: Path) -> str:
    """Return what a command prints."""
    with redirect_stdout(io.StringIO()) as out:
        main([command, str(path)])
    return out.getvalue()


class TestWhereItIsShown:
    """One scan feeds `verify`, `findings`, the summary and the explorer."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "m.pt"
        items = {"w": files.whole("0", ARRAYS["w"]), "evil": REDUCE}
        path.write_bytes(files.archive(files.mapping(items), {"0": ARRAYS["w"].tobytes()}))
        return path

    @pytest.mark.parametrize(
        "shown",
        [
            lambda path: repr(xckpt.verify(path)),
            lambda path: repr(xckpt.read_index(path)),
            lambda path: repr(xckpt.open(path).ckpt),
            lambda path: printed("info", path),
            lambda path: xckpt.open(path).ckpt._repr_html_(),
            lambda path: " ".join(xckpt.findings(path)["explanation"]),
            lambda path: " ".join(xckpt.open(path).ckpt.findings()["explanation"]),
            lambda path: " ".join(xckpt.findings(xckpt.stats(path))["explanation"]),
            lambda path: str(xckpt.open(path).ckpt.explore().get_state()["_errors"]),
        ],
        ids=["verify", "index", "ds", "summary", "html", "path", "Dataset", "stats", "explorer"],
    )
    def test_the_function_is_named(self, shown: Callable[[Path], str], path: Path) -> None:
        assert f"{NAME}.mkdir" in shown(path)

    def test_finding(self, path: Path) -> None:
        (finding,) = (
            xckpt.findings(path, ignore="all_zero").query("rule == 'executes'").itertuples()
        )
        assert (finding.tensor, finding.severity, finding.value) == ("", "error", 1)

    def test_a_copy_has_no_code(self, path: Path, tmp_path: Path) -> None:
        xckpt.convert(path, tmp_path / "m.safetensors", tensors="w")
        assert xckpt.verify(tmp_path / "m.safetensors").status == "unchecked"


def pickled_by(torch: Any) -> dict[str, Any]:
    """Return values that training programs save."""
    nn, optim = torch.nn, torch.optim
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    values: dict[str, Any] = {"model": model.state_dict()}
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "Rprop"):
        optimizer = getattr(optim, name)(model.parameters(), lr=1e-3)
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
        values[name] = optimizer.state_dict()
        values[f"{name} with a schedule"] = optim.lr_scheduler.StepLR(optimizer, 2).state_dict()
    state = np.random.RandomState(0).get_state()
    values["rng"] = {"torch": torch.get_rng_state(), "numpy": state}
    values["types"] = [torch.ones(2, dtype=t) for t in (torch.bfloat16, torch.float8_e4m3fn)]
    values["sparse"] = torch.eye(3).to_sparse()
    values["others"] = [torch.ones(2, device="meta"), torch.Size([1]), torch.device("cpu")]
    values["parameter"] = nn.Parameter(torch.ones(2))
    values["arguments"] = {"args": Namespace(lr=0.1), "epoch": 3, "best": np.float64(0.5)}
    return values


class TestLibraries:
    """Files of real libraries, of the extra ``oracles``."""

    def test_the_list_has_all_names_that_torch_accepts(self) -> None:
        unpickler = pytest.importorskip("torch._weights_only_unpickler")
        allowed = unpickler._get_allowed_globals()
        names = [Global(*name.rsplit(".", 1)) for name in allowed]
        assert [name for name in names if not is_accepted(name)] == []

    @pytest.mark.parametrize("is_legacy", [False, True])
    def test_values_of_torch(self, is_legacy: bool, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        for name, value in pickled_by(torch).items():
            path = tmp_path / f"{name}.pt"
            torch.save(value, path, _use_new_zipfile_serialization=not is_legacy)
            index = xckpt.read_index(path)
            assert (name, index.executes, index.imports) == (name, (), ())

    def test_models_of_torchvision_and_timm(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        models = {
            "vision": pytest.importorskip("torchvision").models.squeezenet1_1(),
            "timm": pytest.importorskip("timm").create_model("vit_tiny_patch16_224", depth=1),
        }
        for name, model in models.items():
            state = {"state_dict": model.state_dict(), "args": Namespace(model=name), "arch": name}
            torch.save(state, tmp_path / name)
            assert xckpt.read_index(tmp_path / name).executes == ()
            torch.save(model, tmp_path / name)
            index = xckpt.read_index(tmp_path / name)
            assert not index.executes
            assert index.imports

    def test_arguments_of_transformers(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        arguments = transformers.TrainingArguments(tmp_path / "run", report_to=[], use_cpu=True)
        torch.save(arguments, tmp_path / "training_args.bin")
        index = xckpt.read_index(tmp_path / "training_args.bin")
        assert (index.executes, index.imports) == ((), ())
