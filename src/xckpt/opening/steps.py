"""The checkpoints of a training run as a single Dataset with a dimension for the steps."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import index as as_integer
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from xckpt import formats
from xckpt.datasets.listing import Listing, free_name, list_arrays, stacking_key
from xckpt.datasets.making import finish_dataset, make_dataset
from xckpt.datasets.options import OpenOptions
from xckpt.datasets.stack_records import mark_run, marks_of
from xckpt.errors import CheckpointError, FileChangedError, shown, some, warn
from xckpt.formatting import base_name
from xckpt.index import Tensor, paused_collector
from xckpt.labels import AxisNamer, TensorFilter, select
from xckpt.labels.filters import no_match
from xckpt.labels.grids import stack_attrs
from xckpt.opening import open_with
from xckpt.opening.checkpoint import CheckpointFiles
from xckpt.opening.detection import format_of
from xckpt.opening.files import are_ranks, files_of
from xckpt.opening.hints import advising
from xckpt.opening.merging import OpenFile, labelled_attrs, merge
from xckpt.opening.names import is_index, is_unfinished, step_in
from xckpt.opening.runs import Run, run_in
from xckpt.options import StepKeywords, takes
from xckpt.registration import register_formatter
from xckpt.storage import Location
from xckpt.structure import structure_of
from xckpt.structure.dims import dims_of
from xckpt.structure.numbering import is_index as is_number

if TYPE_CHECKING:
    import xarray as xr

    from xckpt.typing import Dataset

# Files whose headers are read in parallel.
_CONCURRENCY = 16
# Names in a message.
_MOST_NAMES = 5
# An index in a name has at most 18 digits.
_LARGEST_STEP = 10**18
_SUFFIXES = re.compile(r"(\.[A-Za-z][^./]*)+$")
_LAST_NUMBER = re.compile(r"([0-9]+)[^0-9]*$")


@takes(StepKeywords, declared=OpenOptions, is_open=True)
def open_steps(
    paths: Any,
    engine: str | None = None,
    *,
    tensors: TensorFilter | None = None,
    step: Sequence[int] | None = None,
    dim: str = "step",
    join: Literal["exact", "inner"] = "exact",
    **options: Unpack[StepKeywords],
) -> Dataset:
    """Open the checkpoints of a training run as one lazy Dataset.

    The result equals ``xarray.open_mfdataset(paths, combine="nested", concat_dim=dim)``, but no
    Dataset is made for each file: their indexes are merged, and tensors with one name are stacked.
    With ``stack=True``, layers are dimensions after `dim`.

    Parameters
    ----------
    paths : str, os.PathLike, or list of these
        A glob such as ``"run/step-*.zt"``, the folder of a run, or a list of files, folders or
        indexes of shards.
    engine : str, optional
        Name of the engine; detected from the content of the first file by default.
    step : sequence of int, optional
        The step of each file, in the order of `paths` (natural order for a glob). By default the
        number in which the paths differ.
    dim : str, default "step"
        Name of the new dimension.
    join : {"exact", "inner"}, default "exact"
        How to treat tensors that some steps lack, or have with another shape or type: raise an
        error, or leave them out with a warning.
    **options
        Options of a single format.

    Returns
    -------
    xarray.Dataset
        Steps ascend. Attributes that differ between files become coordinates along `dim` if they
        are numbers or short texts.

    Raises
    ------
    FileNotFoundError
        If a file does not exist.
    ValueError
        If the paths have no distinct numbers, or tensors differ and `join` is ``"exact"``.
    FormatError
        If a file is malformed.

    Examples
    --------
    >>> ds = xckpt.open_steps("run/step-*.zt")
    >>> ds["lm_head"].sel(step=1000)
    """
    if not dim or "." in dim or is_number(dim):
        raise ValueError(f"dim={dim!r}: the name of a dimension is a text without dots")
    if join not in {"exact", "inner"}:
        raise ValueError(f"join={join!r}: expected 'exact' or 'inner'")
    location = Location.of(paths, options.get("storage_options"))
    with advising(location):
        run = _run_at(location, step)
    first = run.steps[min(run.steps)]
    engine = engine or format_of(first)
    format_options = tuple(formats.get(engine).open_options)
    selected = {"tensors": tensors, **options}
    parsed = OpenOptions.parse(selected, engine=engine, own=format_options)
    open_step = partial(_open_step, engine=engine, options=parsed)
    places = [run.steps[number] for number in sorted(run.steps)]
    with ThreadPoolExecutor(min(len(places), _CONCURRENCY)) as threads:
        results = list(threads.map(open_step, places))
    opened = [result for result in results if isinstance(result, OpenFile)]
    failures = [result for result in results if isinstance(result, Exception)]
    if failures and (location.kind == "list" or not opened):
        raise failures[0]
    _warn(location, opened, failures, run)
    labels = {file.label for file in opened}
    paths = {step: run.steps[step].text for step in sorted(run.steps)}
    paths = {step: path for step, path in paths.items() if path in labels}
    files = CheckpointFiles(
        location.pinned().text,
        (),
        "list",
        competing=tuple(run.aside),
        unfinished=tuple(run.unfinished),
    )
    with paused_collector():
        return cast("Dataset", _combined(files, opened, paths, join, parsed, dim=dim))


def _open_step(place: Location, engine: str, options: OpenOptions) -> OpenFile | Exception:
    """Open the checkpoint of a step, or return the error."""
    try:
        source, index = open_with(options, place, engine, silent=True)
    except FileChangedError:
        raise
    except (OSError, CheckpointError) as error:
        return error
    return OpenFile(place.text, source, index)


def has_steps(location: Location) -> bool:
    """Return whether `open_steps` finds several steps in a folder or by a glob."""
    try:
        return len(_run_at(location, None).steps) > 1
    except (OSError, ValueError):
        return False


def _run_at(location: Location, numbers: Sequence[int] | None) -> Run:
    """Return the steps at a location: those in a folder, or each entry of a list or a glob."""
    listing = location.listing()
    run = None if listing is None else run_in(listing)
    if run is not None and run.others:
        globs = " or ".join([shown(f"{location.text}/{glob}") for glob in run.others])
        raise ValueError(f"{location.text} has several series of steps; open one: {globs}")
    if run is not None:
        places = list(run.steps.values())
        steps = _steps([place.text for place in places], numbers or list(run.steps))
        return run._replace(steps=dict(zip(steps, places, strict=True)))
    places = [location]
    if location.kind == "glob":
        places = location.expanded()
    elif location.kind == "list":
        places = list(location.path)
    elif listing is not None or is_index(location.file_name):
        files_of(location)  # its error describes the folder
        raise ValueError(f"{location.text} is one checkpoint; give a glob, or a list of several")
    finished = [place for place in places if not is_unfinished(place.file_name)]
    unfinished = [place.file_name for place in places if place not in finished]
    if location.kind == "list" or not finished:
        finished, unfinished = places, []
    if are_ranks([place.file_name for place in finished]):
        warn(f"{location.text}: the files look like ranks of one model; xckpt.open opens them so")
    steps = _steps([place.text for place in finished], numbers)
    return Run(dict(zip(steps, finished, strict=True)), unfinished, [], [])


def _warn(
    location: Location,
    opened: Sequence[OpenFile],
    failures: Sequence[Exception],
    run: Run,
) -> None:
    """Warn about steps that are left out, and pass on the warnings of the others."""
    warnings: dict[str, list[str]] = defaultdict(list)
    for file in opened:
        for text in file.index.warnings:
            warnings[text].append(base_name(file.label))
    for text, steps in warnings.items():
        warn(f"{location.text}: {some(steps, 'steps')}: {text}")
    if run.unfinished:
        text = some(run.unfinished)
        warn(f"{location.text}: left out, because their writers did not end: {text}")
    # Such as a second save of a step, or the last one without a number.
    first = base_name(next(iter(run.steps.values())).text)
    stem = re.split("[0-9]", first)[0].rstrip("-_.=")
    similar = [name for name in run.aside if stem and name.startswith(stem)]
    if similar:
        warn(f"{location.text}: left out, because their names have no step: {some(similar)}")
    for failure in failures:
        warn(f"{location.text}: a step is left out: {failure}")


def _steps(paths: list[str], numbers: Sequence[int] | None) -> list[int]:
    """Return the step of each file, from the argument or from the paths."""
    if numbers is not None:
        steps = [as_integer(number) for number in numbers]
        if len(steps) != len(paths):
            raise ValueError(f"step= has {len(steps)} numbers for {len(paths)} files")
    else:
        steps = _numbers_in(paths)
    if len(set(steps)) < len(steps) or any(not 0 <= number < _LARGEST_STEP for number in steps):
        origin = "step=" if numbers is not None else "the file names: pass step=[...]"
        raise ValueError(
            f"steps must be different numbers from 0 on, not {steps[:8]} from {origin}"
        )
    return steps


def _numbers_in(paths: list[str]) -> list[int]:
    """Return the last number in each path that differs between all paths."""
    split = [re.split(r"([0-9]+)", path) for path in paths]
    if len({len(parts) for parts in split}) == 1:
        for column in range(len(split[0]) - 2, 0, -2):
            values = [int(parts[column]) for parts in split]
            if len(set(values)) == len(values) > 1:
                return values
    worded = [step_in(path) for path in paths]
    if None not in worded:
        return [number for number in worded if number is not None]
    # A single file, or names of different structure: use the last number before the suffix.
    names = [re.split(r"[/\\]", path.partition("?")[0])[-1] for path in paths]
    matches = [_LAST_NUMBER.search(_SUFFIXES.sub("", name)) for name in names]
    for path, match in zip(paths, matches, strict=True):
        if match is None:
            raise ValueError(f"the name of {path} has no step; pass step=[...]")
    return [int(match[1]) for match in matches if match is not None]


def _combined(
    files: CheckpointFiles,
    opened: list[OpenFile],
    paths: dict[int, str],
    join: str,
    options: OpenOptions,
    *,
    dim: str,
) -> xr.Dataset:
    """Return the Dataset of all steps, by their paths, along a new dimension."""
    steps = list(paths)
    drop = options.dropped
    names = [select(file.index.tensors, options.filter(file.index)) for file in opened]
    chosen = [
        {name: file.index.tensors[name] for name in file_names if name not in drop}
        for file, file_names in zip(opened, names, strict=True)
    ]
    if options.tensors is not None and not any(names):
        raise ValueError(no_match(set().union(*(o.index.tensors for o in opened)), options.tensors))
    common = _common(chosen, [file.label for file in opened], join, options)
    attrs = stack_attrs([_with_metrics(labelled_attrs(file)) for file in opened])
    # A single step gets no module, because a single tensor is never stacked.
    prefixes = [f"{dim}.{step}." for step in steps] if len(steps) > 1 else [""]
    renamed = []
    for file, tensors, prefix in zip(opened, chosen, prefixes, strict=True):
        # Move tensors into the module of the step: ``step.100.embed``.
        axes = {} if options.dims == "size" else dims_of(file.index)
        moved = {
            prefix + name: replace(
                tensor.named(prefix + name), path=None, dims=tensor.dims or axes.get(name)
            )
            for name, tensor in tensors.items()
            if name in common
        }
        step_index = replace(file.index, tensors=moved, attrs={}, warnings=())
        renamed.append(replace(file, index=step_index))
    source, index = merge(replace(files, attrs=attrs.shared), renamed)
    options = replace(options, tensors=None, drop_variables=None)
    if len(steps) > 1:
        file_index = replace(
            opened[0].index, tensors={n: t for n, t in chosen[0].items() if n in common}
        )
        listing = list_arrays(opened[0].source, file_index, options)
        if options.stack is True:  # the layers of the model, without the steps
            structure = structure_of(opened[0].index)
            options = replace(options, stack=structure.repeated_modules(file_index.tensors))
        options = _stacking(options, dim, listing)
    ds = make_dataset(source, index, options)
    ds = _plain_names(ds, dim) if len(steps) > 1 else ds.expand_dims({dim: steps})
    # The encoding distinguishes steps from layers.
    ds.variables[dim].encoding["steps"] = paths
    for name, values in attrs.varying.items():
        ds = ds.assign_coords({free_name(name, ds.variables): (dim, values)})
    if attrs.dropped:
        lost = ", ".join(map(shown, attrs.dropped))
        text = f"{index.source}: attributes that differ between steps are left out: {lost}"
        warn(text)
    register_formatter()
    return finish_dataset(ds, source, index)


def _with_metrics(attrs: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a step with its ``metrics``, a mapping in Orbax, as attributes."""
    metrics = attrs.get("metrics")
    if not isinstance(metrics, Mapping):
        return attrs
    remaining = {name: value for name, value in attrs.items() if name != "metrics"}
    return {**{str(name): value for name, value in metrics.items()}, **remaining}


