"""Files that are not checkpoints: their type, by content and name, and what to do with them."""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, NamedTuple

from xckpt.errors import CheckpointError, shown, some
from xckpt.formats import archive, kit
from xckpt.formats.pickles.scanning import COMPRESSED, scan_file, tar_members

if TYPE_CHECKING:
    from collections.abc import Collection

    from xckpt.readable import Readable

_LONGEST_SHOWN = 80
_STEP = 1 << 16  # bytes of an archive that are decompressed
_LONGEST_PATH = 1 << 10
_SHORT_TEXT = 1 << 12  # bytes of a text that may be the answer of a server

# --- by the first bytes ---------------------------------------------------------------------------

_UNZIP = "Decompress it first"
_EXTRACT = "Extract it first"
_OLD_GGML = "Convert it with convert_llama_ggml_to_gguf.py of llama.cpp"
_AGAIN = "Download the file again"
_ADDRESS = "Check the address and your access to it, and download the file again"
_PICKLE = (
    "xckpt never executes pickles, and reads only those of torch.save: load it where it was "
    "written, and save its arrays with numpy.savez"
)
_ENGINE = "Open the ONNX model or the checkpoint that it was made from"
_TENSORFLOW = (
    "Load it with TensorFlow, and save the weights with model.save_weights('m.weights.h5')"
)
_METADATA = (
    "It has the names and shapes of all tensors: copy '.metadata' from the folder of rank 0, and "
    "open this folder"
)
_CORE_ML = "Open the checkpoint that it was converted from, or read it with coremltools"
_TABLE = "It is a table, not a checkpoint: pandas.read_parquet or pandas.read_feather reads it"
_IMAGE = "Choose the file with the weights"


class _Mark(NamedTuple):
    """Bytes by which a type of file is known, and advice."""

    data: bytes | tuple[bytes, ...]
    kind: str
    advice: str
    offset: int = 0


_MARKS = (
    _Mark(
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer instead of the file itself",
        "Run `git lfs pull` in its repository",
    ),
    _Mark(
        b"/annex/objects/", "a git-annex pointer instead of the file itself", "Run `git annex get`"
    ),
    _Mark(b"outs:\n- md5:", "a DVC pointer instead of the file itself", "Run `dvc pull`"),
    _Mark(b"lmgg", "a GGML file, older than GGUF", _OLD_GGML),
    _Mark(b"fmgg", "a GGMF file, older than GGUF", _OLD_GGML),
    _Mark(b"tjgg", "a GGJT file, older than GGUF", _OLD_GGML),
    _Mark(b"algg", "a GGLA file, an adapter older than GGUF", "Convert the original adapter again"),
    _Mark(b"MZqFpD", "a llamafile, a program with a model in it", "Extract its .gguf with `unzip`"),
    _Mark(b"\x89HDF\r\n\x1a\n", "an HDF5 file of netCDF 4", "Open it with engine='h5netcdf'"),
    _Mark((b"CDF\x01", b"CDF\x02", b"CDF\x05"), "a netCDF 3 file", "Open it with engine='scipy'"),
    _Mark(
        b"MATLAB 5.0 MAT-file",
        "a MATLAB file",
        "Read it with scipy.io.loadmat, and save its arrays",
    ),
    _Mark(b"PAR1", "a Parquet file", _TABLE),
    _Mark((b"ARROW1\0\0", b"FEA1"), "an Arrow file", _TABLE),
    _Mark(b"SQLite format 3\0", "an SQLite database", "Choose the file with the weights"),
    _Mark(b"\x1f\x8b", "compressed by gzip", _UNZIP),
    _Mark(b"\xfd7zXZ\x00", "compressed by xz", _UNZIP),
    _Mark(b"BZh", "compressed by bzip2", _UNZIP),
    _Mark(b"\x28\xb5\x2f\xfd", "compressed by zstd", _UNZIP),
    _Mark(b"\x04\x22\x4d\x18", "compressed by lz4", _UNZIP),
    _Mark(b"Rar!\x1a\x07", "a RAR archive", _EXTRACT),
    _Mark(b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _EXTRACT),
    _Mark(b"PK\x03\x04", "a zip archive without arrays of NumPy or PyTorch", _EXTRACT),
    _Mark(b"ftrt", "a TensorRT engine, which is made for one kind of GPU", _ENGINE),
    _Mark(
        b"model_checkpoint_path:", "the list of the checkpoints of a TensorFlow run", _TENSORFLOW
    ),
    _Mark(b"\x12\x01\0\0\0\0\0\0", "a parameter file of MXNet", "Load it with mxnet.nd.load"),
    _Mark(b"7767517\n", "the text of an ncnn model", _ENGINE),
    _Mark(b"\x89PNG\r\n\x1a\n", "a PNG image", _IMAGE),
    _Mark(b"\xff\xd8\xff", "a JPEG image", _IMAGE),
    _Mark((b"GIF87a", b"GIF89a"), "a GIF image", _IMAGE),
    _Mark((b"II*\0", b"MM\0*"), "a TIFF image", _IMAGE),
    _Mark(b"%PDF-", "a PDF document", _IMAGE),
    _Mark(b"\x7fELF", "a program or a library", "Choose the file with the weights"),
    _Mark(
        b"TFL3", "a TensorFlow Lite model", "Open the model that it was converted from", offset=4
    ),
    _Mark(
        b"ORTM",
        "a model of onnxruntime (.ort)",
        "Open the ONNX model that it was made from",
        offset=4,
    ),
    _Mark(b"WEBP", "a WebP image", _IMAGE, offset=8),
    _Mark(b"\xef\xbe\xad\xde", "the weights of a Core ML package", _CORE_ML, offset=64),
    _Mark(b"ustar", "a tar archive", _EXTRACT, offset=257),
)
_APPLE_DOUBLE = b"\x00\x05\x16\x07"
_STORAGE = b"X\7\0\0\0storage"  # the first word of the place of a storage outside of a pickle
_PICKLES = re.compile(rb"\x80[\2-\5]|\((?:dp|lp)\d+\n|[}\]]q\0|c[a-z_.]+\n[A-Za-z_]+\n")
_PICKLED = (".pkl", ".pickle", ".joblib", ".pt", ".pth", ".bin", ".ckpt", ".tar", ".sav", ".p")
# In the folder of a SavedModel.
_SAVED_MODELS = frozenset({"saved_model.pb", "saved_model.pbtxt"})
# SavedModel and models of Core ML begin as ONNX models do: a version, then a message.
_VERSIONED = re.compile(rb"\x08[\1-\x20]\x12(?:[\x80-\xff]+[\0-\x7f]|[\1-\x7f])\x0a", re.DOTALL)

