"""Files to mutate: golden files, good and malformed, and generated ones."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from tests.contracts.every import declared
from tests.formats.random_files import FILES
from xckpt import formats
from xckpt.errors import CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hypothesis import strategies as st

__all__ = ["Files", "seeds"]

#: Files in a folder by name; the first one is opened.
Files = dict[str, bytes]

_LARGEST = 1 << 18
_DRAWN = 40
# Suffixes of the expected contents of golden files.
_NOTES = (".expected.json", ".expected.npz", ".txt", ".md", ".hf.npz", ".ids.json", ".forward.json")


def seeds(name: str) -> list[Files]:
    """List the small files of a format, the same ones in every run."""
    by_content = {next(iter(files.values())): files for files in _all(name)}
    return [files for main, files in by_content.items() if 0 < len(main) <= _LARGEST]


def _all(name: str) -> Iterator[Files]:
    declaration, suffix = declared(name), _suffix(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        for data in declaration.small_files().values():
            yield {f"m{suffix}": data}
        for file in [*declaration.good(), *declaration.bad()]:
            obj = getattr(file, "values", (file,))[0]
            if isinstance(obj, Path):
                if obj.is_file():
                    yield from _golden(obj)
            else:
                yield {f"m{suffix}": bytes(obj)}
        if name in FILES:
            yield from drawn(FILES[name])
        for strategy in declaration.hostile().values():
            for files in drawn(strategy):
                yield from ({f"m{suffix}": data} for data in files)


def _golden(path: Path) -> Iterator[Files]:
    """Yield a golden file, with the small files next to it that it needs."""
    data = path.read_bytes()
    if len(data) > _LARGEST:
        return
    names = [path.name]
    if path.name in formats.folder_marks() and path.name != ".metadata":
        inner = sorted(p for p in path.parent.rglob("*") if p.is_file() and p != path)
        names += [p.relative_to(path.parent).as_posix() for p in inner]
    elif path.name == ".metadata" or path.name.endswith(".json"):
        stem = path.name.partition(".")[0]
        siblings = sorted(p.name for p in path.parent.iterdir() if p.is_file() and p != path)
        names += [n for n in siblings if n.startswith(stem) and not n.endswith(_NOTES)]
    elif path.suffix == ".zt" and b"shards" in data:
        names += sorted(p.name for p in path.parent.glob("*.zt") if p != path)
    elif "-of-" in path.name:
        stem = path.name.partition("-0")[0]
        names += sorted(p.name for p in path.parent.glob(f"{stem}-*{path.suffix}") if p != path)
    files = {n: (path.parent / n).read_bytes() for n in names}
    yield {n: content for n, content in files.items() if len(content) <= _LARGEST}


def _suffix(name: str) -> str:
    from xckpt import formats

    return formats.get(name).suffixes[0]


def drawn(strategy: st.SearchStrategy[Any], count: int = _DRAWN) -> list[Any]:
    """Draw examples from a strategy, the same ones in every run."""
    examples: list[Any] = []

    @hypothesis_seed(0)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    @given(strategy)
    def draw(value: Any) -> None:
        examples.append(value)

    draw()
    return examples
