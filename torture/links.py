"""Make the links of README.md absolute, and add the addresses that an index of packages lists.

``python -m torture.links REPOSITORY REF`` rewrites README.md and pyproject.toml in place, before
the archives of a release are built; REPOSITORY is an address on GitHub, and REF a tag.
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


def with_urls(pyproject: str, repository: str, ref: str) -> str:
    """Return pyproject.toml with the addresses of the source, the documentation and the issues."""
    table = f"""[project.urls]
Source = "{repository}"
Documentation = "{repository}/blob/{ref}/docs/index.md"
Changelog = "{repository}/blob/{ref}/CHANGELOG.md"
Issues = "{repository}/issues"

"""
    return pyproject.replace("[project.scripts]\n", f"{table}[project.scripts]\n", 1)


if __name__ == "__main__":
    for name, rewrite in (("README.md", absolute_links), ("pyproject.toml", with_urls)):
        path = ROOT / name
        path.write_text(rewrite(path.read_text("utf-8"), *sys.argv[1:]), "utf-8")
