"""The address of a checkpoint, classified once at the entrance.

`Location.of` takes a path, a URL, a glob, bytes, an open file, or a list of these. The code behind
the entrance asks the Location for its kind, its spelling in messages, the contents of a folder, and
the open source.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import unquote

from xckpt.addresses import hiding, real
from xckpt.formatting import natural_key
from xckpt.storage.local import BytesSource, FileObjectSource, LocalSource, is_file_url, local_path
from xckpt.storage.stores import store_kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.storage.source import Source

Kind = Literal["file", "folder", "glob", "object", "hub", "url", "open", "bytes", "list"]

# At least two letters, because "C:" is a drive.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(://|::)")
# Pages of the Hub for a repository, a folder or a file, as a browser shows them.
_HUB_PAGE = re.compile(
    r"https://(?:huggingface\.co|hf\.co)/(?P<repo>(?:(?:datasets|spaces)/)?[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob)/(?P<revision>[^/?#]+)(?P<path>/[^?#]*)?)?/?(?:[?#].*)?"
)
_GLOB_MARKS = re.compile(r"[*?\[]")


class FolderListing(NamedTuple):
    """The contents of a folder."""

    name: str  # absolute path or URL; on the Hub with its commit
    files: dict[str, Location]
    folders: dict[str, Location]
    broken_links: list[str]


@dataclass(frozen=True, slots=True)
class Location:
    """A file, folder, or set of files, before it is opened.

    Parameters
    ----------
    kind : str
        ``"file"``, ``"folder"`` and ``"glob"`` are local, but a glob may also be of URLs;
        ``"object"`` is a URL of a web server or an object store, ``"hub"`` one of the Hub, and
        ``"url"`` one of another file system; ``"open"`` is an open file, ``"bytes"`` its content,
        and ``"list"`` several of these. Whether a URL is a folder is known once it is requested.
    text : str
        Absolute path or URL, for messages: without secrets.
    path : str, bytes, binary file object, or tuple of Location
        What is opened.
    store : str or None
        Kind of store of an object: ``"http"``, ``"s3"``, ``"gs"`` or ``"az"``.
    options : dict or None
        Options for the storage of a URL.
    """

    kind: Kind
    text: str
    path: Any
    store: str | None = None
    options: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, obj: Any, options: Mapping[str, Any] | None = None) -> Location:
        """Classify a path, URL, glob, open file, bytes, or a list of these."""
        if isinstance(obj, Location):
            return obj
        if isinstance(obj, list | tuple):
            return cls._of_list([cls.of(entry, options) for entry in obj], options)
        if isinstance(obj, bytes | bytearray | memoryview):
            return cls("bytes", "<bytes>", obj)
        if isinstance(obj, os.PathLike):
            obj = os.fsdecode(obj)
        elif hasattr(obj, "read"):
            return cls("open", f"<{type(obj).__name__}>", obj)
        if not isinstance(obj, str):
            raise TypeError(
                f"expected a path, a URL, bytes or an open binary file, got {type(obj).__name__}"
            )
        if not obj:
            raise ValueError("the path is empty")
        return cls._of_url(obj, options) if is_remote(obj) else cls._of_path(local_path(obj))

    @classmethod
    def _of_list(cls, entries: list[Location], options: Mapping[str, Any] | None) -> Location:
        files = tuple([file for entry in entries for file in entry.expanded()])
        for path, count in Counter([file.path for file in files if file.is_named]).items():
            if count > 1:
                raise ValueError(f"{hiding(path)} is in the list twice")
        if not files:
            raise ValueError("the list of files is empty")
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        return cls("list", files[0].text + more, files, options=options)

    @classmethod
    def _of_url(cls, url: str, options: Mapping[str, Any] | None) -> Location:
        text, url = hiding(url), real(url)
        on_hub, store = hub_url(url), store_kind(url)
        if "*" in url:  # the other marks of globs are part of many URLs
            return cls("glob", text, on_hub or url, store, options)
        if on_hub is not None:
            return cls("hub", text, on_hub, options=options)
        return cls("url" if store is None else "object", text, url, store, options)

    @classmethod
    def _of_path(cls, path: str) -> Location:
        if Path(path).is_dir():
            return cls("folder", path, path)
        is_glob = _GLOB_MARKS.search(path) is not None and not os.path.lexists(path)
        return cls("glob" if is_glob else "file", path, path)

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine."""
        return isinstance(self.path, str) and not is_remote(self.path)

    @property
    def is_named(self) -> bool:
        """Whether it has a path or URL that opens it again."""
        return isinstance(self.path, str)

    @property
    def file_name(self) -> str:
        """The last component of the path, without parameters of a URL; empty without a path."""
        if not isinstance(self.path, str):
            return ""
        path = self.path if self.is_local else self.path.partition("?")[0]
        return re.split(r"[/\\]" if os.name == "nt" else "/", path.rstrip("/"))[-1]

    def open(self, *, mmap: bool = False) -> Source:
        """Open a single file."""
        if self.kind == "list":
            raise TypeError("expected one file, got a list of them")
        if self.kind == "bytes":
            return BytesSource(self.path)
        if self.kind == "open":
            return FileObjectSource(self.path)
        if self.kind == "hub":
            from xckpt.storage.hub import HubSource

            return HubSource(self.path, self.options)
        if self.kind == "url":
            from xckpt.storage.remote import FsspecSource

            return FsspecSource(self.path, self.options)
        if self.kind == "object":
            from xckpt.storage.objects import ObjectSource

            return ObjectSource(self.path, self.options)
        return LocalSource(self.path, mmap=mmap)

    def pinned(self) -> Location:
        """Return a location whose content cannot change: on the Hub at its current commit."""
        if self.kind != "hub" and not (self.kind == "glob" and self.path.startswith("hf://")):
            return self
        from xckpt.storage.hub import pinned

        path = pinned(self.path, self.options)
        return replace(self, text=path, path=path)

    def expanded(self) -> list[Location]:
        """Return the files of a glob in natural order; otherwise the location itself."""
        if self.kind != "glob":
            return [self]
        if self.is_local:
            paths = glob(_with_literal_folders(self.path))  # noqa: PTH207  not relative to a folder
        else:
            paths = _expand_url(self.path, self.options)
        if not paths:
            raise FileNotFoundError(f"no file matches {self.text}")
        return [Location.of(path, self.options) for path in sorted(paths, key=natural_key)]

    def listing(self) -> FolderListing | None:
        """List the files and folders in a folder; None for a file, and on web servers."""
        if self.kind == "folder":
            return _listing_of_path(self.path)
        if self.kind == "hub":
            from xckpt.storage.hub import entries_in

            entries = entries_in(self.path, self.options)
        elif self.kind == "url" or (self.kind == "object" and self.store != "http"):
            entries = _entries_of_url(self.path, self.options)
        else:
            return None
        if entries is None:
            return None
        url, are_files = entries
        listing = FolderListing(hiding(url), {}, {}, [])
        for name, is_file in are_files.items():
            path = _inside(url, name)
            inner = replace(self, text=hiding(path), path=path)
            (listing.files if is_file else listing.folders)[name] = inner
        return listing


