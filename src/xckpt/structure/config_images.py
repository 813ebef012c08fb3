"""Channels and size of the images that a model of timm reads, as its config states them.

timm builds a model for ``in_chans`` and ``img_size`` of ``model_args``, or else for ``input_size``
of ``pretrained_cfg``, whose ``first_conv`` names the convolutions that read the images.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from xckpt.structure.config_check import ConfigFit
    from xckpt.structure.info import Described

    Shape = tuple[int, ...]
    Place = tuple[str, str]  # section, which is empty for the config itself, and key

_OF_MODEL, _OF_WEIGHTS = "model_args", "pretrained_cfg"
#: Key of the size of images.
IMAGE_SIZE = f"{_OF_MODEL}.img_size"
_INPUTS: list[Place] = [(_OF_WEIGHTS, "input_size"), ("", "input_size")]
_CHANNELS: list[Place] = [(_OF_MODEL, "in_chans"), ("", "in_chans"), *_INPUTS]
_SIZES: list[Place] = [(_OF_MODEL, "img_size"), *_INPUTS]
_OTHER_INPUTS: list[Place] = [(_OF_WEIGHTS, "test_input_size"), (_OF_WEIGHTS, "min_input_size")]
#: Keys of transformers, of a model and of the processing of its images.
_OF_IMAGES, _PROCESSOR = "image_size", "image_processor"
_PROCESSED = frozenset({"size", "crop_size"})
_OF_CHANNELS, _CHANNEL_VALUES = "num_channels", ("image_mean", "image_std")
_POSITIONS = re.compile(r"(?:.*[./])?pos\w*_embed\w*(?:\.weight)?")
# Rows of tables of positions beside patches, for classes, distillation and registers.
_MOST_EXTRA = 6
_LARGEST_PATCH = 64
# Pixels that a convolution may read at once, as of TResNet.
_BLOCK = 16


def fit_images(
    fit: ConfigFit,
    config: Mapping[str, Any],
    edited: dict[str, Any] | None,
    old: Mapping[str, Shape],
    new: Mapping[str, Shape],
) -> set[tuple[str, int]]:
    """Correct the channels of images, and check their size; return the axes of tensors that fit.

    The channels follow from the first convolution. The size is the one that the user states, which
    tables of positions have to agree with. Corrections are made in the edited config, too.
    """
    convolutions = [
        name
        for name in _first_convolutions(config)
        if len(old.get(name, ())) == len(new.get(name, ())) > 2
    ]
    if not convolutions:
        return set()
    configs = [fit.config, fit.config if edited is None else edited]
    axes = _fit_channels(
        fit, config, configs, {name: (old[name], new[name]) for name in convolutions}
    )
    pairs = {n: (old[n], new[n]) for n in old if len(old[n]) == len(new.get(n, ()))}
    kernels = {old[name][-1] for name in convolutions}
    return axes | _fit_sizes(fit, config, configs, pairs, kernels)


def positions_follow_images(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor is a table of positions in images, whose size the config states."""
    is_table = bool(_first_convolutions(config)) and _POSITIONS.fullmatch(name) is not None
    return is_table and any(_size(_value(config, place)) for place in _SIZES)


def check_channels(fit: ConfigFit, tensors: Sequence[Described]) -> None:
    """Compare the channels in a config with the first convolutions, whose old ones are unknown."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    for name in _first_convolutions(fit.config):
        shape = shapes.get(name, ())
        place = next((p for p in _CHANNELS if _channels(_value(fit.config, p))), None)
        if place is not None and len(shape) > 2:
            channels = _channels(_value(fit.config, place))
            if shape[1] not in {channels, _BLOCK * channels}:
                fit.problems.append(_contradiction(place, channels, shape[1]))


def _first_convolutions(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the weights that read images."""
    stated = _value(config, (_OF_WEIGHTS, "first_conv")) or config.get("first_conv")
    modules = stated if isinstance(stated, list) else [stated]
    return [f"{module}.weight" for module in modules if isinstance(module, str)]


def _value(config: Mapping[str, Any], place: Place) -> Any:
    """Return the value of a key in a section; None if it is not stated."""
    section, key = place
    values = config.get(section) if section else config
    return values.get(key) if isinstance(values, dict) else None


def _channels(value: Any) -> int:
    """Return the channels in a value of a config; 0 if it states none."""
    number = value[0] if isinstance(value, list) and len(value) == 3 else value
    return number if type(number) is int and number > 0 else 0


def _size(value: Any) -> tuple[int, ...]:
    """Return the height and width in a value of a config; empty if it states none."""
    numbers = value[-2:] if isinstance(value, list) else [value, value]
    is_size = len(numbers) == 2 and all(type(number) is int and number > 0 for number in numbers)
    return tuple(numbers) if is_size else ()


def _contradiction(place: Place, value: Any, present: int, expected: int = 0) -> str:
    """Describe a value that the tensors contradict."""
    was = f" instead of {expected}" if expected else ""
    return f"{'.'.join(filter(None, place))} {value}: the tensors have {present}{was}"


def _state(fit: ConfigFit, configs: Sequence[dict[str, Any]], place: Place, value: Any) -> None:
    """Correct a value in configs."""
    section, key = place
    was = _value(configs[-1], place)
    for config in configs:
        values = config.get(section) if section else config
        if isinstance(values, dict) and key in values:
            values[key] = value
    fit.corrections.append(f"{'.'.join(filter(None, place))}: {value} (was {was})")


