"""Hints in errors about a path: the call that opens the intended checkpoint."""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xckpt import formats
from xckpt.errors import CheckpointError, shown, some
from xckpt.opening.files import SeveralFilesError, has_checkpoint, unfinished_in
from xckpt.opening.names import form_of, is_companion
from xckpt.opening.runs import run_in
from xckpt.storage import Location, is_remote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.storage import FolderListing

# Old names of repositories on the Hub without an organisation, and their current names.
_MOVED = {
    r"gpt2(-medium|-large|-xl)?|openai-gpt": "openai-community",
    r"bert-(base|large)-.*": "google-bert",
    r"distil(bert-base|gpt2|roberta-base).*": "distilbert",
    r"(xlm-)?roberta-(base|large).*": "FacebookAI",
    r"t5-(small|base|large|3b|11b)": "google-t5",
    r"albert-.*": "albert",
    r"xlnet-.*": "xlnet",
}
_HUB = re.compile(r"(?:hf://|https://(?:huggingface\.co|hf\.co)/)(.+)", re.DOTALL)


@contextmanager
def advising(location: Location) -> Iterator[None]:
    """Add a hint to an error about a path: the call that opens the likely intended checkpoint."""
    try:
        yield
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            hint = _hint(location, error)
            if hint is None:
                pass
            elif isinstance(error, CheckpointError):
                error.hint = error.hint or f"Perhaps {hint}"
            elif isinstance(error, OSError) and error.strerror is not None:
                error.strerror = f"{error.strerror}; {hint}"
            else:
                error.args = (f"{error}; {hint}",)
        raise


def _hint(location: Location, error: Exception) -> str | None:
    if isinstance(error, IsADirectoryError) and location.kind == "glob":
        call = f"xckpt.open_steps({shown(_spelled(location.text))})"
        return f"{call} opens folders as the steps of a run"
    if isinstance(error, IsADirectoryError):
        return _in_folder(location, error)
    if location.kind == "hub":
        place = _HUB.fullmatch(location.text)
        return None if place is None else _moved(place[1])
    if location.store == "http" and "." not in location.file_name:
        files = f"{location.text.rstrip('/')}/..."
        return f"web servers do not list folders; name the files: xckpt.open([{shown(files)}])"
    is_missing = type(error) is FileNotFoundError and error.filename == location.path
    return _instead_of(Path(location.path)) if location.kind == "file" and is_missing else None


def _open_call(path: str | Path) -> str:
    return f"xckpt.open({shown(_spelled(path))})"


def _spelled(path: Any) -> str:
    """Return a path as text, relative to the working directory if it is below."""
    text = os.fsdecode(path).rstrip("/") or "/"
    if is_remote(text):
        return text
    short = os.path.relpath(text) if Path(text).is_absolute() else text
    return text if short.startswith("..") else short


def _in_folder(location: Location, error: IsADirectoryError) -> str | None:
    """Return a hint at the contents of a folder that is not a single checkpoint."""
    listing = location.listing()
    if listing is None:
        return None
    run = run_in(listing)
    if run is not None:
        folder = _spelled(location.text)
        paths = [f"{folder}/{glob}" for glob in run.others] or [folder]
        steps = " or ".join([f"xckpt.open_steps({shown(path)})" for path in paths])
        return f"{steps} opens them as one Dataset with a dimension step"
    if isinstance(error, SeveralFilesError):
        return None  # the error lists them
    folders = sorted(listing.folders, key=lambda name: (is_companion(name), name))
    for name in folders:
        inner = _checkpoint_in(listing, name)
        if inner is not None:
            return f"{_open_call(inner.name)} opens a folder in it"
    return _in_steps(location, listing)


def _in_steps(location: Location, listing: FolderListing) -> str | None:
    """Return a hint at the parts of a pipeline in each step of a run."""
    counts = Counter(map(form_of, listing.folders))
    first = {form_of(name): name for name in sorted(listing.folders, reverse=True)}
    for form in [form for form in sorted(first) if counts[form] > 1]:
        step = listing.folders[first[form]].listing()
        parts = sorted(step.folders) if step else []
        if part := next((name for name in parts if step and _checkpoint_in(step, name)), ""):
            glob = f"{_spelled(location.text)}/{'*'.join(map(escape, form))}/{part}"
            return f"xckpt.open_steps({shown(glob)}) opens the folders {part} of all steps"
    return None


def _checkpoint_in(listing: FolderListing, name: str) -> FolderListing | None:
    """Return the contents of a folder in another one if it has a checkpoint."""
    with suppress(PermissionError):
        inner = listing.folders[name].listing()
        return inner if inner is not None and has_checkpoint(inner) else None
    return None


def _instead_of(path: Path) -> str | None:
    """Return a hint at an existing file with a similar name, or at a model on the Hub."""
    if path.is_symlink():
        return f"it is a link to {shown(os.readlink(path))}, which is missing"  # noqa: PTH115
    with suppress(OSError):
        unfinished = unfinished_in(path.parent)
        if unfinished:
            return f"a download did not end, of which {some(unfinished, 'more')} is left: repeat it"
        names = sorted(entry.name for entry in path.parent.iterdir())
        same_stem = [name for name in names if name.startswith(f"{path.name}.")]
        foreign = formats.foreign_folder(path.name, same_stem)
        if foreign is not None:
            return f"the files with this prefix are {foreign.kind}: {foreign.advice}"
        similar = [*get_close_matches(path.name, names, n=1, cutoff=0.8), *same_stem]
        if similar:
            return f"did you mean {shown(similar[0])}?"
    organisation, _, name = _spelled(path).partition("/")
    if name and "/" not in name and not os.path.lexists(organisation):
        model = f"hf://{organisation}/{name}"
        return f"is the model on the Hugging Face Hub meant? {_open_call(model)} opens it"
    return _moved(_spelled(path))


def _moved(place: str) -> str | None:
    """Return a hint at a repository of the Hub that has moved to an organisation."""
    name = re.split("[@/]", place, maxsplit=1)[0]  # a revision or a path may follow
    for pattern, organisation in _MOVED.items():
        if re.fullmatch(pattern, name):
            url = f"hf://{organisation}/{place}"
            return f"{_open_call(url)} opens this model on the Hugging Face Hub"
    return None
