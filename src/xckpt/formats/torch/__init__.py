r"""Checkpoints of PyTorch, read without PyTorch, and without running anything that is in them.

A checkpoint is a pickle next to raw storages (`xckpt.formats.torch.containers`), or a folder of
such (`xckpt.formats.torch.distributed`). A pickle is a program. It is read by an interpreter that
makes records in place of calls (`xckpt.formats.torch.pickles`), and a closed table says which of
these are tensors (`xckpt.formats.torch.objects`). So any file opens, whatever classes it names, and
none can do anything.

Tensors are views of storages, which several may share. Views that are neither in C nor in Fortran
order are parts with `strides`. Checksums of members count for tensors that are all of a storage.

References: those of the modules.
"""

from __future__ import annotations

from xckpt.errors import FormatError, UnsupportedError
from xckpt.formats import Format, Readable, archive, kit
from xckpt.formats.torch import containers, distributed
from xckpt.formats.torch.objects import ObjectWalk
from xckpt.formats.torch.tensors import Tensors
from xckpt.index import Index

_PREVIEW = b"PYTORCH1"
_OLDEST = {"storages", "tensors", "pickle", "sys_info"}  # members of the tar archives of 0.1
# What the first member of an archive is called in its folder, or in which folder there it is.
_FIRST = {"data.pkl", "version", "byteorder", "constants.pkl", ".format_version"}
_FOLDERS = ("data/", "code/", ".data/")
_AGAIN = "Load it with torch.load(..., weights_only=True), and save it again"


class Torch(Format):
    """Checkpoints of PyTorch, also folders of ``torch.distributed.checkpoint``; nothing is run."""

    name = "torch"
    description = "PyTorch checkpoints"
    shared_suffixes = (".ckpt", ".bin")
    folder_marks = (distributed.METADATA,)

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Whether it is an archive with a pickle or storages, a chain of pickles, or metadata."""
        if head.startswith(b"PK\3\4"):
            folder, _, rest = archive.first_name(head).partition("/")
            return bool(folder) and (rest in _FIRST or rest.startswith(_FOLDERS))
        if head[257:262] == b"ustar":
            return head[:100].rstrip(b"\0").decode("latin-1").rstrip("/") in _OLDEST
        if head.startswith(_PREVIEW) or containers.is_legacy(head):
            return True
        return distributed.is_metadata(head)

    def read(self, source: Readable, *, all_tensors: bool = False) -> Index:
        """Read the pickle, and where storages are.

        Parameters
        ----------
        source : Readable
            The file.
        all_tensors : bool, default False
            Whether tensors that modules keep outside their ``state_dict`` are variables as well:
            buffers that are not persistent, and plain attributes.

        Returns
        -------
        Index
            Tensors in the order of the pickle.
        """
        head = bytes(source.read(0, min(512, source.size)))
        notes = kit.Notes()
        if distributed.is_metadata(head):
            return distributed.read(self.name, source, notes)
        if head.startswith(_PREVIEW):
            raise UnsupportedError("a container of 2018", offset=0, rule="Container", hint=_AGAIN)
        if head[257:262] == b"ustar":
            reason = "a tar archive, as PyTorch 0.1 wrote them"
            raise UnsupportedError(reason, offset=0, rule="Container", hint=_AGAIN)
        is_zip = head.startswith((b"PK\3\4", b"PK\5\6"))
        if not is_zip and not containers.is_legacy(head):
            raise FormatError(f"it begins {head[:16]!r}", offset=0, rule="Container")
        content = (containers.read_zip if is_zip else containers.read_legacy)(source, notes)
        tensors = Tensors(content.place, notes, content.byteorder, content.base)
        size, base = content.nbytes, content.base
        objects = ObjectWalk(tensors, size, notes, base, all_tensors=all_tensors)
        objects.walk(content.value)
        found, texts = (objects.tensors, objects.attrs), notes.warnings()
        return Index(self.name, content.version, *found, source.name, source.size, warnings=texts)