# --- texts ----------------------------------------------------------------------------------------

_BOM, _UTF_16 = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_XML_ERROR = re.compile(rb"<error>.*?<code>([^<]{1,100})</code>", re.DOTALL | re.IGNORECASE)
_JSON_ERROR = re.compile(
    rb'\{\s*"(?:error|message|detail|errors)"\s*:\s*(?:"([^"]{1,200})|(.{1,200}))', re.DOTALL
)

# --- by name --------------------------------------------------------------------------------------

_PART = re.compile(
    r"(?P<joined>.+?)(?P<mark>[._-](?:part[_.-]?|split-?))(?:\d+of\d+|[a-z]{1,2}|\d+)"
)
_NUMBERED = re.compile(
    r"(?P<joined>.+\.(?:zip|7z|tar|gz|gguf|safetensors|bin|pth?))(?P<mark>\.)\d{2,3}"
)
_ZIP_PART = re.compile(r".+\.[zr]\d{2}")
_UNFINISHED = (".incomplete", ".crdownload", ".download", ".partial", ".part", ".aria2", ".tmp")
_DATA_OF_TENSORFLOW = re.compile(r".+\.data-\d{5}-of-\d{5}")
_ITEMS = ".distcp"
_RAW = (".dat", ".raw", ".f32", ".fp16")


class Foreign(NamedTuple):
    """The type of a file that is not a checkpoint; None if only advice is possible."""

    kind: str | None
    advice: str


def describe(head: bytes, source: Readable, suffixes: tuple[str, ...]) -> Foreign | None:
    """Return the type of a file that no format, with these suffixes, recognises, and advice."""
    name = kit.file_name(source.name)
    if not source.size:
        return Foreign("empty", "Writing or copying it may have failed")
    return (
        _by_folder(head, source, name)
        or _by_members(head, source, suffixes)
        or _by_signature(head)
        or by_part(source.name)
        or _by_bytes(head, source.size, name.lower())
        or _by_name(source, name)
    )


def describe_folder(name: str, files: Collection[str], folders: Collection[str]) -> Foreign | None:
    """Recognise a folder of another kind by the names in it."""
    if any(file.lower().endswith(_ITEMS) for file in files):
        state = "damaged" if ".metadata" in files else "missing"
        reason = f"a distributed checkpoint of PyTorch, whose file '.metadata' is {state}"
        return Foreign(reason, _METADATA)
    if "data.pkl" in files and "data" in folders:
        packed = shown(kit.file_name(name.rstrip("/\\")))
        reason = "an unpacked file of PyTorch"
        return Foreign(reason, f"Pack it again: zip -0 -r model.pt {packed}")
    if not _SAVED_MODELS.isdisjoint(files):
        return Foreign("a SavedModel of TensorFlow", _TENSORFLOW)
    has_data = any(_DATA_OF_TENSORFLOW.fullmatch(file.lower()) for file in files)
    if has_data and any(file.lower().endswith(".index") for file in files):
        return Foreign("a checkpoint of TensorFlow", _TENSORFLOW)
    return None


