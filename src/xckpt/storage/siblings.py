"""Names of files next to a file, as another file gives them: no way out of the folder.

This is about names. Symbolic links in the folder are its user's and are followed: the caches of
Hugging Face, git-annex and DVC consist of links that lead out of it.
"""

from __future__ import annotations

import re

from xckpt.errors import FormatError, shown

__all__ = ["components"]

# Besides the separators: what Windows takes for a drive, a stream or a pattern, controls, and lone
# surrogates that stand for no byte.
_UNSAFE = re.compile(r'[\x00-\x1f\\:*?"<>|\ud800-\udc7f\udd00-\udfff]')


def components(name: str) -> list[str]:
    """Split a relative path into its components."""
    parts = name.split("/")
    if _UNSAFE.search(name) or any(part in {"", ".", ".."} for part in parts):
        raise FormatError(f"{shown(name)} is not the name of a file in the same folder")
    return parts
