"""A parser of VirtualiZarr: the raw tensors of a checkpoint as virtual arrays of zarr."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from xckpt.errors import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from obspec_utils.registry import ObjectStoreRegistry
    from virtualizarr.manifests import ManifestArray, ManifestGroup, ManifestStore

    from xckpt.labels import TensorFilter
    from xckpt.opening.references import StoredArray

__all__ = ["Parser"]


class Parser:
    """A parser for `virtualizarr.open_virtual_dataset`, for one file of any format.

    The arrays refer to the ranges of the file in which the tensors are; nothing is copied. Tensors
    that zarr lacks are left out with a warning: bfloat16, float8, 4-bit types and blocks of GGUF,
    compressed and sparse tensors, values in the header, and those in other files.

    Parameters
    ----------
    engine : str, optional
        Name of the format; detected from the content by default.
    tensors : str, iterable of str, re.Pattern or callable, optional
        Tensors to describe; see `xckpt.datasets.options.OpenOptions`.
    dims : mapping of str to sequence of (str or None), or "size", optional
        Names of axes, as for ``xarray.open_dataset``.
    group : str, optional
        Module that becomes the root, as a path, for names with slashes.
    skip_variables : iterable of str, optional
        Tensors to leave out, by their exact names.
    reader_factory : callable, optional
        Function that opens a path in a store as a file; `obspec_utils.readers.BlockStoreReader` by
        default.
    **format_options
        Options of a single engine.

    Examples
    --------
    >>> from xckpt.virtual import Parser
    >>> parser = Parser(tensors="*.weight")  # for open_virtual_dataset(url, registry, parser)
    """

    def __init__(
        self,
        engine: str | None = None,
        *,
        tensors: TensorFilter | None = None,
        dims: Mapping[str, Sequence[str | None]] | Literal["size"] | None = None,
        group: str | None = None,
        skip_variables: Iterable[str] | None = None,
        reader_factory: Callable[[Any, str], Any] | None = None,
        **format_options: Any,
    ) -> None:
        self._engine, self._tensors, self._dims = engine, tensors, dims
        self._group = [name for name in (group or "").split("/") if name]
        self._skipped = frozenset(skip_variables or ())
        self._reader_factory = reader_factory
        self._format_options = format_options

    def __call__(self, url: str, registry: ObjectStoreRegistry) -> ManifestStore:
        """Describe the tensors of a file.

        Parameters
        ----------
        url : str
            URL of the file, such as ``"s3://bucket/m.safetensors"``.
        registry : obspec_utils.registry.ObjectStoreRegistry
            Stores by URL.

        Returns
        -------
        virtualizarr.manifests.ManifestStore
            An array for each tensor, in groups if names have slashes.

        Raises
        ------
        CheckpointError
            If the file is malformed.
        ValueError
            If the file has no such group.

        Warns
        -----
        CheckpointWarning
            If tensors are left out.
        """
        from obspec_utils.readers import BlockStoreReader
        from virtualizarr.manifests import ManifestStore

        from xckpt.opening import open_index
        from xckpt.opening.references import plain_attrs, stored_arrays

        store, path = registry.resolve(url)
        with (self._reader_factory or BlockStoreReader)(store, path) as file:
            source, index = open_index(file, self._engine, whole=False, **self._format_options)
            root: dict[str, Any] = {}
            inline = []
            for array in stored_arrays(source, index, self._tensors, self._dims):
                name, part = array.tensor.name, array.tensor.parts["data"]
                if part.inline is not None:
                    inline.append(name)
                elif name not in self._skipped:
                    *groups, leaf = name.split("/")
                    node = root
                    for group in groups:
                        node = node.setdefault(group, {})
                    node[leaf] = _manifest_array(array, url, plain_attrs(array.tensor.attrs))
        if inline:
            warn(f"{url}: left out, as their values are in the header: {', '.join(inline[:5])}")
        for name in self._group:
            root = root.get(name, {})
            if type(root) is not dict or not root:
                raise ValueError(f"{url}: no group is {'/'.join(self._group)!r}")
        return ManifestStore(_manifest_group(root, plain_attrs(index.attrs)), registry=registry)


def _manifest_group(members: Mapping[str, Any], attrs: dict[str, Any]) -> ManifestGroup:
    from virtualizarr.manifests import ManifestGroup

    groups = {name: _manifest_group(m, {}) for name, m in members.items() if isinstance(m, dict)}
    arrays = {name: member for name, member in members.items() if name not in groups}
    return ManifestGroup(arrays=arrays, groups=groups, attributes=attrs)


def _manifest_array(array: StoredArray, url: str, attrs: dict[str, Any]) -> ManifestArray:
    from virtualizarr.manifests import ChunkManifest, ManifestArray
    from virtualizarr.manifests.utils import create_v3_array_metadata

    codecs: list[dict[str, Any]] = []
    if array.order == "F":
        order = list(range(array.tensor.ndim))[::-1]
        codecs.append({"name": "transpose", "configuration": {"order": order}})
    endian = "big" if array.dtype.byteorder == ">" else "little"
    codecs.append({"name": "bytes", "configuration": {"endian": endian}})
    metadata = create_v3_array_metadata(
        shape=array.tensor.shape,
        data_type=array.dtype.newbyteorder("="),
        chunk_shape=array.chunk_shape,
        codecs=codecs,
        attributes=attrs,
        dimension_names=array.dims,
    )
    if not array.tensor.size:
        manifest = ChunkManifest(entries={}, shape=array.grid)
    else:
        ranges = np.array(array.ranges, np.uint64).reshape(*array.grid, 2)
        manifest = ChunkManifest.from_arrays(
            paths=np.full(array.grid, url, np.dtypes.StringDType()),
            offsets=np.asarray(ranges[..., 0]),
            lengths=np.asarray(ranges[..., 1]),
        )
    return ManifestArray(metadata=metadata, chunkmanifest=manifest)
