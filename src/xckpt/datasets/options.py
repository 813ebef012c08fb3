"""The keywords of ``xarray.open_dataset(..., engine=...)`` that all our engines share."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xckpt.arrays import ReadOptions

__all__ = ["OpenOptions"]

_SWITCHES = frozenset({"decode", "mmap", "sparse", "verify"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """What to open and how to read it.

    Parameters
    ----------
    drop_variables : str or iterable of str, optional
        Tensors (or parts, ``name:part``) to leave out, by their exact names.
    tensors : str, iterable of str, re.Pattern or callable, optional
        Tensors to open: a glob of whole names, several globs, a regular expression that is
        searched for, or a function from a name to a bool. By default all.
    dims : mapping of str to sequence of (str or None), optional
        Names of axes: a glob of names to one name for each axis, None where an axis is to be
        named as by default; the last match wins. Of stacked tensors, globs of their own names or
        of the variable's, with names for their own axes or for all. By default names come from
        the file, or from the sizes (``d768``).
    stack : bool, str, or list of str, default False
        Whether numbered modules become dimensions: ``layers.0.w``, ``layers.1.w``, ... of one
        kind are the variable ``layers.w`` then, with a dimension ``layers``. Names are those of
        the modules that are to be stacked, others stay apart.
    join : {"exact", "outer"}, default "exact"
        With `stack`: what becomes of modules of which some tensors have only some numbers, as
        experts from the second layer on. "exact": other numbers are another dimension
        (``layers_1``). "outer": one dimension has them all, and members that the file does not
        have are NaN that nothing is read for; where an element type has no NaN, as integers, it
        is as for "exact".
    decode : bool, default True
        Whether to give types that numpy and xarray compute well with (float16, bfloat16 and
        smaller floats become float32, quantised tensors are dequantised) or the stored types, with
        the parts of composite tensors as variables ``name:part``.
    sparse : bool, default False
        Whether sparse tensors become chunks of `sparse.COO` instead of dense ones.
    verify : bool, optional
        True checks the digest of every part once before its first use, False none; by default
        those of compressed parts are checked when they are decoded.
    mmap : bool, default False
        Whether raw data of local files are mapped into memory instead of read. Chunks are then
        views of the file: nothing is copied, and pages that are not looked at are not read. But
        if another program cuts the file short while they are in use, the operating system ends
        this process (``SIGBUS``), a notebook's kernel too; without maps that is an error. Use it
        for files that nobody writes to.
    storage_options : dict, optional
        Options for fsspec where a URL is given.
    format_options : mapping
        Options that only one engine has, by keyword.
    """

    drop_variables: str | Iterable[str] | None = None
    tensors: str | Iterable[str] | re.Pattern[str] | Callable[[str], bool] | None = None
    dims: Mapping[str, Sequence[str | None]] | None = None
    stack: bool | str | Sequence[str] = False
    join: Literal["exact", "outer"] = "exact"
    decode: bool = True
    sparse: bool = False
    verify: bool | None = None
    mmap: bool = False
    storage_options: dict[str, Any] | None = None
    format_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reading(self) -> ReadOptions:
        """The options that values depend on."""
        from xckpt.arrays import ReadOptions

        return ReadOptions(decode=self.decode, sparse=self.sparse, verify=self.verify)

    @property
    def dropped(self) -> set[str]:
        """The names in `drop_variables`."""
        dropped = self.drop_variables
        return {dropped} if isinstance(dropped, str) else set(dropped or ())

    @classmethod
    def keywords(cls) -> tuple[str, ...]:
        """Return the keywords that all engines share."""
        return tuple(f.name for f in fields(cls) if f.name != "format_options")

    @classmethod
    def parse(
        cls, keywords: Mapping[str, Any], *, engine: str, own: tuple[str, ...] = ()
    ) -> OpenOptions:
        """Make options from keyword arguments."""
        known = (*cls.keywords(), *own)
        for keyword in keywords:
            if keyword not in known:
                alike = get_close_matches(keyword, known, n=1)
                hint = f"did you mean {alike[0]!r}?" if alike else f"it has {', '.join(known)}"
                raise TypeError(f"engine {engine!r} has no option {keyword!r}; {hint}")
        shared = {k: v for k, v in keywords.items() if k not in own}
        for keyword in _SWITCHES & shared.keys():
            value = shared[keyword]
            if not isinstance(value, bool) and not (value is None and keyword == "verify"):
                raise TypeError(f"{keyword} is True or False, not {value!r}")
        return cls(**shared, format_options={k: v for k, v in keywords.items() if k in own})