def _listing_of_path(folder: str) -> FolderListing:
    listing = FolderListing(folder, {}, {}, [])
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():  # noqa: PTH112
            listing.folders[entry.name] = Location("folder", entry.path, entry.path)
        elif os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file():  # noqa: PTH113
            listing.files[entry.name] = Location("file", entry.path, entry.path)
        elif entry.is_symlink():  # to a missing file, or in a circle
            listing.broken_links.append(entry.name)
    return listing


def _with_literal_folders(pattern: str) -> str:
    """Escape the folders at the beginning of a glob that exist, with marks in their names."""
    head, tail = pattern, ""
    while _GLOB_MARKS.search(head) and not os.path.lexists(head):
        head, name = os.path.split(head)
        tail = os.path.join(name, tail) if tail else name  # noqa: PTH118  a pattern
    return os.path.join(escape(head), tail)  # noqa: PTH118


class _ChainLink(NamedTuple):
    """The link of a chained URL that has a path, with the links around it."""

    before: str
    url: str
    after: str
    options: dict[str, Any]


def _link(url: str, options: Mapping[str, Any] | None) -> _ChainLink:
    links = url.split("::")
    at = next((i for i, link in enumerate(links) if "://" in link), len(links) - 1)
    link_options = dict(options or {})
    if at:
        # fsspec expects the options of a link in a chain under its protocol.
        protocol = links[at].partition("://")[0]
        link_options = {**link_options, **link_options.pop(protocol, {})}
        link_options = {k: v for k, v in link_options.items() if k not in links[:at]}
    before = "".join(f"{link}::" for link in links[:at])
    return _ChainLink(
        before, links[at], "".join(f"::{link}" for link in links[at + 1 :]), link_options
    )


def _expand_url(pattern: str, options: Mapping[str, Any] | None) -> list[str]:
    """Expand the glob in a URL."""
    link = _link(pattern, options)
    if link.url.startswith("hf://"):
        from xckpt.storage.hub import glob_hub

        matches = glob_hub(link.url, link.options)
    else:
        from xckpt.storage.objects import file_system

        fs, path = file_system(link.url + link.after, link.options)
        matches = [_with_scheme(match, link.url) for match in fs.glob(path)]
    return [f"{link.before}{match}{link.after}" for match in matches]


def _entries_of_url(
    url: str, options: Mapping[str, Any] | None
) -> tuple[str, dict[str, bool]] | None:
    """Return the URL of a folder, and whether each of its entries is a file; None for a file."""
    from xckpt.storage.objects import file_system

    link = _link(url, options)
    fs, path = file_system(link.url.rstrip("/") + link.after, link.options)
    folder = path.rstrip("/")
    entries = {
        entry["name"].rstrip("/").rpartition("/")[2]: entry["type"] == "file"
        for entry in fs.ls(folder, detail=True)
        if entry["name"].rstrip("/") != folder
    }
    return (url.rstrip("/"), entries) if entries else None


def _with_scheme(path: str, url: str) -> str:
    return path if "://" in path else f"{url.partition('://')[0]}://{path}"


def _inside(url: str, name: str) -> str:
    """Return the URL of an entry of a folder; in a chained URL, of the link that has a path."""
    link = _link(url, None)
    return f"{link.before}{link.url.rstrip('/')}/{name}{link.after}"


def hub_url(obj: object) -> str | None:
    """Return the hf:// URL of a file, folder or page of the Hub; None for anything else."""
    if not isinstance(obj, str):
        return None
    if obj.startswith("hf://"):
        return obj
    page = _HUB_PAGE.fullmatch(obj)
    if page is None:
        return None
    return f"hf://{page['repo']}@{page['revision'] or 'main'}{unquote(page['path'] or '')}"


def is_remote(obj: object) -> bool:
    """Return whether an object is a URL of another machine or file system."""
    return isinstance(obj, str) and _URL.match(obj) is not None and not is_file_url(obj)
