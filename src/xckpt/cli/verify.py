"""``xckpt verify``: what is wrong with files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from xckpt.cli.files import json_option, storage_options_option
from xckpt.cli.output import complain, is_terminal, one_line, print_document, print_text
from xckpt.errors import shown
from xckpt.notebook.formatting import counted, printable

if TYPE_CHECKING:
    from xckpt.writing.verifying import Finding, Report

__all__ = ["verify"]

_DAMAGED = 1
_FAILED = 2
_COLOURS = {"error": "red", "warning": "yellow"}


@click.command
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@storage_options_option
@json_option
def verify(files: tuple[str, ...], storage_options: dict[str, Any], *, as_json: bool) -> int:
    """Check every FILE: structure, extents, digests, compressed streams, sparse indices, shards.

    The exit status is 1 if one is damaged. Warnings, of what a specification lets pass or of what
    is not known here, are no damage.
    """
    reports, status = [], 0
    for file in files:
        try:
            report = _checked(file, storage_options)
        except OSError as error:
            # The others are to be checked all the same.
            complain(one_line(error))
            status = _FAILED
            continue
        reports.append(report)
        if not report.ok:
            status = max(status, _DAMAGED)
        if not as_json:
            _print(file, report)
    if as_json:
        print_document({"files": [_document(report) for report in reports]})
    return status


def _checked(file: str, storage_options: dict[str, Any]) -> Report:
    from xckpt.writing.verifying import verify as check

    return check(file, storage_options=storage_options or None, progress=is_terminal())


def _print(file: str, report: Report) -> None:
    facts = [
        "ok" if report.ok else "DAMAGED",
        f"{report.format} {report.version}".strip(),
        counted(report.tensors, "tensor"),
        counted(report.digests, "digest"),
    ]
    print_text(printable(f"{file}: {', '.join(fact for fact in facts if fact)}"))
    for finding in report.findings:
        severity = click.style(finding.severity, _COLOURS[finding.severity], bold=True)
        print_text(f"  {severity}: {printable(_text(finding))}")


def _text(finding: Finding) -> str:
    where = [] if finding.tensor is None else [f"tensor {shown(finding.tensor)}"]
    where += [] if finding.offset is None else [f"byte {finding.offset}"]
    rule = "" if finding.rule is None else f" [{finding.rule}]"
    return ": ".join([*where, finding.message]) + rule


def _document(report: Report) -> dict[str, Any]:
    return {
        "path": report.path,
        "ok": report.ok,
        "format": report.format,
        "version": report.version,
        "tensors": report.tensors,
        "digests": report.digests,
        "findings": [finding._asdict() for finding in report.findings],
    }
