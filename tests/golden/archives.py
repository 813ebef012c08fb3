"""Golden files, as one archive per format, and the folder in the user's cache with their contents.

``python -m tests.golden.archives FOLDER [FORMAT ...]`` makes the archives from the folders of
formats in FOLDER. The same files make the same archive.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import time
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).parent
_SUFFIX = ".tar.zst"
_LEVEL = 19
# An unpacked folder without this file is incomplete, and one with newer files was changed.
_STAMP = ".unpacked"
# Other checkouts may use the folders of other archives at the same time.
_UNUSED_SECONDS = 7 * 24 * 3600


def golden_folder() -> Path:
    """Return the folder of golden files: the one in ``XCKPT_GOLDEN``, or the unpacked archives."""
    chosen = os.environ.get("XCKPT_GOLDEN")
    if not chosen:
        return unpacked(HERE, _private_cache())
    if not Path(chosen).is_dir():
        raise NotADirectoryError(f"XCKPT_GOLDEN is {chosen!r}, which is not a folder")
    return Path(chosen).absolute()


def unpacked(archives: Path, cache: Path) -> Path:
    """Return a folder in the cache with the contents of all archives; unpack them if it lacks one.

    The name of the folder is the digest of the archives. Processes may call this at the same time.
    """
    paths = sorted(archives.glob(f"*{_SUFFIX}"))
    if not paths:
        raise FileNotFoundError(f"there is no *{_SUFFIX} in {archives}")
    folder = cache / _digest(paths)
    if not _is_intact(folder):
        new = Path(tempfile.mkdtemp(prefix="new-", dir=cache))
        try:
            for path in paths:
                unpack(path, new)
            (new / _STAMP).write_text(str(sum(1 for _ in _entries(new))), encoding="ascii")
            _place(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        _remove_unused(cache)
    with suppress(OSError):
        os.utime(folder)
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a folder; refuse entries outside of the folder of its format."""
    import zstandard

    name = archive.name.removesuffix(_SUFFIX)
    with (
        archive.open("rb") as compressed,
        zstandard.ZstdDecompressor().stream_reader(compressed) as data,
        tarfile.open(fileobj=data, mode="r|") as entries,
    ):
        for entry in entries:
            path = PurePosixPath(entry.name)
            # Windows has more separators and kinds of absolute paths.
            inside = path.parts[:1] == (name,) and path.parts == PureWindowsPath(path).parts
            if not inside or ".." in path.parts:
                raise ValueError(f"{archive.name}: {entry.name!r} is not in the folder {name!r}")
            if entry.isdir():
                (folder / path).mkdir()
            elif entry.isreg() and (content := entries.extractfile(entry)):
                (folder / path).write_bytes(content.read())
            else:
                raise ValueError(f"{archive.name}: {entry.name!r} is neither a file nor a folder")


def pack(folder: Path, archive: Path) -> None:
    """Make an archive from the folder of a format, which has only files and folders."""
    import zstandard

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as entries:
        for path in sorted([folder, *folder.rglob("*")], key=lambda path: path.as_posix()):
            # Without times, owners and permissions, which differ between checkouts.
            entry = tarfile.TarInfo(path.relative_to(folder.parent).as_posix())
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise ValueError(f"{path} is neither a file nor a folder")
            content = b""
            if path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            else:
                content = path.read_bytes()
                entry.size = len(content)
            entries.addfile(entry, io.BytesIO(content))
    archive.write_bytes(zstandard.ZstdCompressor(level=_LEVEL).compress(data.getvalue()))


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _private_cache() -> Path:
    """Return a folder that only this user may write to, in the cache or among temporary files."""
    from platformdirs import user_cache_path

    user = os.geteuid() if hasattr(os, "geteuid") else None
    folders = [Path(tempfile.gettempdir()) / f"xckpt-tests-{user}"]
    with suppress(RuntimeError):  # the user has no home
        folders.insert(0, user_cache_path("xckpt-tests", appauthor=False, opinion=False))
    for folder in filter(Path.is_absolute, folders):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            private = user is None or (status.st_uid == user and not status.st_mode & 0o022)
            if private and os.access(folder, os.W_OK):
                return folder
    raise PermissionError(f"cannot write to {' or '.join(map(str, folders))}; set XDG_CACHE_HOME")


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Return the files and folders in a folder, at any depth, but not the stamp."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))
            if entry.name != _STAMP:
                yield entry


def _is_intact(folder: Path) -> bool:
    """Return whether an unpacked folder is complete, and was not changed by a test or a cleaner."""
    try:
        stamp = folder / _STAMP
        time_ns = stamp.stat().st_mtime_ns
        count = int(stamp.read_text(encoding="ascii"))
        times = [entry.stat(follow_symlinks=False).st_mtime_ns for entry in _entries(folder)]
    except (OSError, ValueError):
        return False
    return len(times) == count and max(times, default=0) <= time_ns


def _place(new: Path, folder: Path) -> None:
    """Give a new folder its name, unless another process was faster; replace a changed one."""
    with suppress(OSError):
        new.rename(folder)
    if not _is_intact(folder):
        changed = Path(tempfile.mkdtemp(prefix="old-", dir=folder.parent))
        with suppress(FileNotFoundError):
            folder.rename(changed / folder.name)
        new.rename(folder)
        shutil.rmtree(changed, ignore_errors=True)


def _remove_unused(cache: Path) -> None:
    """Remove what other versions of the archives, and interrupted runs, left in the cache."""
    for folder in cache.iterdir():
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _UNUSED_SECONDS:
                shutil.rmtree(folder)


def main() -> None:
    """Make archives from a folder of golden files."""
    parser = argparse.ArgumentParser(description="Make the archives of golden files.")
    parser.add_argument("folder", type=Path, help="with a folder for each format")
    parser.add_argument("formats", nargs="*", help="all folders by default")
    arguments = parser.parse_args()
    folders = [path.name for path in sorted(arguments.folder.iterdir()) if path.is_dir()]
    for name in arguments.formats or folders:
        pack(arguments.folder / name, HERE / f"{name}{_SUFFIX}")


if __name__ == "__main__":
    main()
