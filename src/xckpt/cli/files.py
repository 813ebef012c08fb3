"""The commands for files: ``xckpt info``, ``browse``, ``footprint``, ``convert``, ``verify``."""

from __future__ import annotations

import json
import sys
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from xckpt import formats
from xckpt.cli.common import (
    DAMAGED,
    FAILED,
    FileInput,
    calls_for_action,
    complain,
    json_text,
    one_line,
    print_blocks,
    print_document,
    print_text,
    renaming,
    require_rules,
    usage_errors,
    without_nan,
)
from xckpt.cli.options import command, pairs
from xckpt.errors import CheckpointError, CheckpointWarning, shown
from xckpt.formatting import base_name, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Part, Tensor
    from xckpt.writing import Manifest
    from xckpt.writing.saving import Conversion
    from xckpt.writing.verifying import Report

# --- info ----------------------------------------------------------------------------------------


@command("json", sort="tensors by size: xckpt stats {file} --sort nbytes")
@click.argument("file")
@click.option("--all", "everything", is_flag=True, help="List all patterns of names.")
@click.option(
    "--structure", "show_structure", is_flag=True, help="List what the tensors are, and why."
)
@click.option("--attrs", "with_attrs", is_flag=True, help="Print all attributes whole.")
@click.option("--attr", "keys", multiple=True, metavar="KEY", help="Print one attribute.")
def info(
    file: str,
    reading: FileInput,
    *,
    everything: bool,
    show_structure: bool,
    with_attrs: bool,
    keys: tuple[str, ...],
    as_json: bool,
) -> int:
    """Print a summary of FILE: sizes, element types, names, shapes.

    It lists the largest patterns, with --all all of them, and with --json every tensor. With
    --structure, it lists the role of the tensors, the kind of their modules, their axes, and what
    that follows from. With --attrs it prints the attributes instead, one in a line, as JSON, and
    with --attr the value of one, texts as they are; both read long lists.
    """
    if with_attrs or keys:
        return _print_attrs(reading.attrs(file), keys, as_json=as_json)
    from xckpt.notebook.summary import index_summary
    from xckpt.notebook.text import to_text
    from xckpt.notebook.views import (
        MOST_PATTERNS,
        model_document,
        structure_blocks,
        structure_table,
        summary_blocks,
    )
    from xckpt.opening.reading import attrs_with_config
    from xckpt.structure import structure_of
    from xckpt.structure.dims import axes_of

    with warnings.catch_warnings():
        # Both kinds of output include the warnings.
        warnings.simplefilter("ignore", CheckpointWarning)
        file_index, index = reading.indexes(file)
        config = attrs_with_config(index, index.source, index.attrs, reading.storage_options)
    structure = structure_of(index, config.get("config"))
    if as_json:
        summary = index_summary(index, config, file_index)
        document = {
            "format": index.format,
            "version": index.version,
            "source": index.source,
            "nbytes": index.nbytes,
            "attrs": index.attrs,
            "model": model_document(summary),
            "footprint": summary.footprint.document(),
            "warnings": list(index.warnings),
            "executes": list(index.executes),
            "imports": list(index.imports),
            "files": None if index.checkpoint is None else index.checkpoint.document(),
            "shards": {
                name: {"size": shard.size, "digest": shard.digest}
                for name, shard in index.shards.items()
            },
            "tensors": [_tensor(t, axes_of(index).get(t.name)) for t in index.tensors.values()],
        }
        if show_structure:
            document["structure"] = structure_table(structure).T.to_dict()
        print_document(document)
        return 0
    if show_structure:
        print_blocks(structure_blocks(structure))
        return 0
    summary = index_summary(index, config, file_index)
    print_text(to_text(summary_blocks(summary, most=None if everything else MOST_PATTERNS)))
    return 0


