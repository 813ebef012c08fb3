"""Make the relative links of README.md absolute, so that they work on an index of packages.

``python -m torture.links REPOSITORY REF`` rewrites README.md in place, before the archives of a
release are built; REPOSITORY is an address on GitHub, and REF a tag.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def absolute_links(text: str, repository: str, ref: str) -> str:
    """Return a page of the top folder with links that lead to a repository at a tag or commit."""

    def replacement(match: re.Match[str]) -> str:
        kind = "raw" if match["image"] else "blob"
        return f"{match[0].removesuffix(match['path'])}{repository}/{kind}/{ref}/{match['path']}"

    pattern = r"(?P<image>!?)\[[^\]]*\]\((?P<path>(?![a-z]+:|#)[^)\s]+)"
    return re.sub(pattern, replacement, text)


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(absolute_links(page.read_text("utf-8"), *sys.argv[1:]), "utf-8")
