r"""PyTorch checkpoints (`torch.save`), read without PyTorch and without executing their code.

A checkpoint is a pickle next to raw storages (`xckpt.formats.torch.containers`), or a folder of
such files (`xckpt.formats.torch.distributed` and `xckpt.formats.torch.deepspeed`). A pickle is a
program. xckpt interprets it, but records calls instead of making them
(`xckpt.formats.pickles.machine`), and recognises tensors among the records by a closed table of
functions (`xckpt.formats.torch.tensors`). Therefore every file opens, whatever classes it names,
and none can do harm. `xckpt.formats.torch.objects` gives tensors their names.

A tensor is a view of a storage, which several tensors may share. Views that are neither in C nor in
Fortran order are parts with `strides`. The checksum of a member applies to a tensor if the tensor
is the whole storage.

Specification: none; the modules name the source files of PyTorch that define the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xckpt.formats import Format, Readable, archive, kit
from xckpt.formats.torch import containers, deepspeed, distributed
from xckpt.formats.torch.objects import ObjectWalk, with_parameters
from xckpt.formats.torch.tensors import Tensors

if TYPE_CHECKING:
    from xckpt.index import Index, Tensor

_OLDEST = {"storages", "tensors", "pickle", "sys_info"}  # members of the tar archives of 0.1
# Names, or folders, of the first member of an archive, below the root folder.
_FIRST = {"data.pkl", "version", "byteorder", "constants.pkl", ".format_version"}
_FOLDERS = ("data/", "code/", ".data/")


class Torch(Format):
    """PyTorch checkpoints, also folders of DCP and DeepSpeed; executes no code."""

    name = "torch"
    description = "PyTorch checkpoints"
    storage_attrs = ("torch_dtype",)  # of a tensor
    shared_suffixes = (".ckpt", ".bin")
    folder_marks = (distributed.METADATA, *deepspeed.MODEL_STATES)

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a file is an archive of PyTorch, a chain of pickles, or metadata."""
        if head.startswith(b"PK\3\4"):
            root, _, member = archive.first_name(head).partition("/")
            is_archive = bool(root) and (member in _FIRST or member.startswith(_FOLDERS))
            # The files of ranks have an archive for each item, one behind the other.
            return is_archive and not kit.file_name(name).lower().endswith(distributed.SUFFIX)
        if head[257:262] == b"ustar":
            return head[:100].rstrip(b"\0").decode("latin-1").rstrip("/") in _OLDEST
        if head.startswith(containers.PREVIEW) or containers.is_legacy(head):
            return True
        return distributed.is_metadata(head)

    def read(self, source: Readable, *, all_tensors: bool = False) -> Index:
        """Read the pickle and the positions of the storages.

        Parameters
        ----------
        source : Readable
            The file.
        all_tensors : bool, default False
            Include tensors outside the ``state_dict`` of modules: buffers that are not persistent,
            and plain attributes.

        Returns
        -------
        Index
            Tensors in the order of the pickle.
        """
        notes = kit.Notes()
        with notes.attached():
            return self._read(source, notes, all_tensors=all_tensors)

    def _read(self, source: Readable, notes: kit.Notes, *, all_tensors: bool) -> Index:
        if distributed.is_metadata(kit.first_bytes(source, 512)):
            return distributed.read(self.name, source, notes)
        content = containers.read(source, notes)
        tensors: dict[str, Tensor] = {}
        attrs: dict[str, Any] = {}
        for part, path in ((content, ()), (content.constants, ("constants",))):
            if part is not None and not (path and part.value == ()):
                objects = ObjectWalk(Tensors(part, notes), all_tensors=all_tensors)
                objects.walk(part.value, path)
                tensors |= objects.tensors
                attrs |= objects.attrs
        tensors, version = with_parameters(tensors, attrs), content.version
        return kit.index_of(self.name, source, tensors, attrs, notes=notes, version=version)

    def read_folder(self, source: Readable, *, all_tensors: bool = False) -> Index:
        """Read the folder of a training run; options as for `read`."""
        index = None
        if kit.file_name(source.name) in deepspeed.MODEL_STATES:
            index = deepspeed.read(self.name, source)
        return index or self.read(source, all_tensors=all_tensors)
