"""Documents of `--json` follow their schemas, and the page about them is made of the schemas.

After a deliberate change: ``python -m tests.cli.test_json > docs/json.md``
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import xckpt
from tests.cached_models import decoder
from tests.conftest import golden_files
from tests.formats import torch_files
from xckpt.cli import commands, main
from xckpt.sample import write_checkpoint

DOCS = Path(__file__).parents[2] / "docs"
SCHEMAS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((DOCS / "extra/schemas").glob("*.json"))
}
INTRODUCTION = """\
# JSON of every command

`xckpt COMMAND --json` prints one document on standard output, in ASCII; messages go to standard
error, and the [exit status](how-to/command-line.md#exit-statuses) is the same as without it. Names
from files are unchanged. Numbers that JSON lacks are the texts `"inf"` and `"-inf"`, NaN is null.

Documents are stable: a release adds keys, and a key changes its meaning or vanishes only with a
deprecation of one release. Each has a JSON Schema, which tests check for every command:

```sh
xckpt info m.zt --json | jq -r '.tensors[] | select(.dtype == "bfloat16") | .name'
xckpt stats m.zt --json | jq '.findings'
xckpt compare a.zt b.zt --json | jq '.tensors | map(select(.status != "same")) | length'
xckpt verify *.zt --json | jq -r '.files[] | select(.ok | not) | .path'
```

[llms.txt](extra/llms.txt) describes xckpt to agents, on one page. In Python, functions return the
same as tables: `xckpt.stats("m.zt").ckpt.table()`.
"""


def page() -> str:
    """Return the page about the documents."""
    sections = [INTRODUCTION]
    for name, schema in SCHEMAS.items():
        rows = "".join(_row(key, value, schema) for key, value in schema["properties"].items())
        inner = "".join(_inner(key, value) for key, value in schema.get("$defs", {}).items())
        head = f"## {name}\n\n`{schema['title']}` ([schema](extra/schemas/{name}.json))\n\n"
        sections.append(f"{head}| key | type | |\n|---|---|---|\n{rows}{inner and chr(10)}{inner}")
    return "\n".join(sections)


def _row(key: str, value: Any, schema: Any) -> str:
    optional = "" if key in schema["required"] else ", optional"
    return f"| `{key}` | {_type(value)}{optional} | {value.get('description', '')} |\n"


def _type(value: Any) -> str:
    if "$ref" in value:
        return str(value["$ref"].rpartition("/")[2])
    if "const" in value or "enum" in value:
        return "one of a few texts" if "enum" in value else "constant"
    types = value.get("type", "any value")
    text = " or ".join(types) if isinstance(types, list) else types
    items = value.get("items") or value.get("additionalProperties")
    is_listed = isinstance(items, dict) and ("$ref" in items or "type" in items)
    return f"{text} of {_type(items)}" if is_listed else str(text)


def _inner(name: str, value: Any) -> str:
    text = value.get("description", "")
    keys = value.get("properties", {})
    listed = ", ".join(
        f"`{key}`" + ("" if key in value["required"] else " (optional)") for key in keys
    )
    return f"- {name}: {'; '.join(filter(None, (listed, text)))}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    write_checkpoint(folder / "m.zt", layers=3, width=32)
    numbers = {"w": np.ones((4, 3), np.float32), "b": np.array([1, np.nan, np.inf], np.float32)}
    xckpt.save(numbers, folder / "a.safetensors")
    numbers = {"w": np.full((4, 3), 2, np.float32), "c": np.zeros(3, np.float32)}
    xckpt.save(numbers, folder / "b.safetensors")
    np.savez(folder / "c.npz", w=np.full((2, 3), 2.0), allow_pickle=False)
    (folder / "evil.pt").write_bytes(
        torch_files.archive(torch_files.called(torch_files.name("os", "system"), b"X\0\0\0\0"))
    )
    (folder / "bad.zt").write_bytes(b"ZTEN1000")
    (folder / "llama").mkdir()
    weight = {"model.layers.0.self_attn.q_proj.weight": np.eye(4, dtype=np.float32)}
    xckpt.save(weight, folder / "llama/model.safetensors")
    xckpt.save({name: 2 * w for name, w in weight.items()}, folder / "tuned.safetensors")
    config = decoder("llama", 4, 1, 1, 8)
    (folder / "llama/config.json").write_text(json.dumps(config))
    (folder / "run").mkdir()
    for step in (1, 2):
        step_file = folder / f"run/step-{step}.safetensors"
        xckpt.save({"w": np.full((4, 3), step, np.float32)}, step_file)
    return folder


CALLS = [
    "info m.zt",
    "info m.zt --structure",
    "info a.safetensors --tensors w",
    "info evil.pt",
    "info run/step-1.safetensors",
    "steps run",
    "steps run --changes",
    "stats m.zt",
    "stats a.safetensors --no-cache",
    "stats a.safetensors --findings",
    "stats a.safetensors --quantile 0.5",
    "stats m.zt --by layer,role",
    "stats m.zt --by layer --findings",
    "spectrum m.zt --limit 3",
    "spectrum m.zt --by layer",
    "compare a.safetensors b.safetensors",
    "compare a.safetensors a.safetensors --all",
    "compare a.safetensors b.safetensors --explain",
    "compare a.safetensors b.safetensors --fail-above rel_l2=1",
    "compare a.safetensors b.safetensors --by dtype",
    "compare a.safetensors c.npz",
    "compare m.zt m.zt --by layer --all",
    "compare m.zt m.zt --dim -1 --tensors *.0.mlp.up*",
    "compare m.zt m.zt --codes",
    "convert a.safetensors new.npz --overwrite",
    "convert a.safetensors new.npz --dtype float64 --overwrite",
    "verify m.zt a.safetensors bad.zt evil.pt",
    "verify m.zt a.safetensors --findings",
    "manifest m.zt",
    "footprint m.zt --fits 1GiB",
    "footprint m.zt --context 9",
    "footprint llama --context 9 --fits 1KiB",
    "extract llama tuned.safetensors new --rank 2 --overwrite",
]


def printed(command: str) -> Any:
    """Return the document that a command prints."""
    arguments = command.split()
    with redirect_stdout(StringIO()) as out:
        main([*arguments, *(["--json"] if arguments[0] != "manifest" else [])])
    return json.loads(out.getvalue())


@pytest.mark.parametrize("command", CALLS)
def test_documents_follow_their_schemas(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    schema = SCHEMAS[command.partition(" ")[0]]
    validator = jsonschema.Draft202012Validator(schema)
    errors = [
        f"{error.json_path}: {error.message[:200]}"
        for error in validator.iter_errors(printed(command))
    ]
    assert errors == []


@pytest.mark.parametrize("path", golden_files("**/*.*")[::25], ids=lambda path: path.name)
def test_info_and_verify_of_golden_files(path: Path) -> None:
    for command in ("info", "verify"):
        with redirect_stdout(StringIO()) as out:
            status = main([command, "--json", str(path)])
        if status < 2 and out.getvalue():
            jsonschema.validate(json.loads(out.getvalue()), SCHEMAS[command])


def test_every_command_with_json_has_a_schema() -> None:
    with_json = {
        name
        for name, command in commands.commands.items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert with_json | {"manifest"} == SCHEMAS.keys()
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_key_occurs(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema states no key that no command prints."""
    monkeypatch.chdir(folder)
    keys: set[str] = set()
    for command in CALLS:
        if command.partition(" ")[0] == name:
            keys |= printed(command).keys()
    assert SCHEMAS[name]["properties"].keys() - keys <= {"missing", "unknown"}


def test_the_page_is_made_of_the_schemas() -> None:
    assert (DOCS / "json.md").read_text(encoding="utf-8") == page()


def test_the_links_of_llms_txt_lead_somewhere() -> None:
    text = (DOCS / "extra/llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"\]\(https://xckpt\.readthedocs\.io/en/stable/([^)#]+)", text)
    assert len(links) > 10
    for link in links:
        page_name = DOCS / f"{link.removesuffix('.html')}.md"
        assert page_name.exists() if link.endswith(".html") else (DOCS / "extra" / link).exists()
    for name in SCHEMAS:
        assert f"`xckpt {name}" in text


if __name__ == "__main__":
    sys.stdout.write(page())
