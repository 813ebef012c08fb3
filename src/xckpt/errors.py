"""Errors and warnings: each names the file, the byte offset, the tensor and the rule.

::

    CheckpointError
    ├── FormatError (ValueError)               the file breaks a rule of its format
    ├── IntegrityError (ValueError)            a digest disagrees with the bytes
    ├── UnsupportedError (NotImplementedError) the file is fine, but uses a feature that is not read
    │   └── TooLargeError (MemoryError)        what is asked for does not fit in memory
    ├── PayloadMissingError (LookupError)      tensors are listed, but their values are nowhere
    │   └── MissingShardError (FileNotFoundError)  because a file that should have them is not there
    └── FileChangedError (OSError)             the file changed after it was opened

    CheckpointWarning (UserWarning)            what a specification lets pass with a warning

`warn` shows a warning at the line of the user that it is due to.
"""

from __future__ import annotations

import sys
import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "FileChangedError",
    "FormatError",
    "IntegrityError",
    "MissingShardError",
    "PayloadMissingError",
    "TooLargeError",
    "UnsupportedError",
    "deprecated_name",
    "locating",
    "named",
    "shown",
    "some",
    "warn",
]

_LONGEST_SHOWN_NAME = 200
# Packages that may stand between a warning and the code of the user.
_BETWEEN = frozenset(
    {
        "asyncio",
        "concurrent",
        "contextlib",
        "dask",
        "distributed",
        "functools",
        "lazy_loader",
        "queue",
        "threading",
        "xarray",
        "xckpt",
    }
)


def shown(name: str) -> str:
    """Quote a name that came from a file, so that it is safe and short to print."""
    if len(name) > _LONGEST_SHOWN_NAME:
        name = name[:_LONGEST_SHOWN_NAME] + "…"
    return repr(name)


def some(names: Sequence[str], what: str = "tensors", most: int = 5) -> str:
    """Quote the first of several names that came from a file, and say how many more there are."""
    quoted = ", ".join(map(shown, names[:most]))
    more = len(names) - most
    return quoted if more <= 0 else f"{quoted} and {more:,} more {what}".rstrip()


def named(error: OSError, path: str, doing: str = "", *, tensor: str | None = None) -> OSError:
    """Return an error of the operating system that names the file, and the tensor if it is known.

    What has no number, or names a tensor already, is returned as it is.
    """
    if error.errno is None or hasattr(error, "tensor"):
        return error
    text = (error.strerror or str(error)) + doing
    if tensor is not None:
        text += f" (tensor {shown(tensor)})"
    told = OSError(error.errno, text, error.filename or path)
    if tensor is not None:
        told.tensor = tensor  # type: ignore[attr-defined]
    return told


class CheckpointError(Exception):
    """A checkpoint cannot be read as asked.

    Parameters
    ----------
    reason : str
        What is wrong, with the value found and the value expected.
    path : str, optional
        The file or URL. The reader fills it in where a format module does not know it.
    offset : int, optional
        Byte offset in the file of what is wrong.
    tensor : str, optional
        Name of the tensor.
    rule : str, optional
        Short name of the broken rule, as the specification or its reference reader calls it.
    hint : str, optional
        What the user can do about it.

    Examples
    --------
    >>> print(FormatError("length 60 != 64", path="m.zt", offset=64, tensor="t1", rule="DenseSize"))
    m.zt: tensor 't1': byte 64: length 60 != 64 [DenseSize]
    """

    def __init__(
        self,
        reason: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        tensor: str | None = None,
        rule: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.offset = offset
        self.tensor = tensor
        self.rule = rule
        self.hint = hint

    def __str__(self) -> str:
        where = [self.path] if self.path is not None else []
        if self.tensor is not None:
            where.append(f"tensor {shown(self.tensor)}")
        if self.offset is not None:
            where.append(f"byte {self.offset}")
        text = ": ".join([*where, self.reason])
        if self.rule is not None:
            text += f" [{self.rule}]"
        return text if self.hint is None else f"{text}. {self.hint}"

    # Dask ships errors between processes; the default reduction loses keyword arguments.
    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))

    def located(
        self, *, path: str | None = None, offset: int | None = None, tensor: str | None = None
    ) -> CheckpointError:
        """Fill in the file, the byte and the tensor where they are not known yet.

        Parameters
        ----------
        path : str, optional
            The file or URL.
        offset : int, optional
            Byte offset in the file.
        tensor : str, optional
            Name of the tensor.

        Returns
        -------
        CheckpointError
            The same error, to be raised again.
        """
        self.path = self.path if self.path is not None else path
        self.offset = self.offset if self.offset is not None else offset
        self.tensor = self.tensor if self.tensor is not None else tensor
        return self