def _common(
    chosen: list[dict[str, Tensor]], labels: list[str], join: str, options: OpenOptions
) -> set[str]:
    """Return the names of tensors that all steps have with the same shape and type."""
    names = AxisNamer(options.dims)
    problems: dict[str, str] = {}
    first = {name: stacking_key(tensor, names, options) for name, tensor in chosen[0].items()}
    for tensors, label in zip(chosen[1:], labels[1:], strict=True):
        for name, kind in first.items():
            if name not in tensors:
                problems.setdefault(name, f"is not in {label}")
            elif stacking_key(tensors[name], names, options) != kind:
                steps = {label: tensors[name], labels[0]: chosen[0][name]}
                problems.setdefault(name, _difference(steps))
        for name in tensors.keys() - first.keys():
            problems.setdefault(name, f"is in {label}, and not in {labels[0]}")
    if problems:
        reasons = [f"{shown(name)} {problem}" for name, problem in problems.items()]
        first_reasons = "; ".join(reasons[:_MOST_NAMES])
        more = len(reasons) - _MOST_NAMES
        text = f"steps have different tensors: {first_reasons}"
        text += f"; {more} more" if more > 0 else ""
        if problems.keys() >= first.keys():
            raise ValueError(
                f"{text}. They have no tensor in common: parts of one model open as one with "
                "xckpt.open and a list or a glob"
            )
        if join == "exact":
            raise ValueError(f"{text}. join='inner' leaves them out")
        warn(f"{text}: left out")
    return first.keys() - problems.keys()


