"""The sizes of modules and tensors as nested boxes, ``ds.ckpt.plot.treemap``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.datasets.tensors import OpenTensors
from xckpt.formatting import binary_size, columns, counted, printable, share, shortened
from xckpt.notebook.html import colors_of
from xckpt.notebook.short_names import apart
from xckpt.options import renamed, takes
from xckpt.plots.axes import (
    add_heading,
    add_legend,
    luminance,
    new_axes,
    require_drawable,
    themed,
    write,
)
from xckpt.plots.series import Drawn, require_any
from xckpt.structure.numbering import split_name, strip_separator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter
    from xckpt.tensor_rows import Row

_ANY = "*"
_POINT_SIZES = (8.0, 6.5)
_HEAD_HEIGHT = 1.7
_LINE_HEIGHT = 1.35
_HIGHEST_HEAD = 0.15
# Mean width of a character, in font sizes; measured in DejaVu Sans.
_CHARACTER_WIDTH = 0.62
_SHORTEST_LABEL = 9
# For boxes too small for names: font size of their numbers, and rows and width of their list.
_SMALLEST, _MOST_LISTED, _WIDEST_LISTED = 5.5, 18, 30
# Edges of boxes, visible between all colours, on light and on dark backgrounds.
_BETWEEN = (1, 1, 1, 0.7)
# Share of the picture; smaller boxes would be invisible.
_LEAST_SHARE = 2e-4


class Tile(NamedTuple):
    """A rectangle: its corner at the lower left, and its size."""

    x: float
    y: float
    width: float
    height: float


class _Nameless(NamedTuple):
    """A box without room for a name."""

    box: Tile
    ink: str  # colour of text in it
    name: str
    facts: str


@dataclass(slots=True)
class _Module:
    """A module with its children, or a tensor without any; all indices are one child, ``*``."""

    name: str
    children: dict[str, _Module] = field(default_factory=dict)
    nbytes: int = 0
    count: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)

    def add(self, row: Row, path: Sequence[str]) -> None:
        """Add a tensor to the totals of this module and of the modules on its path."""
        self.nbytes += row.nbytes
        self.count += 1
        self.dtypes[row.dtype] += row.nbytes
        if path:
            self.children.setdefault(path[0], _Module(path[0])).add(row, path[1:])


@renamed("names", "tensors")
@takes()
@themed
def draw_treemap(
    source: Drawn,
    /,
    tensors: TensorFilter | None = None,
    *,
    exclude: TensorFilter | None = None,
    only: Literal["weights"] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw where the bytes of a checkpoint are: nested rectangles, like its modules.

    Areas show stored bytes, colours show element types as in the summary. Modules that only
    differ in their number are one rectangle, with ``*`` for the number. Rectangles without
    room for a name have a number, which a list explains. No data are read.

    Parameters
    ----------
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default in a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, without ticks.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If no tensor matches, or all of them are empty.

    Examples
    --------
    >>> ds.ckpt.plot.treemap()
    """
    require_drawable(ax)
    from matplotlib.patches import Patch

    opened = OpenTensors(source.obj)
    rows = {row.name: row for row in opened.rows}
    chosen = opened.select(source.filter(tensors, exclude, only))
    require_any(chosen)
    root = _Module("")
    for name in chosen:
        template = opened.structure.siblings_key(name).template
        root.add(rows[name], [_ANY if piece is None else piece for piece in template])
    root = _collapse_chains(root)
    if not root.nbytes:
        raise ValueError("all tensors are empty")
    ax = new_axes(ax, 9.0, 5.0)
    ax.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    dtypes = [dtype for dtype, _ in root.dtypes.most_common()]
    # Colours of all tensors, so that a picture of a few matches the summary.
    nbytes: Counter[str] = Counter()
    for row in rows.values():
        nbytes[row.dtype] += row.nbytes
    colours = colors_of(dtype for dtype, _ in nbytes.most_common())
    canvas = _Canvas(ax, {dtype: colours[dtype] for dtype in dtypes})
    canvas.draw(root, Tile(0, 0, 1, 1), ())
    canvas.list_nameless()
    labels = [
        f"{dtype}  {binary_size(root.dtypes[dtype])}  {share(root.dtypes[dtype], root.nbytes)}"
        for dtype in dtypes
    ]
    handles = [Patch(facecolor=colour) for colour in canvas.colours.values()]
    add_legend(ax, handles, labels, below="axes")
    add_heading(ax, f"{binary_size(root.nbytes)} in {counted(root.count, 'tensor')}")
    return ax


