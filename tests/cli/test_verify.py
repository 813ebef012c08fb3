"""``xckpt verify``: several files, one status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import xckpt
from xckpt.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    data = bytearray(checkpoint.read_bytes())
    data[64] ^= 1
    path = tmp_path / "damaged.zt"
    path.write_bytes(data)
    return path


def test_a_sound_file(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(checkpoint)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{checkpoint}: ok, ztensor 1.0, ")
    assert err == ""


def test_a_file_without_digests(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.safetensors"
    xckpt.convert(checkpoint, path, tensors="*norm*")
    assert main(["verify", str(path)]) == 0
    expected = "structure intact; contents have no digests, so they were not checked, safetensors, "
    assert capsys.readouterr().out.startswith(f"{path}: {expected}")
    assert main(["verify", str(path), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["files"]
    assert (report["status"], report["ok"]) == ("unchecked", True)
    assert report["unchecked"] == report["tensors"] > 0


def test_a_damaged_file_among_others(
    checkpoint: Path, damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(damaged), str(checkpoint)]) == 1
    out, _ = capsys.readouterr()
    first, finding, second = out.splitlines()
    assert first.startswith(f"{damaged}: DAMAGED")
    assert finding.startswith("  error: tensor 'model.embed_tokens.weight': byte 64: ")
    assert second.startswith(f"{checkpoint}: ok")


def test_a_missing_file_does_not_keep_others_from_being_checked(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.zt"
    assert main(["verify", str(missing), str(damaged)]) == 2
    out, err = capsys.readouterr()
    assert "DAMAGED" in out
    assert err == f"xckpt: {missing}: No such file or directory\n"


def test_the_json_document_of_verify(
    checkpoint: Path, damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(checkpoint), str(damaged), "--json"]) == 1
    sound, broken = json.loads(capsys.readouterr().out)["files"]
    assert (sound["ok"], sound["findings"], sound["path"]) == (True, [], str(checkpoint))
    assert (broken["ok"], broken["path"]) == (False, str(damaged))
    (finding,) = broken["findings"]
    assert finding["tensor"] == "model.embed_tokens.weight"
    assert (finding["offset"], finding["rule"]) == (64, "Digest")


def test_a_file_other_than_a_checkpoint_is_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cut\x1b[2J.zt"
    path.write_bytes(b"ZTEN1000")
    assert main(["verify", str(path)]) == 1
    out, _ = capsys.readouterr()
    assert r"cut\x1b[2J.zt: DAMAGED" in out


def test_selected_tensors_are_verified(
    checkpoint: Path, damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--tensors", "*norm*", "--engine", "ztensor"]
    assert main(["verify", str(damaged), *chosen, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["files"]
    assert 0 < report["tensors"] < 20
    assert main(["verify", str(checkpoint), "--engine", "npz"]) == 1
    assert "DAMAGED" in capsys.readouterr().out
    assert main(["verify", str(checkpoint), "--tensors", "*.wieght"]) == 2
    assert "did you mean '*.weight'?" in capsys.readouterr().err


def test_findings_are_reported_on_request(
    checkpoint: Path, damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(checkpoint)]) == 0
    assert main(["verify", "--findings", str(checkpoint), "--ignore", "*:*.delta"]) == 1
    ok, *findings = capsys.readouterr().out.splitlines()[1:]
    assert ": ok, " in ok
    assert findings[0].endswith(": 7 of 704 elements are NaN [nan]")
    assert not any("delta" in line for line in findings)
    assert main(["verify", "--findings", "--ignore=*", str(checkpoint), "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["files"]
    assert (document["ok"], document["numbers"]) == (True, [])
    # Findings of damaged tensors mean nothing.
    assert main(["verify", "--findings", str(damaged), "--json"]) == 1
    (document,) = json.loads(capsys.readouterr().out)["files"]
    assert "numbers" not in document
    assert main(["verify", "--findings", "--ignore=no_rule", str(checkpoint)]) == 2


def test_files_are_verified_against_a_manifest(
    checkpoint: Path, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifest", str(checkpoint)]) == 0
    printed, _ = capsys.readouterr()
    manifest = tmp_path / "m.json"
    manifest.write_text(printed)
    assert len(json.loads(printed)["tensors"]) > 20
    assert main(["manifest", str(checkpoint), "--tensors", "*norm*"]) == 0
    assert 0 < len(json.loads(capsys.readouterr().out)["tensors"]) < 20
    assert main(["verify", str(checkpoint), "--manifest", str(manifest)]) == 0
    capsys.readouterr()
    copy = tmp_path / "m.safetensors"
    assert main(["convert", str(checkpoint), str(copy)]) == 0
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    capsys.readouterr()
    assert main(["verify", str(copy), "--manifest", str(manifest)]) == 1
    assert "its elements differ from the manifest [ManifestElements]" in capsys.readouterr().out
    assert main(["verify", str(copy), "--manifest", str(damaged)]) == 2
    assert "--manifest: " in capsys.readouterr().err
    assert main(["manifest", str(damaged)]) == 1
    assert main(["manifest", str(copy), "--tensors", "absent"]) == 2
