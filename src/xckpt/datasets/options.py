"""Keywords of ``xarray.open_dataset(..., engine=...)`` that all engines of xckpt share."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from xckpt.options import described, suggest_option

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from xckpt.arrays import ReadOptions
    from xckpt.index import Index
    from xckpt.labels import TensorFilter

# Keywords of transformers and `torch.load`, with what does the same here.
_OF_LOADERS = {
    **dict.fromkeys(("dtype", "torch_dtype"), "the result is lazy: ds.astype('float32')"),
    **dict.fromkeys(("device", "map_location"), "arrays are of numpy: torch.from_numpy(array)"),
}
_SWITCHES = frozenset({"dask", "decode", "mmap", "sparse", "verify"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """Options of opening and reading a checkpoint.

    Parameters
    ----------
    drop_variables : str or iterable of str, optional
        Tensors (or parts, ``name:part``) to omit, by their exact names.
    dims : mapping of str to sequence of (str or None), or "size", optional
        Names of axes: a glob of tensor names to a name for each axis, None for the default name;
        the last match wins. For stacked tensors, a glob matches their names or the name of the
        variable, and names their own axes or all. If a name is given to axes of several sizes, the
        most frequent size keeps it, and the others have their size appended (``out_352``). Default
        names come from the file, from the family of the model (``head*key``, ``embd``), or from the
        sizes (``d768``). With ``"size"``, they come from the sizes unless the file states names.
    stack : bool, str, or list of str, default False
        Whether numbered modules become dimensions: ``layers.0.w``, ``layers.1.w``, ... of one
        kind become the variable ``layers.w`` with a dimension ``layers``. Names of modules restrict
        stacking to them, and so do paths, their ends, or globs of them (``"decoder.layers"``).
    join : {"exact", "outer"}, default "exact"
        With `stack`: how to stack tensors of a module that have different numbers, such as experts
        from the second layer on. "exact": other numbers become another dimension (``layers_1``).
        "outer": one dimension has all numbers, and missing members are NaN; types without NaN, such
        as integers, are stacked as for "exact".
    decode : bool, default True
        Whether to convert to types that numpy and xarray compute well with: float16, bfloat16 and
        smaller floats become float32, and quantised tensors are dequantised. False keeps the stored
        types, with the parts of composite tensors as variables ``name:part``.
    sparse : bool, default False
        Whether sparse tensors become chunks of `sparse.COO` instead of dense ones.
    verify : bool, optional
        True checks the digest of every part once before its first use, False checks none. By
        default digests of compressed parts are checked when they are decoded.
    mmap : bool, default False
        Whether to map raw data of local files into memory instead of reading them. Chunks are then
        views of the file: nothing is copied, and unused pages are not read. But if another program
        truncates the file while they are in use, the operating system ends this process
        (``SIGBUS``), even the kernel of a notebook; without maps, reading raises an exception. Use
        it only for files that are not written to.
    missing : {"warn", "raise"}, default "warn"
        What to do if tensors cannot be read, because a shard is missing or a file is damaged: warn
        once, and raise the error when one of them is computed, or raise it on opening.
    join_ranks : bool or "auto", default "auto"
        Whether the files of tensor-parallel ranks, such as ``consolidated.00.pth`` of Llama and
        ``mp_rank_00`` of Megatron-LM, become whole tensors. "auto": if the family and the stated
        sizes of the model explain each tensor; otherwise ranks stay side by side, with a prefix to
        the names of their tensors, and a warning gives the reason. True raises an error instead,
        and False keeps them side by side.
    structure : mapping of str to mapping, optional
        Corrections of what tensors are: a glob of tensor names to fields of
        `xckpt.structure.TensorInfo`, such as ``{"*.window": {"role": "constant"}}``; fields are
        ``role``, ``component``, ``module_type`` and ``slot``. The last match wins.
    group : str, optional
        Module to open alone, as a path such as ``"model/layers/0"``: its tensors as
        `xarray.open_datatree` shows them, and for a tree those below it.
    dask : bool, default True
        Whether variables are dask arrays. False gives xarray's own lazy arrays, which read a
        selection without a graph, keep values after the first read, and take part in ``chunks=``
        with any chunk manager and in ``load_async``; ``xckpt.open(path, chunks=None)`` does the
        same.
    format_options : mapping
        Options of a single engine, by keyword.
    """

    drop_variables: str | Iterable[str] | None = None
    tensors: TensorFilter | None = None
    exclude: TensorFilter | None = None
    only: Literal["weights"] | None = None
    dims: Mapping[str, Sequence[str | None]] | Literal["size"] | None = None
    stack: bool | str | Sequence[str] = False
    join: Literal["exact", "outer"] = "exact"
    decode: bool = True
    sparse: bool = False
    verify: bool | None = None
    mmap: bool = False
    missing: Literal["warn", "raise"] = "warn"
    join_ranks: bool | Literal["auto"] = "auto"
    structure: Mapping[str, Mapping[str, str]] | None = None
    storage_options: dict[str, Any] | None = None
    group: str | None = None
    dask: bool = True
    format_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.missing not in {"warn", "raise"}:
            raise ValueError(f"missing={self.missing!r}: expected 'warn' or 'raise'")
        if not isinstance(self.join_ranks, bool) and self.join_ranks != "auto":
            raise ValueError(f"join_ranks={self.join_ranks!r}: expected True, False or 'auto'")
        if self.group is not None and not isinstance(self.group, str):
            raise TypeError(f"group is the path of a module ('model/layers/0'), not {self.group!r}")
        require_join(self.join)
        if self.stack is not False:
            stacked_modules(self.stack)
        from xckpt.labels.filters import require_only, reusable

        require_only(self.only)
        for key in ("tensors", "exclude"):  # an iterator would be empty after its first use
            object.__setattr__(self, key, reusable(getattr(self, key)))

    @property
    def reading(self) -> ReadOptions:
        """The options for decoding stored bytes, which also apply to statistics and copies."""
        from xckpt.arrays import ReadOptions

        return ReadOptions(decode=self.decode, sparse=self.sparse, verify=self.verify)

    def filter(self, index: Index) -> TensorFilter | None:
        """Return the filter of `tensors`, `exclude` and `only` for the tensors of a file."""
        from xckpt.labels import combined
        from xckpt.structure import structure_of

        return combined(self.tensors, self.exclude, self.only, lambda: [structure_of(index)])

    @property
    def dropped(self) -> set[str]:
        """The names in `drop_variables`."""
        dropped = self.drop_variables
        return {dropped} if isinstance(dropped, str) else set(dropped or ())

    @property
    def globs_of_dims(self) -> Mapping[str, Sequence[str | None]]:
        """The globs in `dims`, with the names of axes."""
        return {} if self.dims is None or isinstance(self.dims, str) else self.dims

    def with_dims(self, globs: Mapping[str, Sequence[str | None]]) -> OpenOptions:
        """Return the options with other globs in `dims`, unless this is a word."""
        return self if isinstance(self.dims, str) else replace(self, dims=globs or None)

    @classmethod
    def keywords(cls) -> tuple[str, ...]:
        """Return the keywords that all engines share."""
        return tuple(f.name for f in fields(cls) if f.name != "format_options")

    @classmethod
    def parse(
        cls, keywords: Mapping[str, Any], *, engine: str, own: tuple[str, ...] = ()
    ) -> OpenOptions:
        """Make options from keyword arguments."""
        allowed = (*cls.keywords(), *own)
        for keyword in keywords:
            if keyword not in allowed:
                hint = _OF_LOADERS.get(keyword) or suggest_option(keyword, ("engine", *allowed))
                raise TypeError(f"engine {engine!r} has no option {keyword!r}; {hint}")
        shared = {k: v for k, v in keywords.items() if k not in own}
        for keyword in _SWITCHES & shared.keys():
            value = shared[keyword]
            if not isinstance(value, bool) and not (value is None and keyword == "verify"):
                raise TypeError(f"{keyword} is True or False, not {value!r}")
        return cls(**shared, format_options={k: v for k, v in keywords.items() if k in own})


def stacked_modules(stack: Literal[True] | str | Collection[str]) -> Collection[str] | None:
    """Return the modules that the option `stack` names, None for all."""
    if stack is True:
        return None
    modules = {stack} if isinstance(stack, str) else stack
    # A mapping or a number is a mistake, not a collection of names.
    if not isinstance(modules, set | frozenset | list | tuple) or not all(
        isinstance(module, str) for module in modules
    ):
        raise TypeError(
            "stack takes True, the name or path of a numbered module ('layers') or a list of them, "
            f"not {stack!r}"
        )
    return modules


def require_join(join: str) -> None:
    """Raise if the option `join` is invalid."""
    if join not in {"exact", "outer"}:
        raise ValueError(f"join={join!r}: expected 'exact' or 'outer'")


OpenOptions.__doc__ = described(OpenOptions.__doc__ or "", [f.name for f in fields(OpenOptions)])
