"""Errors and warnings that name the file, the byte offset, the tensor and the rule.

::

    CheckpointError
    ├── FormatError (ValueError)               the file breaks a rule of its format
    │   └── TruncatedError                     a field continues after the end of its area
    ├── IntegrityError (ValueError)            a digest disagrees with the bytes
    ├── UnsupportedError (NotImplementedError) the file uses an unsupported feature
    │   └── TooLargeError (MemoryError)        the selected data do not fit in memory
    ├── PayloadMissingError (LookupError)      the checkpoint lists a tensor without its values
    │   └── MissingShardError (FileNotFoundError)  the file that should hold the values is missing
    └── FileChangedError (OSError)             the file changed after it was opened

    CheckpointWarning (UserWarning)            an irregularity that the specification tolerates
    └── UnreadableWarning                      some tensors cannot be read; the others can

`causes_of` sums up the errors of several tensors: damage to one file is one cause. `warn`
attributes a warning to the line of the user's code that caused it.
"""

from __future__ import annotations

import sys
import threading
import warnings
from contextlib import contextmanager
from posixpath import basename
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.addresses import hidden, hiding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import FrameType

__all__ = [
    "Cause",
    "CheckpointError",
    "CheckpointWarning",
    "FileChangedError",
    "FormatError",
    "IntegrityError",
    "MissingShardError",
    "PayloadMissingError",
    "TooLargeError",
    "TruncatedError",
    "UnreadableWarning",
    "UnsupportedError",
    "causes_of",
    "deprecated_name",
    "escaped",
    "is_damage",
    "locating",
    "named",
    "shown",
    "some",
    "unreadable_lines",
    "unreadable_text",
    "warn",
]

_LONGEST_SHOWN_NAME = 200
# Packages whose frames are skipped in search of the user's code that caused a warning.
_SKIPPED_PACKAGES = frozenset(
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
    """Quote a name from a file, shortened and with control characters escaped."""
    if len(name) > _LONGEST_SHOWN_NAME:
        name = name[:_LONGEST_SHOWN_NAME] + "…"
    return repr(name)


def escaped(text: str) -> str:
    """Return text from a file, shortened and with control characters escaped, without quotes."""
    return shown(text)[1:-1]


def some(names: Sequence[str], what: str = "tensors", most: int = 5) -> str:
    """Quote the first few names from a file, and count the others."""
    quoted = ", ".join(map(shown, names[:most]))
    more = len(names) - most
    return quoted if more <= 0 else f"{quoted} and {more:,} more {what}".rstrip()


def named(error: OSError, path: str, doing: str = "", *, tensor: str | None = None) -> OSError:
    """Return an error of the operating system that names the file and the tensor.

    An error without a number, or with a tensor's name, is returned unchanged.
    """
    if error.errno is None or hasattr(error, "tensor"):
        return error
    text = (error.strerror or str(error)) + doing
    if tensor is not None:
        text += f" (tensor {shown(tensor)})"
    detailed = OSError(error.errno, text, hiding(error.filename or path))
    if tensor is not None:
        detailed.tensor = tensor  # type: ignore[attr-defined]
    return detailed


class CheckpointError(Exception):
    """Base class of errors about the contents of a checkpoint.

    Parameters
    ----------
    reason : str
        Description of the fault, with the actual and the expected value.
    path : str, optional
        Path or URL of the file. The reader adds it to errors of format modules.
    offset : int, optional
        Byte offset of the fault in the file.
    tensor : str, optional
        Name of the tensor.
    rule : str, optional
        Short name of the broken rule, taken from the specification or its reference reader.
    hint : str, optional
        Advice to the user.

    Examples
    --------
    >>> print(xckpt.FormatError("length 60 != 64", path="m.zt", offset=64, rule="DenseSize"))
    m.zt: byte 64: length 60 != 64 [DenseSize]
    """

    #: Code that other programs run when they load the file, as `Index.executes`.
    executes: tuple[str, ...] = ()

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
        reason = hidden(reason)
        super().__init__(reason)
        self.reason = reason
        self.path = hiding(path)
        self.offset = offset
        self.tensor = tensor
        self.rule = rule
        self.hint = hint

    def __str__(self) -> str:
        location = [self.path] if self.path is not None else []
        if self.tensor is not None:
            location.append(f"tensor {shown(self.tensor)}")
        if self.offset is not None:
            location.append(f"byte {self.offset}")
        text = ": ".join([*location, self.reason])
        if self.rule is not None:
            text += f" [{self.rule}]"
        return text if self.hint is None else f"{text}. {self.hint}"

    # Dask ships errors between processes; the default reduction loses keyword arguments.
    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))

    def located(
        self, *, path: str | None = None, offset: int | None = None, tensor: str | None = None
    ) -> CheckpointError:
        """Fill in the file, the byte offset and the tensor if they are missing.

        Parameters
        ----------
        path : str, optional
            Path or URL of the file.
        offset : int, optional
            Byte offset in the file.
        tensor : str, optional
            Name of the tensor.

        Returns
        -------
        CheckpointError
            The same error.

        Examples
        --------
        >>> print(xckpt.FormatError("truncated", offset=64).located(path="m.zt", offset=0))
        m.zt: byte 64: truncated
        """
        self.path = self.path if self.path is not None else hiding(path)
        self.offset = self.offset if self.offset is not None else offset
        self.tensor = self.tensor if self.tensor is not None else tensor
        return self


