"""Files that people have and that are no checkpoint of ours: what they are, and what to do."""

from __future__ import annotations

__all__ = ["foreign"]

_UNZIP = "Decompress it first"
_OLD_GGML = "Convert it with convert_llama_ggml_to_gguf.py of llama.cpp"
_PICKLE = (
    "Of pickles xckpt reads those of torch.save, and runs none: load it where it was written, and "
    "save its arrays with numpy.savez"
)

# The first bytes, what they tell, and what to do.
_BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (
        b"version https://git-lfs.github.com/spec/",
        "a pointer of Git LFS, not the file that it stands for",
        "Run `git lfs pull` in its repository",
    ),
    (b"lmgg", "a GGML file, older than GGUF", _OLD_GGML),
    (b"fmgg", "a GGMF file, older than GGUF", _OLD_GGML),
    (b"tjgg", "a GGJT file, older than GGUF", _OLD_GGML),
    (
        b"\x89HDF\r\n\x1a\n",
        "an HDF5 file (netCDF 4, Keras)",
        "Open it with engine='h5netcdf', or with h5py",
    ),
    (b"CDF\x01", "a netCDF 3 file", "Open it with engine='scipy'"),
    (b"CDF\x02", "a netCDF 3 file", "Open it with engine='scipy'"),
    (b"\x1f\x8b", "compressed by gzip", _UNZIP),
    (b"\xfd7zXZ\x00", "compressed by xz", _UNZIP),
    (b"BZh", "compressed by bzip2", _UNZIP),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", _UNZIP),
)
_WEB_PAGES = (b"<!doctype html", b"<html", b"<?xml")


def foreign(head: bytes, size: int, name: str) -> tuple[str, str] | None:
    """Return what a file is that begins with some bytes, and what to do; None if unknown."""
    for beginning, what, advice in _BEGINNINGS:
        if head.startswith(beginning):
            return what, advice
    if size == 0:
        return "empty", "Was it written, or copied, to its end?"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive without arrays of NumPy or PyTorch", "Extract it first"
    if head[:1] == b"\x80" and head[1:2] in {b"\x02", b"\x03", b"\x04", b"\x05"}:
        return "a pickle of Python, and not a checkpoint of PyTorch", _PICKLE
    if head[257:262] == b"ustar":
        return "a tar archive", "Extract it first"
    if name.partition("?")[0].lower().endswith(".onnx"):
        return "an ONNX model", "The package onnx reads it: onnx.load(path)"
    return _text(head.lstrip().lower())


def _text(head: bytes) -> tuple[str, str] | None:
    if head.startswith(_WEB_PAGES):
        return "a web page, as servers send for errors and logins", "Download the file again"
    if head.startswith(b"{") and b'"weight_map"' in head:
        return "an index of shards", "Give it a name that ends with .index.json"
    if head.startswith((b"{", b"[")):
        return "JSON without tensors", "Is it the configuration next to a checkpoint?"
    return None