def _rebuild(kind: type[CheckpointError], fields: dict[str, Any]) -> CheckpointError:
    return kind(**fields)


class FormatError(CheckpointError, ValueError):
    """The file breaks a rule of its format."""


class IntegrityError(CheckpointError, ValueError):
    """A digest stored in the file disagrees with the bytes it covers."""


class UnsupportedError(CheckpointError, NotImplementedError):
    """The file uses a feature that this reader does not have."""


class TooLargeError(UnsupportedError, MemoryError):
    """What is asked for does not fit in memory; a smaller part of it may."""


class PayloadMissingError(CheckpointError, LookupError):
    """The values of a tensor are asked for, but the checkpoint says only its shape and type."""


class MissingShardError(PayloadMissingError, FileNotFoundError):
    """A file that holds values of a checkpoint is not where it should be."""


class FileChangedError(CheckpointError, OSError):
    """The file is not the one that was opened: its size, time or identity differs."""


class CheckpointWarning(UserWarning):
    """Something a specification lets pass, that a user should know of."""


@contextmanager
def locating(*, path: str | None = None, tensor: str | None = None) -> Iterator[None]:
    """Name the file and the tensor in errors, and make a lack of memory one of ours."""
    try:
        yield
    except CheckpointError as error:
        error.located(path=path, tensor=tensor)
        raise
    except OSError as error:
        if path is None:
            raise
        raise named(error, path, tensor=tensor) from error
    except MemoryError as error:
        reason = f"memory ran out: {error}" if str(error) else "memory ran out"
        hint = "Select less of it at once"
        raise TooLargeError(reason, path=path, tensor=tensor, rule="Memory", hint=hint) from error


# --- warnings ------------------------------------------------------------------------------------


def warn(message: str, category: type[Warning] = CheckpointWarning) -> None:
    """Warn at the line of the user's code that led here, each time.

    The user's filters apply. There is no registry of warnings shown before, which would silence
    all but the first one of a line.
    """
    frame = _user_frame()
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module)


def deprecated_name(old: str, new: str, since: str) -> None:
    """Warn that a name is a deprecated alias, which works for one release.

    Parameters
    ----------
    old, new : str
        The names as users write them: ``"join="`` of an option, ``"xckpt.load"`` of a function.
    since : str
        Version in which `new` replaced `old`.
    """
    # Unlike DeprecationWarning it is shown by default, in libraries and on the command line too.
    text = f"{old} is called {new} since xckpt {since}; the old name will be removed"
    warn(text, FutureWarning)


def _user_frame() -> FrameType:
    """Return the innermost frame of the user, in this thread or else in the main thread."""
    frames = sys._current_frames()  # noqa: SLF001  documented, and the only way to another thread
    here = frames[threading.get_ident()]
    # Work of a pool has no frame of the user, who usually waits for it in the main thread.
    for innermost in (here, frames.get(threading.main_thread().ident or 0)):
        frame = innermost
        while frame is not None:
            if str(frame.f_globals.get("__name__")).partition(".")[0] not in _BETWEEN:
                return frame
            frame = frame.f_back
    return here