def _fit_channels(
    fit: ConfigFit,
    config: Mapping[str, Any],
    configs: Sequence[dict[str, Any]],
    shapes: Mapping[str, tuple[Shape, Shape]],
) -> set[tuple[str, int]]:
    """Correct the channels by the first convolutions; return the axes that have them."""
    was = next(filter(None, (_channels(_value(config, place)) for place in _CHANNELS)), 0)
    # Convolutions may read pixels of several places at once.
    factors = {name: before[1] // was if was else 0 for name, (before, _) in shapes.items()}
    counts = {
        new[1] // factor
        for factor, (before, new) in zip(factors.values(), shapes.values(), strict=True)
        if factor and before[1] == was * factor and new[1] % factor == 0
    }
    if len(counts) != 1:
        return set()
    (channels,) = counts
    for place in (*_CHANNELS, *_OTHER_INPUTS):
        value = _value(configs[-1], place)
        stated = _channels(value)
        if stated == was != channels:
            _state(fit, configs, place, [channels, *value[1:]] if value != was else channels)
        elif stated not in {0, channels}:
            fit.problems.append(_contradiction(place, stated, channels))
    return {(name, 1) for name in shapes}


def _fit_sizes(
    fit: ConfigFit,
    config: Mapping[str, Any],
    configs: Sequence[dict[str, Any]],
    shapes: Mapping[str, tuple[Shape, Shape]],
    kernels: set[int],
) -> set[tuple[str, int]]:
    """Compare an edited size of images with the numbers of their patches; return axes that fit."""
    was = next(filter(None, (_size(_value(config, place)) for place in _SIZES)), ())
    sizes = {place: _size(_value(configs[-1], place)) for place in _SIZES}
    edited = [p for p in _SIZES if sizes[p] and sizes[p] != _size(_value(config, p))]
    if not was or not edited:
        return set()
    now = sizes[edited[0]]
    tables = {name for name in shapes if _POSITIONS.fullmatch(name)}
    are_patches = any(
        _numbers_of_patches(shapes[name][0][-2], (was, now), kernels) for name in tables
    )
    patches = kernels if are_patches else range(1, _LARGEST_PATCH + 1)
    axes = set()
    for name, (before, after) in shapes.items():
        for axis, (old, new) in enumerate(zip(before, after, strict=True)):
            numbers = _numbers_of_patches(old, (was, now), patches)
            is_checked = are_patches and name in tables and axis == len(before) - 2
            if is_checked and numbers and new not in numbers:
                value = _value(configs[-1], edited[0])
                fit.problems.append(_contradiction(edited[0], value, new, min(numbers)))
            if new in numbers or (is_checked and numbers):
                axes.add((name, axis))
    for place in _SIZES:
        if sizes[place] == was and place not in edited:
            value = _value(configs[-1], place)
            new_value = [*value[:-2], *now] if isinstance(value, list) else now[0]
            if isinstance(value, list) or now[0] == now[1]:
                _state(fit, configs, place, new_value)
    return axes


def _numbers_of_patches(
    number: int, sizes: tuple[tuple[int, ...], tuple[int, ...]], patches: Iterable[int]
) -> set[int]:
    """Return what a number of patches in images of one size may be in images of another size."""
    (height, width), (new_height, new_width) = sizes
    extras = {patch: number - (height // patch) * (width // patch) for patch in patches}
    return {
        (new_height // patch) * (new_width // patch) + extra
        for patch, extra in extras.items()
        if 0 <= extra <= _MOST_EXTRA
    }


def with_new_images(
    document: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config of image processing for another size of images.

    `before` and `after` are configs of a model of transformers.
    """
    sizes = {
        (_size(_value(before, place)), _size(_value(after, place)))
        for place in _places(before, _OF_IMAGES)
    }
    changed = [(old, new) for old, new in sizes if old and new and old != new]
    squares = [(old[0], new[0]) for old, new in changed if len({*old}) == len({*new}) == 1]
    return _scaled(document, *squares[0]) if len(changed) == len(squares) == 1 else dict(document)


def values_of_channels(
    document: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
    """Return the keys of image processing with a value for each channel that images had before."""
    numbers = [
        _value(before, place)
        for place in _places(before, _OF_CHANNELS)
        if _value(after, place) not in {None, _value(before, place)}
    ]
    inner = document.get(_PROCESSOR)
    sections = [document, inner if isinstance(inner, dict) else {}]
    return [
        key
        for section in sections
        for key in _CHANNEL_VALUES
        if isinstance(section.get(key), list) and len(section[key]) in numbers
    ]


def _places(config: Mapping[str, Any], key: str) -> list[Place]:
    """Return the places of a key in a config and in the configs of its towers."""
    return [("", key), *((section, key) for section in config if section.endswith("_config"))]


def _scaled(document: Mapping[str, Any], old: int, new: int) -> dict[str, Any]:
    """Return a config with sizes of images for which `old` pixels are `new` ones."""
    scaled = dict(document)
    for key in _PROCESSED.intersection(document):
        value = document[key]
        if isinstance(value, dict):
            scaled[key] = {k: n * new // old if type(n) is int else n for k, n in value.items()}
        elif type(value) is int:
            scaled[key] = value * new // old
    if isinstance(inner := document.get(_PROCESSOR), dict):
        scaled[_PROCESSOR] = _scaled(inner, old, new)
    return scaled
