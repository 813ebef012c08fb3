"""Files are written and read without the functions that Windows or macOS lack: a simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import xckpt

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fresh import FreshProcesses

# What Python has no name for on these systems.
WINDOWS = (
    *(
        "fchmod",
        "fchown",
        "fork",
        "geteuid",
        "getuid",
        "posix_fadvise",
        "pread",
        "preadv",
        "pwrite",
    ),
    *("register_at_fork", "sysconf", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "RWF_NOWAIT"),
)
MACOS = ("posix_fadvise", "RWF_NOWAIT", "POSIX_FADV_DONTNEED", "POSIX_FADV_WILLNEED")
REMOVED = """
import os, sys
for name in {names!r}:
    if hasattr(os, name):
        delattr(os, name)
if {platform!r} == "win32":
    sys.modules["fcntl"] = None
"""
WORK = """
def work():
    arrays = {"w": np.arange(12, dtype="f4").reshape(3, 4), "b": np.ones(2)}
    for name in ("new.zt", "new.safetensors", "new.npz"):
        xckpt.save(arrays, name, overwrite=True)
        xckpt.save(arrays, name, overwrite=True)
        with xckpt.open(name) as ds:
            assert ds["w"][1, 2].values == 6
            assert ds.compute()["w"].values.tobytes() == arrays["w"].tobytes()
        means = xckpt.stats(name).ckpt.table()["mean"]
        assert means["w"] == 5.5
    xckpt.append({"c": np.zeros(3)}, "new.zt")
    assert sorted(xckpt.read_index("new.zt").tensors) == ["b", "c", "w"]
    xckpt.convert("new.zt", "converted.npz", overwrite=True)
    assert xckpt.verify("converted.npz").ok
    if sys.platform != "win32":  # which refuses to remove open files; this cannot be simulated
        xckpt.save(arrays, "shards.safetensors", max_shard_size=30, overwrite=True)
    with xckpt.open("shards.safetensors.index.json") as ds:
        assert ds["w"][2, 3].values == 11
    with xckpt.open("m.zt", mmap=True) as ds:
        assert ds["w"].values.sum() == 6
    assert not [name for name in os.listdir() if "xckpt" in name]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    xckpt.save({"w": np.ones((2, 3), "f4")}, tmp_path / "files/m.zt")
    return tmp_path / "files"


@pytest.mark.parametrize(
    ("platform", "names"), [("win32", WINDOWS), ("darwin", MACOS)], ids=["windows", "macos"]
)
class TestSimulated:
    def test_every_module_imports(
        self, platform: str, names: tuple[str, ...], folder: Path, fresh: FreshProcesses
    ) -> None:
        code = """
import pkgutil
from importlib import import_module
import xckpt
for module in pkgutil.walk_packages(xckpt.__path__, "xckpt."):
    if not module.name.endswith("__main__"):
        import_module(module.name)
"""
        # numpy and others decide by the platform, so that sys.platform stays.
        before = REMOVED.format(names=names, platform=platform).replace("'fork', ", "")
        assert fresh.run({"import": before + code}, folder) == {}

    def test_files_are_written_and_read(
        self, platform: str, names: tuple[str, ...], folder: Path, fresh: FreshProcesses
    ) -> None:
        """Once before, which loads all modules, and once without the functions."""
        before = f"import os, sys\nimport numpy as np\nimport xckpt\n{WORK}\nwork()\n"
        after = REMOVED.format(names=names, platform=platform)
        after += f"sys.platform = {platform!r}\nwork()\n"
        assert fresh.run({"work": before + after}, folder) == {}
