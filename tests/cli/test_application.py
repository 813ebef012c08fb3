"""The command line as a whole: errors, exit statuses, streams, hostile names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.hostile_names import HOSTILE
from xckpt.cli import main
from xckpt.cli.common import complain
from xckpt.errors import IntegrityError, UnsupportedError, deprecated_name

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make opening a file raise an error."""

    def replace(error: BaseException) -> None:
        def open_index(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr("xckpt.opening.open_index", open_index)

    return replace


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.zt"
    assert main(["info", str(path)]) == 2
    assert capsys.readouterr() == ("", f"xckpt: {path}: No such file or directory\n")


def test_a_file_other_than_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evil\x1b[2J\n.txt"
    path.write_text("nothing of the kind")
    assert main(["info", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"xckpt: {tmp_path}")
    assert r"evil\x1b[2J\n.txt" in err
    assert err.count("\n") == 1


def test_an_error_names_the_place_and_the_remedy(
    fails: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(
        IntegrityError(
            "the digest disagrees",
            path="m.zt",
            offset=64,
            tensor="a\x1b[1m",
            rule="Digest",
            hint="Copy the file again",
        )
    )
    assert main(["info", "m.zt"]) == 1
    expected = (
        r"xckpt: m.zt: tensor 'a\x1b[1m': byte 64: the digest disagrees [Digest]. "
        "Copy the file again\n"
    )
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UnsupportedError("a new layout", path="m.zt"), 2, "m.zt: a new layout"),
        (PermissionError(13, "Permission denied", "m.zt"), 2, "m.zt: Permission denied"),
        (ConnectionResetError(), 2, "ConnectionResetError"),
    ],
)
def test_calls_without_a_result_have_status_2(
    error: Exception, status: int, line: str, fails: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(error)
    assert main(["info", "m.zt"]) == status
    assert capsys.readouterr() == ("", f"xckpt: {line}\n")


@pytest.mark.filterwarnings("default::FutureWarning")
def test_a_deprecated_name_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_index(*_: Any, **__: Any) -> None:
        deprecated_name("--old", "--new", since="0.2")
        raise ConnectionResetError

    monkeypatch.setattr("xckpt.opening.open_index", open_index)
    assert main(["stats", "m.zt", "--tensors", "*"]) == 2
    text = "xckpt: warning: --old is called --new since xckpt 0.2; the old name will be removed"
    assert capsys.readouterr().err.splitlines()[0] == text


def test_an_interrupt_is_quiet(fails: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fails(KeyboardInterrupt())
    assert main(["info", "m.zt"]) == 130
    assert capsys.readouterr() == ("", "\n")  # after the ^C that the terminal shows


def test_other_errors_are_not_hidden(fails: Any) -> None:
    fails(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["info", "m.zt"])


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["info"], ["info", "a", "b\x1b[2J"]])
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: xckpt")
    assert "\x1b" not in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"xckpt {xckpt.__version__}\n"


def test_help_states_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("info", "stats", "convert", "verify"):
        assert re.search(rf"^  {command} +\w.*\.$", out, re.MULTILINE)
    for status in (0, 1, 2, 130):
        assert re.search(rf"^ +{status}  +\w", out, re.MULTILINE)


def test_help_imports_nothing_heavy() -> None:
    statement = "import sys; from xckpt.cli import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run(  # noqa: S603  our own interpreter and statement
        [sys.executable, "-c", statement], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.rpartition("\n\n")[2].split()}
    assert "click" in loaded
    assert not loaded & {"numpy", "xarray", "dask", "pandas", "fsspec", "numba"}


# --- hostile names -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["info"], ["stats"], ["stats", "--findings"], ["verify"]])
def test_hostile_names_are_inert_where_output_is_piped(
    command: list[str], hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*command, str(hostile)])
    out, err = capsys.readouterr()
    assert not [c for c in out + err if not c.isprintable() and c != "\n"]
    if command != ["verify"]:
        assert r"\x1b[31mred\x1b[2J" in out
        assert "[bold red]w[/]" in out


def test_hostile_names_are_inert_in_a_terminal(hostile: Path, terminal: Any) -> None:
    for command in (["info"], ["stats"], ["stats", "--findings"]):
        out, _ = terminal(*command, str(hostile))
        assert "[bold red]w[/]" in out
        assert "<img src=x onerror=alert(1)>" in out
        assert r"line\nbreak\r\x07" in out
        assert ":smile: %s" in out
        assert "\x1b[31mred" not in out
        assert not set(out) & {"\u202e", "\x07"}