def _difference(steps: dict[str, Tensor]) -> str:
    """Return how a tensor of the first step differs from the same one of another."""
    for label, tensor in steps.items():
        if tensor.problem is not None:
            reason, hint = tensor.problem.reason, tensor.problem.hint
            return f"cannot be read in {label} ({reason}{f'. {hint}' if hint else ''})"
    return f"has another shape, type or layout in {next(iter(steps))}"


def _stacking(options: OpenOptions, dim: str, listing: Listing) -> OpenOptions:
    """Return options for tensors in modules of steps, from the `listing` of a single file."""
    modules: Any = [options.stack] if isinstance(options.stack, str) else options.stack or ()
    stack = [dim, *modules]
    variables = [array.name for array in listing.arrays]
    tensors = [array.tensor.name for array in listing.arrays]
    dims: dict[str, Sequence[str | None]] = {}
    for glob, names in options.globs_of_dims.items():
        if select(variables, glob):
            dims[f"{dim}.{glob}"] = names
        if select(tensors, glob):
            dims[f"{dim}.*.{glob}"] = names
    return replace(options.with_dims(dims), stack=stack)


def _plain_names(ds: xr.Dataset, dim: str) -> xr.Dataset:
    """Rename variables to the names of their tensors in each file."""
    used_names = {str(name) for name in ds.dims} | {str(name) for name in ds.coords}
    plain = {name: str(name).removeprefix(f"{dim}.") for name in ds.variables}
    plain = {old: new for old, new in plain.items() if new != old and new not in used_names}
    # All coordinates of stacks share a single mapping of records by name.
    marks = marks_of(ds.variables[dim])
    for old in marks.keys() & plain.keys():
        marks[plain[old]] = marks.pop(old)
    ds = ds.rename(plain)
    mark_run(ds, marks, dim)
    return ds