def _rebuild(kind: type[CheckpointError], fields: dict[str, Any]) -> CheckpointError:
    executes = fields.pop("executes", ())
    error = kind(**fields)
    error.executes = executes
    return error


class FormatError(CheckpointError, ValueError):
    """The file breaks a rule of its format.

    Examples
    --------
    >>> try:
    ...     xckpt.open(b"ZTEN1000")
    ... except xckpt.FormatError as error:
    ...     print(error.rule, error.offset)
    FileTooSmall 0
    """


class TruncatedError(FormatError):
    """A field continues after the end of the file, or of the area that it belongs to."""


class IntegrityError(CheckpointError, ValueError):
    """A digest stored in the file disagrees with the bytes it covers.

    By default reading checks compressed parts only; ``verify=True`` checks all.

    Examples
    --------
    >>> try:
    ...     values = xckpt.open("m.zt", verify=True)["lm_head.weight"].values
    ... except xckpt.IntegrityError as error:
    ...     print(f"{error.tensor} is damaged")
    """


class UnsupportedError(CheckpointError, NotImplementedError):
    """The file uses an unsupported feature, or the format cannot store a tensor.

    A file with a tensor of an unknown type opens; the error is raised when its values are computed.

    Examples
    --------
    >>> try:
    ...     xckpt.save({"w": np.ones(3, "complex128")}, "w.safetensors")
    ... except xckpt.UnsupportedError as error:
    ...     print(error.tensor)
    w
    """


class TooLargeError(UnsupportedError, MemoryError):
    """The selected data do not fit in memory; a smaller selection may.

    Examples
    --------
    >>> try:
    ...     values = ds["lm_head.weight"].values
    ... except xckpt.TooLargeError:
    ...     values = ds["lm_head.weight"][:1000].values
    """


class PayloadMissingError(CheckpointError, LookupError):
    """The checkpoint has the shape and type of a tensor, but not its values.

    Examples
    --------
    >>> try:
    ...     values = ds["lm_head.weight"].values
    ... except xckpt.PayloadMissingError as error:
    ...     print(f"skipped {error.tensor}")
    """


class MissingShardError(PayloadMissingError, FileNotFoundError):
    """A file that holds values of a checkpoint is missing.

    Tensors in other files remain readable.

    Examples
    --------
    >>> try:
    ...     values = xckpt.open("model.safetensors.index.json")["lm_head.weight"].values
    ... except xckpt.errors.MissingShardError as error:
    ...     print(f"get {error.filename}")
    """


class FileChangedError(CheckpointError, OSError):
    """The file has changed since it was opened: its size, time or identity differs.

    Open it again to read the new contents.

    Examples
    --------
    >>> try:
    ...     values = ds["lm_head.weight"].values
    ... except xckpt.FileChangedError:
    ...     values = xckpt.open("m.zt")["lm_head.weight"].values
    """


class CheckpointWarning(UserWarning):
    """An irregularity that a specification tolerates, but that users should know about.

    Examples
    --------
    >>> warnings.filterwarnings("error", category=xckpt.CheckpointWarning)
    """


class UnreadableWarning(CheckpointWarning):
    """Some tensors of a checkpoint cannot be read, for example because a shard is missing.

    The other tensors can be read. The message has one line for each cause.

    Examples
    --------
    >>> warnings.filterwarnings("error", category=xckpt.errors.UnreadableWarning)
    """


@contextmanager
def locating(*, path: str | None = None, tensor: str | None = None) -> Iterator[None]:
    """Add the file and the tensor to errors, and turn `MemoryError` into `TooLargeError`."""
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
        hint = "Select a smaller part"
        raise TooLargeError(reason, path=path, tensor=tensor, rule="Memory", hint=hint) from error


# --- causes --------------------------------------------------------------------------------------