def _print_attrs(attrs: Mapping[str, Any], keys: tuple[str, ...], *, as_json: bool) -> int:
    """Print the attributes with some keys, or all of them."""
    missing = next((key for key in keys if key not in attrs), None)
    if missing is not None:
        from xckpt.labels.filters import suggest_names

        hint = suggest_names(attrs, missing)
        raise click.UsageError(f"no attribute is called {shown(missing)}{hint}")
    selected = {key: attrs[key] for key in keys} if keys else attrs
    if as_json:
        print_document(selected)
    for key, value in {} if as_json else selected.items():
        if not keys:
            print_text(printable(f"{key}: {json_text(value)}"))
        elif isinstance(value, str):
            print_text("\n".join(map(printable, value.split("\n"))))
        else:
            print_text(json_text(value))
    return 0


def _tensor(tensor: Tensor, by_facts: tuple[str | None, ...] | None) -> dict[str, Any]:
    dims = tensor.dims or by_facts
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "layout": tensor.layout,
        "order": tensor.order,
        "nbytes": tensor.nbytes,
        "offset": min([p.offset for p in tensor.parts.values() if p.shard is None], default=None),
        "parts": {role: _part(part) for role, part in tensor.parts.items()},
        **_unusual(
            dims=None if dims is None else list(dims),
            problem=None if tensor.problem is None else tensor.problem.reason,
            attrs=tensor.attrs or None,
        ),
    }


def _part(part: Part) -> dict[str, Any]:
    optional = ("encoding", "decoded_nbytes", "digest", "shard", "strides", "origin")
    return {
        "dtype": part.dtype,
        "shape": None if part.shape is None else list(part.shape),
        "offset": part.offset,
        "nbytes": part.nbytes,
        **_unusual(**{key: getattr(part, key) for key in optional}),
    }


def _unusual(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {key: value for key, value in values.items() if value is not None}


# --- browse --------------------------------------------------------------------------------------


@command()
@click.argument("file")
@click.argument("other", required=False)
def browse(file: str, other: str | None, reading: FileInput) -> int:
    """Browse FILE in the terminal: modules, statistics, findings.

    With OTHER, also the differences between the two files. Values are read only for what is
    selected. It needs an extra: pip install 'xckpt[browse]'.
    """
    try:
        from xckpt.cli.browser import Browser, Pages
    except ModuleNotFoundError as error:
        if error.name not in {"rich", "textual"}:
            raise
        message = "browse needs textual: pip install 'xckpt[browse]'; 'xckpt info' needs nothing"
        raise click.ClickException(message) from error

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        message = "browse needs a terminal; 'xckpt info' and 'xckpt stats' print text"
        raise click.ClickException(message)
    pages = Pages(reading.dataset(file), None if other is None else reading.dataset(other))
    Browser(pages, base_name(file)).run()
    return 0


# --- footprint -----------------------------------------------------------------------------------


@command("json")
@click.argument("file")
@click.option("--context", metavar="N", help="Number of tokens of each sequence, or 8k.")
@click.option("--batch", type=int, default=1, show_default=True, help="Number of sequences.")
@click.option(
    "--cache-dtype", metavar="TYPE", help="Element type of keys and values; that of the model."
)
@click.option("--fits", metavar="SIZE", help="Size of the memory, such as 24GiB.")
def footprint(file: str, reading: FileInput, *, as_json: bool, **options: Any) -> int:
    """Print the size of the model in FILE, and of its cache.

    With --context, it also has the cache of this number of tokens. Sizes follow from the header and
    the config. With --fits, the exit status is 1 if the weights as stored and the cache do not fit,
    and 2 if the size of the cache is unknown.
    """
    from xckpt.entry import footprint as sizes
    from xckpt.notebook.footprint import footprint_blocks

    with usage_errors():
        result = sizes(reading.dataset(file), **options)
    if as_json:
        sizes_by_name = {
            str(name): array.to_series().to_dict() if array.ndim else array.item()
            for name, array in result.items()
        }
        print_document({**result.attrs, **sizes_by_name})
    else:
        print_blocks(footprint_blocks(result) or [])
    verdict = result["fits"].item() if "fits" in result else "yes"
    return {"yes": 0, "no": DAMAGED, "unknown": FAILED}[verdict]


# --- steps ---------------------------------------------------------------------------------------


_OF_STEPS = "statistics of each step: xckpt stats {file} --by step"


@command("json", sort=_OF_STEPS, by=_OF_STEPS, columns=_OF_STEPS, limit="--json prints all steps")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--changes", is_flag=True, help="Also compare the steps, and look for findings.")
def steps(paths: tuple[str, ...], reading: FileInput, *, changes: bool, as_json: bool) -> int:
    """Print the metrics of a training run by step.

    PATH is a folder, a glob, or one of several files. Only headers are read, and
    trainer_state.json. With --changes, also print the change of each layer from step to step, of
    moments and of counters, and findings, which reads every step.
    """
    from xckpt.health import run_blocks

    with usage_errors():
        ds = reading.steps(paths)
    summary: Any = ds.ckpt.summary("step", changes=changes)
    if not as_json:
        print_blocks(run_blocks(summary, "--json prints all", "--changes"))
        return 0
    numbers = summary.columns.tolist()
    rows = [
        {
            "kind": kind,
            "name": name,
            "values": [without_nan(value) for value in values],
        }
        for (kind, name), values in zip(summary.index, summary.to_numpy().tolist(), strict=True)
    ]
    print_document({"steps": numbers, "rows": rows, "notes": summary.attrs["notes"]})
    return 0


# --- convert -------------------------------------------------------------------------------------


_SET = "did you mean --set KEY=VALUE?"


class _WritableFormat(click.Choice[str]):
    """The formats that can be written; they are imported when they are listed or chosen."""

    def __init__(self) -> None:
        self.case_sensitive = True

    @cached_property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]  # not when a command starts
        return tuple([format.name for format in formats.loaded() if format.can.types])