# --- modules -------------------------------------------------------------------------------------


def _collapse_chains(module: _Module) -> _Module:
    """Replace each module that has a single child by this child, with joined names."""
    module.children = {name: _collapse_chains(child) for name, child in module.children.items()}
    if len(module.children) != 1:
        return module
    (child,) = module.children.values()
    if child.count < module.count:  # a tensor has the name of the module itself
        return module
    child.name = f"{module.name}{child.name}"
    return child


# --- drawing -------------------------------------------------------------------------------------


class _Canvas:
    """Axes to draw boxes in, with their size in inches to fit text."""

    def __init__(self, ax: Axes, colours: dict[str, Any]) -> None:
        self.ax = ax
        self.colours = colours
        figure: Any = ax.get_figure(root=True)
        # The layout comes later, and takes a little for the titles.
        bounds, (width, height) = ax.get_position(), figure.get_size_inches()
        self.inches = bounds.width * width, bounds.height * height
        self.nameless: list[_Nameless] = []

    def draw(self, module: _Module, box: Tile, path: tuple[str, ...]) -> None:
        """Draw a module and its children in a box."""
        # `path` has the names of the enclosing modules that are not written around the box.
        children = sorted(module.children.values(), key=lambda child: -child.nbytes)
        children = [child for child in children if child.nbytes]
        if not children or module.nbytes > sum(child.nbytes for child in children):
            self._fill(module, box, path)
            return
        body = self._write_head(module, box) if module.name else box
        path = (*path, module.name) if body == box and module.name else ()
        tiles = squarify([child.nbytes for child in children], body, self.inches)
        for child, tile in zip(children, tiles, strict=True):
            # Invisible boxes leave their place empty.
            if tile.width * tile.height > _LEAST_SHARE:
                self.draw(child, tile, path)

    def _write_head(self, module: _Module, box: Tile) -> Tile:
        """Write the name of a module at the top of its box, if it fits; return the rest."""
        name = printable(strip_separator(module.name))
        fits = [size for size in _POINT_SIZES if columns(name) <= self._room(box, size)]
        height = _HEAD_HEIGHT * _POINT_SIZES[0] / 72 / self.inches[1]
        if not fits or height > _HIGHEST_HEAD * box.height:
            return box
        room = self._room(box, fits[0])
        size = f"  {binary_size(module.nbytes)}"
        label = self.ax.text(box.x + 0.003, box.y + box.height - height / 2, "", va="center")
        label.set(fontsize=fits[0], clip_on=True)
        write(label, name + size if columns(name + size) <= room else name, room)
        return Tile(box.x, box.y, box.width, box.height - height)

    def _room(self, box: Tile, size: float) -> int:
        """Return how many characters of a font size fit in a line."""
        return int((box.width * self.inches[0] - 0.08) * 72 / (size * _CHARACTER_WIDTH))

    def _fill(self, module: _Module, box: Tile, path: tuple[str, ...]) -> None:
        """Draw a box with as many lines of its label as fit."""
        from matplotlib.patches import Rectangle

        colour = self.colours[module.dtypes.most_common(1)[0][0]]
        patch = Rectangle((box.x, box.y), box.width, box.height, facecolor=colour, linewidth=1.5)
        patch.set_edgecolor(_BETWEEN)
        self.ax.add_patch(patch)
        ink = "black" if luminance(colour) > 0.5 else "white"
        for size in _POINT_SIZES:
            most_lines = int(box.height * self.inches[1] * 72 / (_LINE_HEIGHT * size))
            lines = _label(module, path, self._room(box, size))[:most_lines]
            if lines:
                middle = (box.x + box.width / 2, box.y + box.height / 2)
                text = self.ax.text(*middle, "", size=size, color=ink, ha="center", va="center")
                text.set(clip_on=True, text="\n".join(lines), parse_math=False)
                return
        name = strip_separator("".join((*path, module.name)))
        self.nameless.append(_Nameless(box, ink, name, _facts(module)))

    def list_nameless(self) -> None:
        """List the largest boxes without names at the right, and number those with room for it."""
        self.nameless.sort(key=lambda item: -item.box.width * item.box.height)
        listed = self.nameless[:_MOST_LISTED]
        names = apart([item.name for item in listed], _WIDEST_LISTED)
        lines = []
        for number, ((box, ink, _, facts), name) in enumerate(zip(listed, names, strict=True), 1):
            height = box.height * self.inches[1] * 72
            has_room = self._room(box, _SMALLEST) >= len(str(number)) and height > _SMALLEST
            lines.append(f"{number if has_room else '·'}  {name}  {facts}")
            if has_room:
                middle = (box.x + box.width / 2, box.y + box.height / 2)
                text = self.ax.text(*middle, str(number), ha="center", va="center")
                text.set(size=_SMALLEST, color=ink, clip_on=True)
        if len(self.nameless) > len(listed):
            lines.append(f"… and {len(self.nameless) - len(listed):,} smaller")
        text = self.ax.text(1.01, 1, "", transform=self.ax.transAxes, va="top")
        text.set(size=_POINT_SIZES[-1], text="\n".join(lines), parse_math=False, linespacing=1.35)


