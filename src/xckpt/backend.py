"""The xarray engines.

xarray imports this module in every session that guesses an engine or names a third-party one, so
it imports nothing heavy: dask, fsspec and the rest come in when a file is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from xarray.backends import BackendEntrypoint
from xarray.backends.common import datatree_from_dict_with_io_cleanup

import xckpt.accessor  # noqa: F401  registers ds.ckpt for users who never import xckpt
from xckpt.identity import next_namespace
from xckpt.options import OpenOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xarray import Dataset, DataTree

    from xckpt.index import Index
    from xckpt.storage import Source

__all__ = [
    "BurnpackBackend",
    "CheckpointBackend",
    "GptrsBackend",
    "MlcpBackend",
    "PrimitivBackend",
    "SafetensorsBackend",
    "ZTensorBackend",
    "described",
]


class CheckpointBackend(BackendEntrypoint):
    """What the engines of all formats share; a subclass names its format, and options of its own.

    The keywords are those of `xckpt.options.OpenOptions`.
    """

    format: ClassVar[str]
    #: Keywords that only this engine has; they go to the format's `read`.
    format_options: ClassVar[tuple[str, ...]] = ()
    url = "https://xckpt.readthedocs.io"
    supports_groups = True
    # xarray detects these itself only for engines that are given by name, not by class.
    open_dataset_parameters = ("filename_or_obj", *OpenOptions.keywords())

    def __init_subclass__(cls) -> None:
        own = [name for name in cls.format_options if name not in cls.open_dataset_parameters]
        cls.open_dataset_parameters = (*cls.open_dataset_parameters, *own)

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Tell whether the content is of this format; a remote URL is judged by its suffix.

        Parameters
        ----------
        filename_or_obj : str, os.PathLike, bytes or binary file object
            As given to ``xarray.open_dataset``.

        Returns
        -------
        bool
            False for whatever cannot be read.
        """
        from xckpt.opening import is_format

        return is_format(filename_or_obj, self.format)

    def open_dataset(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        **keywords: Any,
    ) -> Dataset:
        """Open a checkpoint as a lazy, dask-backed Dataset with one variable for each tensor.

        Parameters
        ----------
        filename_or_obj : str, os.PathLike, bytes, binary file object, or list of these
            A path, an fsspec URL, or the bytes themselves; several of them, a glob or an index of
            shards (``*.index.json``) are one checkpoint.
        drop_variables : str or iterable of str, optional
            Tensors to leave out, by their exact names.
        **keywords
            See `xckpt.options.OpenOptions`.

        Returns
        -------
        xarray.Dataset
            Nothing but headers is read until values are computed.

        Raises
        ------
        OSError
            If the file cannot be opened.
        xckpt.FormatError
            If the file is malformed.

        Examples
        --------
        >>> ds = xr.open_dataset("m.zt", engine="ztensor")  # doctest: +SKIP
        >>> ds["blocks.0.attn.w"].mean().compute()  # doctest: +SKIP
        """
        from xckpt.datasets import make_dataset
        from xckpt.opening import paused_collector

        source, index, options = self._open(filename_or_obj, drop_variables, keywords)
        with paused_collector():
            ds = make_dataset(source, index, options)
        return described(ds, source, index)

    def open_groups_as_dict(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        **keywords: Any,
    ) -> dict[str, Dataset]:
        """Open a checkpoint as one Dataset for each module: tensor ``a.b.c`` is ``c`` of ``/a/b``.

        Parameters and errors are those of `open_dataset`.

        Returns
        -------
        dict of str to xarray.Dataset
            By path, modules with tensors only; ``"/"`` is always there and has the attributes of
            the file.
        """
        from xckpt import formats
        from xckpt.datasets import make_groups
        from xckpt.opening import paused_collector

        source, index, options = self._open(filename_or_obj, drop_variables, keywords)
        axis_names = getattr(formats.get(index.format), "module_axes", None)
        with paused_collector():
            datasets = make_groups(source, index, options, axis_names)
        described(datasets["/"], source, index)
        return datasets

    def open_datatree(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        **keywords: Any,
    ) -> DataTree:
        """Open a checkpoint as a tree of modules: tensor ``a.b.c`` is ``c`` of node ``/a/b``.

        Parameters and errors are those of `open_dataset`.

        Returns
        -------
        xarray.DataTree
            The root has the attributes of the file.
        """
        groups = self.open_groups_as_dict(
            filename_or_obj, drop_variables=drop_variables, **keywords
        )
        return datatree_from_dict_with_io_cleanup(groups)

    def _open(
        self,
        filename_or_obj: Any,
        drop_variables: str | Iterable[str] | None,
        keywords: dict[str, Any],
    ) -> tuple[Source, Index, OpenOptions]:
        from xckpt.opening import open_index

        given = {"drop_variables": drop_variables, **keywords}
        options = OpenOptions.parse(given, engine=self.format, own=self.format_options)
        source, index = open_index(
            filename_or_obj,
            self.format,
            storage_options=options.storage_options,
            mmap=options.mmap,
            **options.format_options,
        )
        return source, index, options


class BurnpackBackend(CheckpointBackend):
    """Burnpack, the three dialects of version 1 (``.bpk``)."""

    description = "Open Burnpack checkpoints (.bpk)"
    format = "burnpack"
    format_options = ("layout",)


class GptrsBackend(CheckpointBackend):
    """gpt.rs: checkpoints (GPTRSCHK) and tensor archives (GPTRSTEN), versions 1 and 2."""

    description = "Open gpt.rs checkpoints and tensor archives"
    format = "gptrs"


class MlcpBackend(CheckpointBackend):
    """MLCP, in one file (``.checkpoint``) or with a file for each shard (``.metadata.json``)."""

    description = "Open MLCP checkpoints (.checkpoint, .metadata.json)"
    format = "mlcp"
    format_options = ("payload",)


class PrimitivBackend(CheckpointBackend):
    """primitiv, version 0.1: shapes, tensors, parameters, models, optimizers."""

    description = "Open primitiv files (.primitiv, .model, .optimizer, .param)"
    format = "primitiv"
    format_options = ("with_stats",)


class SafetensorsBackend(CheckpointBackend):
    """safetensors (``.safetensors``)."""

    description = "Open safetensors files (.safetensors)"
    format = "safetensors"


class ZTensorBackend(CheckpointBackend):
    """zTensor, versions 0.1 to 2 (``.zt``)."""

    description = "Open zTensor checkpoints (.zt)"
    format = "ztensor"


def described(ds: Dataset, source: Source, index: Index) -> Dataset:
    """Add to a Dataset what the file says of itself, and how to let go of it.

    Parameters
    ----------
    ds : xarray.Dataset
        Of the file; it is changed.
    source : Source
        The file.
    index : Index
        What it holds.

    Returns
    -------
    xarray.Dataset
        The same one.
    """
    ds.attrs = dict(index.attrs)
    ds.encoding |= {
        "format": index.format,
        "format_version": index.version,
        "source": source.name,
        "namespace": next_namespace(),
    }
    # A bound method: xarray pickles the closer with the Dataset.
    ds.set_close(source.close)
    return ds