def code_of(head: bytes, source: Readable) -> tuple[str, ...]:
    """Return the code that runs when a file is unpickled; empty for other files."""
    notes = kit.Notes()
    is_named = kit.file_name(source.name).lower().endswith(_PICKLED)
    if is_named or _PICKLES.match(head) is not None or COMPRESSED.match(head) is not None:
        scan_file(source, notes)
    return tuple(dict.fromkeys(notes.executes))


def is_versioned_message(head: bytes) -> bool:
    """Return whether a version and a message follow, as in SavedModel and Core ML."""
    return _VERSIONED.match(head) is not None


def _by_signature(head: bytes) -> Foreign | None:
    for mark in _MARKS:
        if head.startswith(mark.data, mark.offset):
            return Foreign(mark.kind, mark.advice)
    return Foreign(_kind_of_pickle(head), _PICKLE) if _PICKLES.match(head) else None


def _by_folder(head: bytes, source: Readable, name: str) -> Foreign | None:
    """Recognise a file that belongs to another one, or to a folder."""
    if name.lower().endswith(_ITEMS):
        reason = "by its name the items of one rank of a distributed checkpoint of PyTorch"
        if kit.sibling(source, ".metadata") is not None:
            return Foreign(reason, "Open the folder: '.metadata' has the names of all tensors")
        return Foreign(f"{reason}, and '.metadata' is missing", _METADATA)
    if head.startswith(_APPLE_DOUBLE):
        model = name.removeprefix("._")
        advice = "Choose the file itself" if model == name else f"Open {shown(model)}"
        return Foreign("metadata of macOS about another file (AppleDouble)", advice)
    if head.startswith(b"\x80") and _STORAGE in head:
        reason = "the pickle of a PyTorch file without the storages of its tensors"
        return Foreign(
            reason,
            "It is 'data.pkl' of an unpacked file: pack its folder again: "
            "zip -0 -r model.pt FOLDER",
        )
    path = head.strip().decode("ascii", "replace") if source.size <= _LONGEST_PATH else ""
    for candidate in dict.fromkeys((path, kit.file_name(path))):
        if candidate != name and _is_beside(source, candidate):
            reason = f"a text with the path {shown(path)}, which stands for a link to that file"
            return Foreign(reason, f"Open {shown(candidate)}")
    return None


def _is_beside(source: Readable, path: str) -> bool:
    """Return whether a text of unknown origin is the path of a file in the same folder."""
    try:
        # The answer "Not Found" of a server is not a path, and looking for it may be a request.
        is_path = bool(path) and path.isprintable() and " " not in path
        return is_path and kit.sibling(source, path) is not None
    except (CheckpointError, OSError):
        return False


def _by_members(head: bytes, source: Readable, suffixes: tuple[str, ...]) -> Foreign | None:
    """Recognise an archive around a checkpoint by the names of its members."""
    if head.startswith(b"PK\3\4"):
        kind, names = "a zip archive", _names_in_zip(source)
    elif head[257:262] == b"ustar":
        kind, names = "a tar archive", [name for name, *_ in tar_members(source)]
    elif head.startswith(b"\x1f\x8b"):
        data = zlib.decompressobj(31).decompress(kit.first_bytes(source, _STEP), _STEP)
        if data[257:262] != b"ustar":
            return None
        kind = "a tar archive, compressed by gzip"
        names = [name for name, *_ in tar_members(kit.Memory("", data))]
    else:
        return None
    checkpoints = [
        name
        for name in names
        if name.lower().endswith(suffixes) and not kit.file_name(name).startswith("._")
    ]
    return Foreign(f"{kind} with {some(checkpoints, 'files')}", _EXTRACT) if checkpoints else None


def _names_in_zip(source: Readable) -> list[str]:
    try:
        return [member.name for member in archive.Archive(source).members]
    except CheckpointError:
        return []


def by_part(path: str) -> Foreign | None:
    """Recognise one part of a file that was cut into several."""
    name = kit.file_name(path)
    lower = name.lower()
    if _ZIP_PART.fullmatch(lower):
        return Foreign("by its name one part of an archive", "Extract the archive first")
    part = _PART.fullmatch(lower) or _NUMBERED.fullmatch(lower)
    if part is None:
        return None
    joined = name[: part.end("joined")]
    reason = f"by its name one part of {shown(joined)}"
    advice = f"Join all parts in their order: cat {name[: part.end('mark')]}* > {joined}"
    return Foreign(reason, advice)


