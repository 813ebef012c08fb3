"""Pieces of code, each run in a process that has imported nothing of importance yet.

An interpreter takes seconds to load numba, pandas and others, so one does it for all pieces, and
each piece runs in a fork. Neither xckpt nor xarray nor dask is loaded, nor what loads them.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

_PRELOADED = (
    *("numpy", "pandas", "numba", "sparse", "fsspec", "ml_dtypes", "h5netcdf", "zstandard", "cffi"),
    *("scipy.linalg", "scipy.special", "scipy.sparse.csgraph", "scipy.interpolate", "psutil"),
    *("matplotlib.pyplot", "anywidget", "tqdm.auto", "jinja2", "platformdirs"),
    *(
        "toolz",
        "tlz.curried",
        "importlib_metadata",
        "scipy.fftpack",
        "xxhash",
        "cloudpickle",
        "msgpack",
    ),
    *("multiprocessing.pool", "cbor2", "google_crc32c"),
)
# After which a piece is ended.
_SECONDS = 200
_FRESH = ("xckpt", "xarray", "dask", "distributed")


class FreshProcesses:
    """The interpreter that forks, until the context is left."""

    def __enter__(self) -> Self:
        root = str(Path(__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fresh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "MPLBACKEND": "agg"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, pieces: Mapping[str, str], folder: Path, before: str = "") -> dict[str, str]:
        """Run pieces of code, each after `before`, and return tracebacks by name.

        Each piece runs in a separate folder with the same files. It may replace them, but not
        write into them.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"pieces": dict(pieces), "folder": str(folder), "before": before}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the interpreter has ended; standard error says why"
        failed: dict[str, str] = json.loads(line)
        return failed


def _serve() -> None:
    for name in _PRELOADED:
        with suppress(ImportError):  # as some are not needed
            import_module(name)
    import_module("numba").njit(lambda x: x)(1)  # numba loads more modules with the first function
    loaded = [name for name in _FRESH if name in sys.modules]
    if loaded:
        raise RuntimeError(f"{loaded} are loaded already")
    gc.collect()
    gc.freeze()  # otherwise each piece copies all of it when the collector runs
    for line in sys.stdin:
        request = json.loads(line)
        failed = _answer(**request)
        sys.stdout.write(json.dumps(failed) + "\n")
        sys.stdout.flush()


def _answer(pieces: dict[str, str], folder: str, before: str) -> dict[str, str]:
    with tempfile.TemporaryFile("w+") as answer:
        pid = os.fork()
        if not pid:
            try:
                os.dup2(2, 1)  # no answer, but what code prints
                os.chdir(folder)
                names: dict[str, Any] = {"__name__": "__main__"}
                exec(compile(before, "before", "exec"), names)  # noqa: S102  our own
                gc.freeze()
                json.dump(_failures(pieces, names), answer)
                answer.flush()
            except BaseException:  # noqa: BLE001  everything is reported
                json.dump({"before": traceback.format_exc()}, answer)
                answer.flush()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        answer.seek(0)
        failures: dict[str, str] = json.load(answer)
        return failures


def _failures(pieces: dict[str, str], names: dict[str, Any]) -> dict[str, str]:
    failed = {}
    for name, code in pieces.items():
        beside = tempfile.TemporaryDirectory(dir=Path.cwd().parent)
        with tempfile.TemporaryFile("w+") as report, beside as copy:
            pid = os.fork()
            if not pid:
                status = 1
                signal.alarm(_SECONDS)
                try:
                    # As links: some files are large, and have no values.
                    os.chdir(shutil.copytree(".", copy, copy_function=os.link, dirs_exist_ok=True))
                    exec(compile(code, name, "exec"), names)  # noqa: S102  our own
                    status = 0
                except BaseException:  # noqa: BLE001  everything is reported
                    traceback.print_exc(file=report)
                    report.flush()
                finally:
                    os._exit(status)
            _, status = os.waitpid(pid, 0)
            report.seek(0)
            if status:
                failed[name] = report.read() or f"exit status {status}"
    return failed


if __name__ == "__main__":
    _serve()