@command("rename skip-unreadable overwrite progress json", metadata=_SET, attrs=_SET)
@click.argument("file")
@click.argument("new")
@click.option(
    "--to", type=_WritableFormat(), help="Format of NEW; inferred from its suffix by default."
)
@click.option("--compression", metavar="NAME", help="zstd, zstd-seekable, deflate, ... or none.")
@click.option("--level", metavar="N", help="Level of the compression, 1 to 22.")
@click.option("--digest", metavar="NAME", help="crc32c, sha256, ... or none.")
@click.option("--dtype", metavar="TYPE", help="Element type of all floats: float32, bf16, ...")
@click.option(
    "--encode",
    "encodings",
    nargs=2,
    multiple=True,
    metavar="GLOB KEY=VALUE,...",
    help="Encoding of matching tensors: '*.bias' dtype=float32,compression=none. May be repeated.",
)
@click.option(
    "--cast",
    type=click.Choice(["exact", "allow", "never"]),
    default="exact",
    show_default=True,
    help="Permitted changes of element type: exact ones, also ones that lose precision (allow), or "
    "none (never).",
)
@click.option(
    "--option",
    "texts",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the new format, such as version=2. May be repeated.",
)
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    help="Write several safetensors files of at most this size, such as 5GB, and their index.",
)
@click.option(
    "--names",
    metavar="FILE",
    help="JSON file that maps old names to new ones, as written by xckpt compare --write-names.",
)
@click.option(
    "--set",
    "set_attrs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Attribute to add or to replace, of the type that it has, or a value of config.json, such "
    "as config.use_cache=false; VALUE is JSON or text. May be repeated.",
)
@click.option(
    "--unset", multiple=True, metavar="KEY", help="Attribute to leave out. May be repeated."
)
def convert(
    file: str,
    new: str,
    reading: FileInput,
    *,
    to: str | None,
    encodings: tuple[tuple[str, str], ...],
    cast: Any,
    texts: tuple[str, ...],
    max_shard_size: str | None,
    names: str | None,
    rename: tuple[tuple[str, str], ...],
    set_attrs: tuple[str, ...],
    unset: tuple[str, ...],
    skip_unreadable: bool,
    overwrite: bool,
    as_json: bool,
    **requests: str | None,
) -> int:
    """Write FILE as NEW in another format, or in the same one.

    Values, names, attributes, compression and digests are preserved if the new format supports
    them; one warning lists the losses. Changes of element type are listed with their effect on the
    size. NEW appears once it is complete. FILE may be larger than memory.
    """
    from xckpt.labels.renaming import attr_of_text
    from xckpt.writing import convert as write

    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    options = _format_options(pairs(texts) | shards, new, to)
    index = reading.index(file, silent=True)  # `write` warns
    encoding = _encoding(requests, encodings)
    new_names = renaming(rename, names, can_match=False)
    with usage_errors(output=new):
        attrs = {
            key: attr_of_text(key, text, index.attrs.get(key))
            for key, text in pairs(set_attrs).items()
        }
        done = write(
            file,
            new,
            to,
            source_engine=index.format,
            **reading.selection,
            names=new_names,
            set_attrs=attrs,
            unset_attrs=unset,
            encoding=encoding,
            cast=cast,
            skip_unreadable=skip_unreadable,
            overwrite=overwrite,
            storage_options=reading.storage_options,
            progress=reading.scanning["progress"],
            **options,
        )
    if as_json:
        print_document(_conversion_document(index.source, done, reading))
    for line in [] if as_json else repr(done).splitlines():
        complain(line)
    return 0


