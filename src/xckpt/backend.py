"""The xarray engines, one for each format in the registry.

xarray imports this module in every session that guesses an engine or names a third-party one, so
it imports nothing heavy: dask and other large packages are imported when a file is opened.
"""

from __future__ import annotations

import re
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, ClassVar

import xarray as xr  # whole: importing a part would not wait for a thread that is loading it

from xckpt import formats
from xckpt.datasets.options import OpenOptions
from xckpt.registration import register_formatter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xckpt.index import Index
    from xckpt.storage import Source

__all__ = [
    "BurnpackBackend",
    "CheckpointBackend",
    "DetectingBackend",
    "FlaxBackend",
    "GgufBackend",
    "GptrsBackend",
    "KerasBackend",
    "MlcpBackend",
    "NpzBackend",
    "OnnxBackend",
    "OrbaxBackend",
    "PrimitivBackend",
    "SafetensorsBackend",
    "TorchBackend",
    "ZTensorBackend",
]


_PARAMETERS = "\nParameters\n----------\n"
_SHARED = "**keywords\n    Options of all engines; see `xckpt.datasets.options.OpenOptions`.\n"


class _FormatDocstring:
    """The docstring of an engine: summary and options of its format, loaded on first access."""

    def __get__(self, _: object, engine: type[CheckpointBackend]) -> str:
        format = formats.get(engine.format)
        _, _, parameters = cleandoc(format.read.__doc__ or "").partition(_PARAMETERS)
        entries = re.split(r"\n(?=\S)", parameters.partition("\n\n")[0])
        options = [entry for entry in entries if entry.partition(" ")[0] in format.open_options]
        summary = cleandoc(type(format).__doc__ or "")
        return "\n".join([f"{summary}\n{_PARAMETERS.rstrip()}", *options, _SHARED])