def test_json_has_hostile_names_as_they_are(
    hostile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("info", "stats"):
        assert main([command, str(hostile), "--json"]) == 0
        out = capsys.readouterr().out
        assert out.isascii()
        assert out.count("\n") == 1
        assert {tensor["name"] for tensor in json.loads(out)["tensors"]} == set(HOSTILE)


# --- as a process --------------------------------------------------------------------------------


def run(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-W", "error", "-m", "xckpt", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        **more,
    )


def test_the_package_runs_as_a_module(checkpoint: Path) -> None:
    with run("info", str(checkpoint)) as process:
        out, err = process.communicate()
    assert out.startswith("<Checkpoint m.zt>")
    assert (err, process.returncode) == ("", 0)


def test_a_closed_pipe_is_not_an_error(checkpoint: Path) -> None:
    with run("info", str(checkpoint), "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141  # 1 would be findings


def test_a_terminal_without_the_characters_gets_escapes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with run("info", str(checkpoint)) as process:
        out, err = process.communicate()
    assert r" \xb7 " in out
    assert (err, process.returncode) == ("", 0)


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    statement = (
        "import os, signal, sys, time, xckpt.opening\n"
        "from xckpt.cli import main\n"
        "def open_index(*_, **__):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "xckpt.opening.open_index = open_index\n"
        "sys.exit(main(['info', 'm.zt']))\n"
    )
    done = subprocess.run(  # noqa: S603  our own interpreter and statement
        [sys.executable, "-c", statement], capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


def test_advice_uses_options_of_the_command_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def errors_of(*arguments: str) -> str:
        assert main([str(argument) for argument in arguments])
        return capsys.readouterr().err

    new = str(tmp_path / "new.zt")
    convert = ("convert", str(checkpoint), new, "--tensors", "*norm.weight", "--dtype")
    assert "--cast allow" in errors_of(*convert, "float16")
    assert "--option version=2" in errors_of(*convert, "float8_e4m3fn", "--cast", "allow")
    assert "--engine ztensor" in errors_of("info", str(checkpoint), "--engine", "safetensors")
    assert "has no step; rename it, as checkpoint-500" in errors_of("steps", str(checkpoint))
    unreachable = errors_of("info", "http://127.0.0.1:1/m.zt", "--storage-option", "retries=0")
    assert "repeat more often: --storage-option retries=..." in unreachable


def test_an_argument_too_many_is_answered_with_what_is_meant(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(checkpoint)
    assert main(["stats", file, "norm"]) == 2
    assert "'norm' is one argument too many; to select tensors: --tensors '*norm*'" in (
        capsys.readouterr().err
    )
    assert main(["compare", file, file, file]) == 2
    assert "one argument too many; compare takes A B and options" in capsys.readouterr().err


def test_messages_state_several_storage_options(capsys: pytest.CaptureFixture[str]) -> None:
    complain("pass storage_options={'anon': True}, or storage_options={'timeout': 4.0, 'k': 'v'}")
    assert capsys.readouterr().err == (
        "xckpt: pass --storage-option anon=true, or --storage-option timeout=4.0 --storage-option "
        "k=v\n"
    )


_FORMAT_ONLY = {"dask.array", "numba", "pandas", "scipy", "xarray"}


def test_the_list_of_commands_has_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2].partition("Exit status")[0]
    assert all(line.endswith(".") for line in listed.split("\n") if line.strip())
    assert "..." not in listed


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["info", "m.npz"], _FORMAT_ONLY),
        (["manifest", "m.npz"], _FORMAT_ONLY),
        (["verify", "m.npz"], _FORMAT_ONLY),
        (["convert", "m.npz", "new.safetensors"], _FORMAT_ONLY),
        (["stats", "m.npz"], {"dask.array", "distributed", "xckpt.health"}),
        (["compare", "m.npz", "m.npz"], {"dask.array", "distributed", "xckpt.health"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_load_only_what_they_need(
    arguments: list[str], unneeded: set[str], tmp_path: Path
) -> None:
    xckpt.save({"w": np.ones((4, 3), "f4")}, tmp_path / "m.npz")
    code = f"import sys; from xckpt.cli import main; s = main({arguments}); print(s, *sys.modules)"
    done = subprocess.run(  # noqa: S603  our own code
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    status, *modules = done.stdout.splitlines()[-1].split()
    assert status == "0"
    assert unneeded.isdisjoint(modules)