def _conversion_document(source: str, done: Conversion, reading: FileInput) -> dict[str, Any]:
    from xckpt.opening import read_index

    return {
        "source": source,
        "destination": done.path,
        "format": done.format,
        "version": read_index(done.path, storage_options=reading.storage_options).version,
        "nbytes": done.nbytes,
        "tensors": done.tensors,
        "recasts": [recast._asdict() for recast in done.recasts],
    }


def _encoding(
    requests: Mapping[str, str | None], encodings: tuple[tuple[str, str], ...]
) -> dict[str, dict[str, Any]]:
    """Return the encodings by glob: the options for all tensors, then the ones of --encode."""
    for_all = {key: text for key, text in requests.items() if text is not None}
    texts_by_glob = [("*", for_all)] if for_all else []
    texts_by_glob += [(glob, pairs(text.split(","))) for glob, text in encodings]
    encoding: dict[str, dict[str, Any]] = {}
    for glob, texts in texts_by_glob:
        for key, text in texts.items():
            value = _whole_number(key, text) if key == "level" else text
            encoding.setdefault(glob, {})[key] = None if value == "none" else value
    return encoding


def _format_options(texts: Mapping[str, str], new: str, engine: str | None) -> dict[str, Any]:
    """Parse values by the annotations of the format's options: whole numbers, JSON, or text."""
    from xckpt.writing.targets import writer_of

    try:
        writer = writer_of(new, engine)
    except ValueError as error:
        reason, engines, _ = str(error).partition("; pass engine=")
        hint = "; name the format with --to" if engines else ""
        raise click.UsageError(reason + hint) from error
    options: dict[str, Any] = {}
    for key, text in texts.items():
        if key not in writer.write_options:
            options_text = ", ".join(writer.write_options) or "none"
            reason = f"{writer.name} has no option {key!r} for writing, only {options_text}"
            raise click.UsageError(reason)
        kind = str(writer.write_options[key].annotation)
        if "int" in kind and "str" not in kind:
            options[key] = _whole_number(key, text)
        elif "str" in kind:
            options[key] = text
        else:
            try:
                options[key] = json.loads(text)
            except ValueError:
                message = f"{key} must be JSON, such as true, 1 or {{...}}, not {text!r}"
                raise click.UsageError(message) from None
    return options


