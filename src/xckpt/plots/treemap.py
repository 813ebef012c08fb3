"""Where the bytes are, ``ds.ckpt.plot.treemap``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.datasets.tensors import OpenTensors
from xckpt.formatting import binary_size, columns, counted, printable, share, shortened
from xckpt.labels.numbering import parse_name, split_name, strip_separator
from xckpt.notebook.html import colors_of
from xckpt.notebook.short_names import apart
from xckpt.plots.axes import add_heading, add_legend, luminance, new_axes, require_drawable, write
from xckpt.plots.series import require_any
from xckpt.plots.theme import themed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter
    from xckpt.tensor_rows import Row

_ANY = "*"
_POINT_SIZES = (8.0, 6.5)
_HEAD_HEIGHT = 1.7
_LINE_HEIGHT = 1.35
_HIGHEST_HEAD = 0.15
# In sizes of the font, about this in DejaVu Sans.
_CHARACTER_WIDTH = 0.62
_SHORTEST_LABEL = 9
# Of boxes that are too small for names: the size of their numbers, and the list of them.
_SMALLEST, _MOST_LISTED, _WIDEST_LISTED = 5.5, 18, 30
# Seen between boxes of all colours, on light and on dark ground.
_BETWEEN = (1, 1, 1, 0.7)
_LEAST_SHARE = 2e-4


class Tile(NamedTuple):
    """A rectangle: its corner at the lower left, and its size."""

    x: float
    y: float
    width: float
    height: float


@dataclass(slots=True)
class _Module:
    """A module, or a tensor in it where `children` is empty; numbers are one child, ``*``."""

    name: str
    children: dict[str, _Module] = field(default_factory=dict)
    nbytes: int = 0
    count: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)

    def add(self, row: Row, path: Sequence[str]) -> None:
        """Count a tensor here, and in the modules on its path."""
        self.nbytes += row.nbytes
        self.count += 1
        self.dtypes[row.dtype] += row.nbytes
        if path:
            first, *rest = path
            self.children.setdefault(first, _Module(first)).add(row, rest)


@themed
def draw_treemap(obj: Any, names: TensorFilter | None, *, ax: Axes | None) -> Axes:
    """Draw where the bytes are; see `xckpt.plots.Plots.treemap`."""
    require_drawable(ax)
    from matplotlib.patches import Patch

    tensors = OpenTensors(obj)
    rows = {row.name: row for row in tensors.rows}
    chosen = tensors.select(names)
    require_any(chosen, rows, names)
    root = _tree(rows[name] for name in chosen)
    if not root.nbytes:
        raise ValueError("all tensors are empty")
    ax = new_axes(ax, 9.0, 5.0)
    ax.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    kinds = [kind for kind, _ in root.dtypes.most_common()]
    # As the summary has them, also in a picture of some of the tensors.
    whole: Counter[str] = Counter()
    for row in rows.values():
        whole[row.dtype] += row.nbytes
    colours = colors_of(kind for kind, _ in whole.most_common())
    canvas = _Canvas(ax, {kind: colours[kind] for kind in kinds})
    canvas.draw(root, Tile(0, 0, 1, 1), ())
    canvas.number_the_rest()
    labels = [
        f"{kind}  {binary_size(root.dtypes[kind])}  {share(root.dtypes[kind], root.nbytes)}"
        for kind in kinds
    ]
    handles = [Patch(facecolor=colour) for colour in canvas.colours.values()]
    add_legend(ax, handles, labels, below="axes")
    add_heading(ax, f"{binary_size(root.nbytes)} in {counted(root.count, 'tensor')}")
    return ax


# --- modules -------------------------------------------------------------------------------------


def _tree(rows: Iterable[Row]) -> _Module:
    root = _Module("")
    for row in rows:
        template = parse_name(row.name).template
        root.add(row, [_ANY if part is None else part for part in template])
    return _without_chains(root)


def _without_chains(module: _Module) -> _Module:
    """Make a module with one child that child; names are joined."""
    module.children = {name: _without_chains(each) for name, each in module.children.items()}
    if len(module.children) != 1:
        return module
    (child,) = module.children.values()
    if child.count < module.count:  # there is a tensor of the module's own name
        return module
    child.name = f"{module.name}{child.name}"
    return child


# --- drawing -------------------------------------------------------------------------------------


class _Canvas:
    """Axes that boxes are drawn in, and how much text has room there."""

    def __init__(self, ax: Axes, colours: dict[str, Any]) -> None:
        self.ax = ax
        self.colours = colours
        figure: Any = ax.get_figure(root=True)
        # Before the layout has cut off what titles need, which is little.
        place, (width, height) = ax.get_position(), figure.get_size_inches()
        self.inches = place.width * width, place.height * height
        #: Boxes without room for a name, with their names and sizes.
        self.nameless: list[tuple[Tile, Any, str, str]] = []

    def draw(self, module: _Module, box: Tile, path: tuple[str, ...]) -> None:
        """Draw a module with everything in it, below modules whose names there was no room for."""
        inside = sorted(module.children.values(), key=lambda child: -child.nbytes)
        drawn = [child for child in inside if child.nbytes]
        if not drawn or module.nbytes > sum(child.nbytes for child in drawn):
            self._fill(module, box, path)
            return
        below = self._headed(module, box) if module.name else box
        path = (*path, module.name) if below == box and module.name else ()
        boxes = squarify([child.nbytes for child in drawn], below, self.inches)
        for child, part in zip(drawn, boxes, strict=True):
            # What nobody could see has its place, but is not drawn.
            if part.width * part.height > _LEAST_SHARE:
                self.draw(child, part, path)

    def _headed(self, module: _Module, box: Tile) -> Tile:
        """Write the name of a module at its top, and return what is left of its box."""
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
        """Return how many characters there is room for in a line."""
        return int((box.width * self.inches[0] - 0.08) * 72 / (size * _CHARACTER_WIDTH))

    def _fill(self, module: _Module, box: Tile, path: tuple[str, ...]) -> None:
        """Draw a box with as much of its label as has room."""
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
        self.nameless.append((box, ink, name, _facts(module)))

    def number_the_rest(self) -> None:
        """List the largest boxes without names at the right, with numbers if there is room."""
        self.nameless.sort(key=lambda item: -item[0].width * item[0].height)
        listed = self.nameless[:_MOST_LISTED]
        names = apart([name for _, _, name, _ in listed], _WIDEST_LISTED)
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
    """Return the name, and the number and size of what it stands for, if there is room."""
    whole = strip_separator(printable("".join((*path, module.name))))
    parts = split_name(whole)
    # The last two say which tensor it is; what is before them is written around the box.
    last = whole[-len(".".join(parts[-2:])) :]
    wanted = [[whole], [last], parts[-2:]]
    names = next((each for each in wanted if max(map(columns, each)) <= room), None)
    if names is None:
        names = [shortened(wanted[1][0], room)] if room >= _SHORTEST_LABEL else []
    facts = _facts(module)
    return [*names, facts] if names and columns(facts) <= room else names


def _facts(module: _Module) -> str:
    """Write how many tensors a module has, and their size."""
    times = f"×{module.count:,}  " if module.count > 1 else ""
    return f"{times}{binary_size(module.nbytes)}"


# --- rectangles ----------------------------------------------------------------------------------


def squarify(sizes: Sequence[float], box: Tile, scale: tuple[float, float] = (1, 1)) -> list[Tile]:
    """Cut a box into boxes whose areas are in proportion to sizes, as square as may be.

    The largest size is first; `scale` is the size of the units along both axes, for what looks
    square. By Bruls, Huizing and van Wijk, "Squarified treemaps", 2000.
    """
    boxes: list[Tile] = []
    rest = list(sizes)
    while rest:
        wide = box.width * scale[0] >= box.height * scale[1]
        side = (box.height * scale[1]) if wide else (box.width * scale[0])
        area = box.width * scale[0] * box.height * scale[1] / sum(rest)
        count = _row_length(rest, side, area)
        total = sum(rest[:count])
        fraction = total / sum(rest)
        # Side by side: at the left of a wide box, at the top of a high one.
        at, used = 0.0, fraction * (box.width if wide else box.height)
        for size in rest[:count]:
            part = size / total
            if wide:
                boxes.append(Tile(box.x, box.y + at * box.height, used, box.height * part))
            else:
                top = box.y + box.height - used
                boxes.append(Tile(box.x + at * box.width, top, box.width * part, used))
            at += part
        rest = rest[count:]
        if wide:
            box = Tile(box.x + used, box.y, box.width - used, box.height)
        else:
            box = Tile(box.x, box.y, box.width, box.height - used)
    return boxes


def _row_length(sizes: Sequence[float], side: float, area: float) -> int:
    """Return how many of the next boxes stand along a side before they get less square."""
    best, count = float("inf"), 0
    for stop in range(1, len(sizes) + 1):
        total = sum(sizes[:stop]) * area
        ratios = [side**2 * size * area / total**2 for size in (sizes[0], sizes[stop - 1])]
        worst = max(max(ratio, 1 / ratio) for ratio in ratios)
        if worst > best:
            break
        best, count = worst, stop
    return count