def _by_bytes(head: bytes, size: int, name: str) -> Foreign | None:
    if not any(head):
        count = f"only {size}" if size <= len(head) else f"at least {len(head)}"
        advice = "A download or a copy reserved its place and did not finish: repeat it"
        return Foreign(f"a file that begins with {count} zeros", advice)
    if is_versioned_message(head):
        if name.endswith(".mlmodel"):
            return Foreign("a Core ML model", _CORE_ML)
        if name.endswith(".pb"):
            return Foreign("a SavedModel of TensorFlow", _TENSORFLOW)
        return Foreign("a model of Core ML or TensorFlow", f"{_CORE_ML}; or {_TENSORFLOW}")
    return _by_text(head, size)


def _kind_of_pickle(head: bytes) -> str:
    if b"joblib" in head or b"sklearn" in head:
        return "a pickle of joblib or scikit-learn, and not a PyTorch checkpoint"
    if b"numpy" in head:
        return "a Python pickle with NumPy arrays, and not a PyTorch checkpoint"
    return "a Python pickle, and not a PyTorch checkpoint"


def _by_text(head: bytes, size: int) -> Foreign | None:
    if head.startswith(_UTF_16):
        advice = "If a redirection of PowerShell wrote it, let the program write the file itself"
        return Foreign("a text in UTF-16", advice)
    text = head.removeprefix(_BOM).lstrip()
    lower = text.lower()
    error = _XML_ERROR.search(lower)
    if error is not None and lower.startswith(b"<"):
        code = _XML_ERROR.search(text)
        label = shown((code or error)[1].decode(errors="replace"))
        return Foreign(f"the error message {label} of an object store", _ADDRESS)
    if b"<net " in lower and lower.startswith(b"<"):
        return Foreign("the description of an OpenVINO model", _ENGINE)
    if lower.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return Foreign("a web page, such as an error message or a login form", _AGAIN)
    if lower.startswith((b"{", b"[")):
        return _by_json(text, size, is_marked=head.startswith(_BOM))
    is_text = not any(byte < 9 or 13 < byte < 32 or byte > 126 for byte in text)
    if not is_text or not text:
        return None
    line = text.splitlines()[0][:_LONGEST_SHOWN].decode()
    if size <= _SHORT_TEXT:
        return Foreign(f"the text {shown(line)}, perhaps the answer of a server", _ADDRESS)
    return Foreign(f"a text that begins {shown(line)}", "Choose the file with the weights")


def _by_json(text: bytes, size: int, *, is_marked: bool) -> Foreign:
    error = _JSON_ERROR.match(text) if size <= _SHORT_TEXT else None
    if error is not None:
        message = (error[1] or error[2]).decode(errors="replace")
        return Foreign(f"the error message {shown(message[:_LONGEST_SHOWN])} of a server", _ADDRESS)
    if b'"weight_map"' in text:
        kind, advice = "an index of shards", "Give it a name that ends with .index.json"
    else:
        kind = "JSON without tensors"
        advice = "It may be the configuration next to a checkpoint"
    if is_marked:
        kind += " after a byte order mark"
        advice = "Save it as UTF-8 without a byte order mark (BOM)"
    return Foreign(kind, advice)


def _by_name(source: Readable, name: str) -> Foreign | None:
    lower = name.lower()
    if lower.endswith(_UNFINISHED):
        return Foreign("by its name an unfinished download", _AGAIN)
    if _DATA_OF_TENSORFLOW.fullmatch(lower):
        return Foreign("by its name the data of a TensorFlow checkpoint", _TENSORFLOW)
    if lower.endswith(".index") and _is_table(source):
        return Foreign("the index of a TensorFlow checkpoint", _TENSORFLOW)
    if lower.endswith(".bin"):
        stem = name[:-4]
        if kit.sibling(source, f"{stem}.xml") is not None:
            reason = f"by its name the weights of the OpenVINO model {shown(f'{stem}.xml')}"
            return Foreign(reason, _ENGINE)
    if lower.endswith(_RAW):
        advice = "If it has raw numbers, numpy.fromfile(path, dtype) reads them"
        return Foreign(None, advice)
    return None


def _is_table(source: Readable) -> bool:
    """Return whether a file ends as a table of LevelDB does."""
    mark = bytes.fromhex("57fb808b247547db")
    return source.size >= 48 and bytes(source.read(source.size - 8, 8)) == mark