class CheckpointBackend(xr.backends.BackendEntrypoint):
    """Base of the engines, which take description, options and docstring from their formats.

    Keywords of an engine are the fields of `xckpt.datasets.options.OpenOptions` and the options of
    the format's `read`.
    """

    format: ClassVar[str]  # empty if it is detected from the content
    url = "https://xckpt.readthedocs.io"
    supports_groups = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__doc__ is None:
            cls.__doc__ = _FormatDocstring()  # type: ignore[assignment]

    # Properties: xarray loads all engines in every session, and a format is loaded when it is used.
    @property
    def description(self) -> str:  # type: ignore[override]
        """Description in xarray's list of engines."""
        if not self.format:
            return "Open a file of any of these formats"
        format = formats.get(self.format)
        return f"Open {format.description} ({', '.join(format.suffixes)})"

    @property
    def open_dataset_parameters(self) -> tuple[str, ...]:  # type: ignore[override]
        """The keywords of `open_dataset`."""
        format_options = self._own_options()
        return tuple(dict.fromkeys(("filename_or_obj", *OpenOptions.keywords(), *format_options)))

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Return whether a file is of this format, by its content, or by the suffix of a URL.

        Parameters
        ----------
        filename_or_obj : str, os.PathLike, bytes or binary file object
            First argument of ``xarray.open_dataset``.

        Returns
        -------
        bool
            False for anything that cannot be read.
        """
        from xckpt.opening.detection import is_format

        return bool(self.format) and is_format(filename_or_obj, self.format)

    def open_dataset(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        **keywords: Any,
    ) -> xr.Dataset:
        """Open a checkpoint as a lazy, dask-backed Dataset with one variable for each tensor.

        Parameters
        ----------
        filename_or_obj : str, os.PathLike, bytes, binary file object, or list of these
            Path, URL, or content of the file. Several files, a glob or an index of shards
            (``*.index.json``) are one checkpoint.
        drop_variables : str or iterable of str, optional
            Tensors to leave out, by their exact names.
        **keywords
            See `xckpt.datasets.options.OpenOptions`.

        Returns
        -------
        xarray.Dataset
            Only headers are read until values are computed.

        Raises
        ------
        OSError
            If the file cannot be opened.
        xckpt.FormatError
            If the file is malformed.

        Examples
        --------
        >>> ds = xr.open_dataset("m.zt", engine="ztensor")
        >>> ds["lm_head.weight"].mean().compute()
        """
        from xckpt.datasets.making import finish_dataset, make_dataset
        from xckpt.index import paused_collector

        source, index, options = self._open(filename_or_obj, drop_variables, keywords)
        if options.group is not None:
            return self._groups(source, index, options)["/"]
        with paused_collector():
            ds = make_dataset(source, index, options)
        return finish_dataset(ds, source, index)

    def open_groups_as_dict(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        **keywords: Any,
    ) -> dict[str, xr.Dataset]:
        """Open a checkpoint as one Dataset for each module: tensor ``a.b.c`` is ``c`` of ``/a/b``.

        For parameters and errors, see `open_dataset`.

        Returns
        -------
        dict of str to xarray.Dataset
            Datasets of modules that have tensors, by path, which is relative to `group`. ``"/"`` is
            always included, with the attributes of the file.
        """
        return self._groups(*self._open(filename_or_obj, drop_variables, keywords))

    def _groups(self, source: Source, index: Index, options: OpenOptions) -> dict[str, xr.Dataset]:
        from xckpt.datasets.making import finish_dataset
        from xckpt.datasets.trees import make_groups, rooted
        from xckpt.index import paused_collector

        axis_names = formats.get(index.format).module_axes
        with paused_collector():
            datasets = make_groups(source, index, options, axis_names)
        if options.group is not None:
            datasets = rooted(datasets, options.group, source.name)
        finish_dataset(datasets["/"], source, index)
        return datasets

    def open_datatree(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        **keywords: Any,
    ) -> xr.DataTree:
        """Open a checkpoint as a tree of modules: tensor ``a.b.c`` is ``c`` of node ``/a/b``.

        For parameters and errors, see `open_dataset`.

        Returns
        -------
        xarray.DataTree
            The root has the attributes of the file.
        """
        from xckpt.index import paused_collector
        from xckpt.upstream.xarray_trees import make_tree

        groups = self.open_groups_as_dict(
            filename_or_obj, drop_variables=drop_variables, **keywords
        )
        with paused_collector():
            return make_tree(groups)

    def _own_options(self) -> tuple[str, ...]:
        return tuple(formats.get(self.format).open_options) if self.format else ()

    def _open(
        self,
        filename_or_obj: Any,
        drop_variables: str | Iterable[str] | None,
        keywords: dict[str, Any],
    ) -> tuple[Source, Index, OpenOptions]:
        from xckpt.opening import check_filters, open_with

        register_formatter()
        options_by_name = {"drop_variables": drop_variables, **keywords}
        options = OpenOptions.parse(
            options_by_name, engine=self.format or "any", own=self._own_options()
        )
        source, index = open_with(options, filename_or_obj, self.format or None, counted=True)
        return source, index, check_filters(filename_or_obj, index, options)


class DetectingBackend(CheckpointBackend):
    """The engine of `xckpt.open`, for a file of any format; xarray does not list it."""

    format = ""


class BurnpackBackend(CheckpointBackend):
    format = "burnpack"


class FlaxBackend(CheckpointBackend):
    format = "flax"


class GgufBackend(CheckpointBackend):
    format = "gguf"


class GptrsBackend(CheckpointBackend):
    format = "gptrs"


class KerasBackend(CheckpointBackend):
    format = "keras"


class MlcpBackend(CheckpointBackend):
    format = "mlcp"


class NpzBackend(CheckpointBackend):
    format = "npz"


class OnnxBackend(CheckpointBackend):
    format = "onnx"


class OrbaxBackend(CheckpointBackend):
    format = "orbax"


class PrimitivBackend(CheckpointBackend):
    format = "primitiv"


class SafetensorsBackend(CheckpointBackend):
    format = "safetensors"


class TorchBackend(CheckpointBackend):
    format = "torch"


class ZTensorBackend(CheckpointBackend):
    format = "ztensor"