class Cause(NamedTuple):
    """One reason why tensors cannot be read, and the names of these tensors."""

    error: CheckpointError  # of the first tensor
    tensors: tuple[str, ...]

    @property
    def is_damage(self) -> bool:
        """Whether the checkpoint is incomplete or damaged; see `is_damage`."""
        return is_damage(self.error)

    def reason(self, path: str = "", *, brief: bool = False) -> str:
        """Return the reason with its place, its rule and the remedy, or only the reason.

        The file is named unless it is `path`, and the byte offset if there is only one tensor.
        """
        error = self.error
        name = basename(error.path or "")
        file = None if name in {"", basename(path)} else name
        if brief:
            return str(CheckpointError(error.reason, path=file))
        offset = error.offset if len(self.tensors) == 1 else None
        place: Any = {"path": file, "offset": offset}
        return str(CheckpointError(error.reason, rule=error.rule, hint=error.hint, **place))


def is_damage(error: CheckpointError) -> bool:
    """Return whether the error of a tensor means that its checkpoint is incomplete or damaged.

    It does not for a type that is unsupported, or for a tensor that was saved without values.
    """
    if isinstance(error, PayloadMissingError):
        return isinstance(error, MissingShardError)
    return not isinstance(error, UnsupportedError)


def causes_of(problems: Iterable[tuple[str, CheckpointError]]) -> list[Cause]:
    """Group tensors that cannot be read by cause, in the order of their names.

    Parameters
    ----------
    problems : iterable of (str, CheckpointError)
        Names of tensors, and the errors that reading them raises.

    Returns
    -------
    list of Cause
        Errors that differ only in tensor and byte offset have one cause. Each wrong digest is a
        cause by itself.
    """
    causes: dict[Any, tuple[CheckpointError, list[str]]] = {}
    for name, error in problems:
        key: tuple[Any, ...] = (type(error), error.path, error.reason, error.rule, error.hint)
        key = (name,) if isinstance(error, IntegrityError) else key
        causes.setdefault(key, (error, []))[1].append(name)
    return [Cause(error, tuple(names)) for error, names in causes.values()]


def unreadable_lines(path: str, causes: Sequence[Cause], total: int) -> list[str]:
    """Return the sentence that some of `total` tensors cannot be read, and a line for each cause.

    A single cause is in the sentence. `path` is the checkpoint, which the lines do not repeat.
    """
    count = sum([len(cause.tensors) for cause in causes])
    head = f"{count:,} of {total:,} tensors cannot be read"
    if len(causes) == 1:
        [cause] = causes
        return [f"{head} ({some(cause.tensors)}): {cause.reason(path)}"]
    lines = [f"{len(c.tensors):,} ({some(c.tensors)}): {c.reason(path)}" for c in causes]
    return [head, *lines]


def unreadable_text(path: str, causes: Sequence[Cause], total: int) -> str:
    """Return the message of an `UnreadableWarning`, with a line for each cause."""
    head, *lines = unreadable_lines(path, causes, total)
    lines = [f"{path}: {head}" if path else head, *lines]
    # Names of files may have line breaks.
    return "\n".join([line.replace("\n", "\\n") for line in lines])


# --- warnings ------------------------------------------------------------------------------------


def warn(message: str, category: type[Warning] = CheckpointWarning) -> None:
    """Warn at the line of the user's code that called the package.

    The user's filters apply. Python's registry of earlier warnings is not used, because it silences
    all but the first warning of a line.
    """
    frame = _user_frame()
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(
        hidden(message), category, frame.f_code.co_filename, frame.f_lineno, module
    )


def deprecated_name(old: str, new: str, since: str) -> None:
    """Warn that a name is a deprecated alias, which works for one release.

    Parameters
    ----------
    old, new : str
        Names as users write them: ``"join="`` for an option, ``"xckpt.load"`` for a function.
    since : str
        Version in which `new` replaced `old`.
    """
    # Unlike DeprecationWarning, FutureWarning is always shown by default, also in libraries.
    text = f"{old} is called {new} since xckpt {since}; the old name will be removed"
    warn(text, FutureWarning)


def _user_frame() -> FrameType:
    """Return the innermost frame of the user's code, in this thread or else in the main thread."""
    frames = sys._current_frames()  # noqa: SLF001  documented, and the only way to another thread
    current = frames[threading.get_ident()]
    # A thread of a pool has no frame of the user's code, which usually waits in the main thread.
    for innermost in (current, frames.get(threading.main_thread().ident or 0)):
        frame = innermost
        while frame is not None:
            if str(frame.f_globals.get("__name__")).partition(".")[0] not in _SKIPPED_PACKAGES:
                return frame
            frame = frame.f_back
    return current
