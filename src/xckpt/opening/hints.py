"""Hints in errors about a path: the call that opens the intended checkpoint."""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xckpt import formats
from xckpt.errors import CheckpointError, shown
from xckpt.opening.sharding import INDEX_SUFFIX, SeveralFilesError
from xckpt.storage import is_remote, local_path

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["advising", "step_paths"]

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
def advising(obj: Any) -> Iterator[None]:
    """Add a hint to an error about a path: the call that opens the likely intended checkpoint."""
    try:
        yield
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            hint = _hint(obj, error)
            if hint is None:
                pass
            elif isinstance(error, CheckpointError):
                error.hint = error.hint or f"Perhaps {hint}"
            elif isinstance(error, OSError) and error.strerror is not None:
                error.strerror = f"{error.strerror}; {hint}"
            else:
                error.args = (f"{error}; {hint}",)
        raise


def step_paths(folder: Any) -> str | None:
    """Return a glob for the checkpoints of a run in a local folder; None without a run."""
    if not isinstance(folder, str | os.PathLike) or is_remote(folder):
        return None
    path = Path(local_path(os.fsdecode(folder)))
    if not path.is_dir():
        return None
    endings = _endings()
    runs = defaultdict(list)
    for entry in path.iterdir():
        is_folder = entry.is_dir()
        is_checkpoint = is_folder or entry.name.lower().endswith(endings)
        words = tuple(re.split("[0-9]+", entry.name))
        # The numbers of shards are not steps.
        is_numbered = len(words) > 1 and not words[-2].endswith("-of-")
        if is_checkpoint and is_numbered and not entry.name.startswith("."):
            runs[words, is_folder].append(entry.name)
    (words, _), names = max(runs.items(), key=lambda run: len(run[1]), default=(((), False), []))
    if len(names) < 2:
        return None
    pattern = "*".join(map(glob.escape, words))
    if len(list(path.glob(pattern))) > len(names):  # others have a text in the place of a number
        pattern = "[0-9]*".join(map(glob.escape, words))
    return f"{glob.escape(_spelled(folder))}/{pattern}"


def _hint(obj: Any, error: Exception) -> str | None:
    if isinstance(obj, os.PathLike):
        obj = os.fsdecode(obj)
    if not isinstance(obj, str):
        return None
    on_hub = _HUB.fullmatch(obj)
    if on_hub is not None:
        return _moved(on_hub[1])
    if is_remote(obj):
        name = obj.partition("?")[0].rstrip("/").rpartition("/")[2]
        is_missing = isinstance(error, FileNotFoundError | IsADirectoryError)
        if "." in name or "*" in obj or not is_missing:
            return None
        files = f"{obj.rstrip('/')}/*.safetensors"
        return f"of a folder, name the files: xckpt.open({shown(files)})"
    path = local_path(obj)
    if Path(path).is_dir():
        return _in_folder(obj, error) if isinstance(error, IsADirectoryError) else None
    if not isinstance(error, FileNotFoundError) or error.filename != path:
        return None
    return _instead_of(Path(path))


def _open_call(path: str | Path) -> str:
    return f"xckpt.open({shown(_spelled(path))}) opens"


def _spelled(path: Any) -> str:
    """Return a path as text, relative to the working directory if it is below."""
    text = os.fsdecode(path).rstrip("/") or "/"
    short = os.path.relpath(text) if Path(text).is_absolute() else text
    return text if short.startswith("..") else short


def _in_folder(folder: str, error: IsADirectoryError) -> str | None:
    """Return a hint at the contents of a folder that is not a single checkpoint."""
    steps = step_paths(folder)
    path = Path(local_path(folder))
    if steps is not None:
        return f"xckpt.open_steps({shown(steps)}) opens them as one Dataset with a dimension step"
    if isinstance(error, SeveralFilesError):
        return None  # the error lists them
    endings = _endings()
    for name in sorted(entry.name for entry in path.iterdir() if entry.is_dir()):
        with suppress(PermissionError):
            files = [entry.name.lower() for entry in (path / name).iterdir() if entry.is_file()]
            if any(file.endswith(endings) for file in files):
                return f"{_open_call(path / name)} a folder in it"
    return None


def _endings() -> tuple[str, ...]:
    """Return the endings of names of checkpoints."""
    endings = [ending for name in formats.names() for ending in formats.suffixes(name)]
    return (*endings, INDEX_SUFFIX, *formats.folder_marks())


def _instead_of(path: Path) -> str | None:
    """Return a hint at an existing file with a similar name, or at a model on the Hub."""
    with suppress(OSError):
        names = sorted(entry.name for entry in path.parent.iterdir())
        same_stem = [name for name in names if name.startswith(f"{path.name}.")]
        for name in [*get_close_matches(path.name, names, n=1, cutoff=0.8), *same_stem]:
            return f"did you mean {shown(name)}?"
    organisation, _, name = _spelled(path).partition("/")
    if name and "/" not in name and not os.path.lexists(organisation):
        model = f"hf://{organisation}/{name}"
        return f"{_open_call(model)} the model of this name on the Hugging Face Hub"
    return _moved(_spelled(path))


def _moved(place: str) -> str | None:
    """Return a hint at a repository of the Hub that has moved to an organisation."""
    name, _, rest = place.partition("/")
    bare, at, revision = name.partition("@")
    for pattern, organisation in _MOVED.items():
        if re.fullmatch(pattern, bare):
            url = f"hf://{organisation}/{bare}{at}{revision}{'/' if rest else ''}{rest}"
            return f"{_open_call(url)} this model on the Hugging Face Hub"
    return None