def _label(module: _Module, path: tuple[str, ...], room: int) -> list[str]:
    """Return the lines of a label, at most `room` wide; an empty list if the name does not fit."""
    name = strip_separator(printable("".join((*path, module.name))))
    parts = split_name(name)
    # The last two parts distinguish tensors of the same module.
    last = name[-len(".".join(parts[-2:])) :]
    candidates = [[name], [last], parts[-2:]]
    names = next((lines for lines in candidates if max(map(columns, lines)) <= room), None)
    if names is None:
        names = [shortened(last, room)] if room >= _SHORTEST_LABEL else []
    facts = _facts(module)
    return [*names, facts] if names and columns(facts) <= room else names


def _facts(module: _Module) -> str:
    """Return the number of tensors in a module, and their size."""
    times = f"×{module.count:,}  " if module.count > 1 else ""
    return f"{times}{binary_size(module.nbytes)}"


# --- rectangles ----------------------------------------------------------------------------------


def squarify(sizes: Sequence[float], box: Tile, scale: tuple[float, float] = (1, 1)) -> list[Tile]:
    """Cut a box into tiles with areas in proportion to sizes, as square as possible."""
    # Sizes are in descending order; `scale` is the length of the units along both axes, so that the
    # tiles are square in the picture. By Bruls, Huizing and van Wijk, "Squarified treemaps", 2000.
    tiles: list[Tile] = []
    remaining = list(sizes)
    while remaining:
        width, height = box.width * scale[0], box.height * scale[1]
        area = width * height / sum(remaining)
        count = _row_length(remaining, min(width, height), area)
        row, total = remaining[:count], sum(remaining[:count])
        fraction, offset = total / sum(remaining), 0.0
        # A row of tiles fills the left of a wide box, or the top of a high one.
        if width >= height:
            depth = fraction * box.width
            for size in row:
                length = box.height * size / total
                tiles.append(Tile(box.x, box.y + offset, depth, length))
                offset += length
            box = Tile(box.x + depth, box.y, box.width - depth, box.height)
        else:
            depth = fraction * box.height
            for size in row:
                length = box.width * size / total
                tiles.append(Tile(box.x + offset, box.y + box.height - depth, length, depth))
                offset += length
            box = Tile(box.x, box.y, box.width, box.height - depth)
        remaining = remaining[count:]
    return tiles


def _row_length(sizes: Sequence[float], side: float, area: float) -> int:
    """Return how many of the next tiles to put along a side before the tiles get less square."""
    best, count = float("inf"), 0
    for stop in range(1, len(sizes) + 1):
        total = sum(sizes[:stop]) * area
        ratios = [side**2 * size * area / total**2 for size in (sizes[0], sizes[stop - 1])]
        worst = max(max(ratio, 1 / ratio) for ratio in ratios)
        if worst > best:
            break
        best, count = worst, stop
    return count