def _whole_number(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise click.UsageError(f"{key} must be a whole number, not {text!r}") from None


# --- manifest ------------------------------------------------------------------------------------


@command("overwrite progress", check="did you mean xckpt verify {file} --manifest JSON?")
@click.argument("file")
@click.option("-o", "--output", metavar="PATH", help="The new file; standard output by default.")
def manifest(file: str, reading: FileInput, *, output: str | None, overwrite: bool) -> int:
    """Print digests of the contents of every tensor in FILE, as JSON.

    They do not depend on format, order, shards, compression or byte order: files with equal tensors
    have equal manifests. xckpt verify --manifest compares a file with a printed manifest.
    """
    from xckpt.writing import manifest as digests

    with usage_errors(file, output=output or ""):
        digest_lines = digests(
            file,
            reading.engine,
            **reading.selection,
            storage_options=reading.storage_options,
            progress=reading.scanning["progress"],
        )
        if output is not None:
            digest_lines.save(output, overwrite=overwrite)
            complain(f"wrote {output}")
            return 0
    print_text(digest_lines.to_json().rstrip("\n"))
    return 0


# --- verify --------------------------------------------------------------------------------------


@command("ignore no-cache progress json")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--findings", "with_findings", is_flag=True, help="Also check the values.")
@click.option(
    "--manifest",
    metavar="JSON",
    help="Also compare the contents of every tensor with the output of xckpt manifest.",
)
def verify(
    files: tuple[str, ...],
    reading: FileInput,
    *,
    with_findings: bool,
    ignore: tuple[str, ...],
    manifest: str | None,
    as_json: bool,
) -> int:
    """Check whether every FILE is intact.

    Structure, extents, digests, compressed streams, sparse indices and shards are checked. The exit
    status is 1 if a file is damaged, and 2 if it cannot be checked. A file without digests is
    called "structure intact" instead of "ok", since its contents cannot be checked, unless
    --manifest has digests. Warnings are not damage: they concern irregularities that the
    specification allows, or features unknown to this version.

    With --findings, the values of intact files are checked as by "xckpt stats --findings": the exit
    status is also 1 if any finding is an error or a warning.
    """
    from xckpt.writing import verify as check

    require_rules(ignore)
    reports, status = [], 0
    expected = None if manifest is None else _manifest(manifest, reading)
    for file in files:
        try:
            with usage_errors(file):
                report = check(
                    file,
                    reading.engine,
                    **reading.selection,
                    manifest=expected,
                    storage_options=reading.storage_options,
                    progress=reading.scanning["progress"],
                )
        except OSError as error:
            # Continue with the other files.
            complain(one_line(error))
            status = FAILED
            continue
        document = _report_document(report)
        reports.append(document)
        if not report.ok:
            status = max(status, FAILED if report.status == "unsupported" else DAMAGED)
        if not as_json:
            print_blocks(report._blocks(most=None))  # noqa: SLF001  our own
        if with_findings and report.ok:
            from xckpt.health import findings, findings_blocks

            frame = findings(reading.contents(file), ignore=ignore, **reading.scanning)
            document["numbers"] = frame.to_dict("records")
            status = max(status, DAMAGED * calls_for_action(frame))
            if not as_json:
                print_blocks(findings_blocks(frame))
    if as_json:
        print_document({"files": reports})
    return status


def _manifest(path: str, reading: FileInput) -> Manifest:
    from xckpt.writing import Manifest

    try:
        return Manifest.read(path, storage_options=reading.storage_options)
    except (CheckpointError, OSError) as error:  # not an error of the files to verify
        raise click.UsageError(f"--manifest: {one_line(error)}") from error


def _report_document(report: Report) -> dict[str, Any]:
    facts = ("path", "status", "ok", "format", "version", "tensors", "digests", "unchecked")
    document: dict[str, Any] = {name: getattr(report, name) for name in facts}
    return document | {"findings": [finding._asdict() for finding in report.findings]}
