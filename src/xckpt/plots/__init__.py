"""Pictures of checkpoints, ``ds.ckpt.plot``, drawn with matplotlib.

The room may import health, comparison, statistics and everything below them; matplotlib is imported
when a picture is drawn. Read `Plots` below first: it has one method per picture, which calls the
function ``draw_...`` with its documentation. `series` and `axes` are shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from xckpt.options import Forwarded
from xckpt.plots.comparisons import draw_differences, draw_error, draw_steps
from xckpt.plots.distribution import draw_histogram, draw_spectrum
from xckpt.plots.groups import draw_groups
from xckpt.plots.heatmap import draw_heatmap
from xckpt.plots.layers import draw_layers
from xckpt.plots.series import Drawn
from xckpt.plots.treemap import draw_treemap

if TYPE_CHECKING:
    import xarray as xr

# The pictures, with the names that people try for them.
_PICTURES = {
    "layers": "line lines depth trend",
    "histogram": "hist density kde distribution violin box",
    "treemap": "sizes tree pie bar memory",
    "spectrum": "svd singular_values rank",
    "heatmap": "imshow image matrix pcolormesh show",
    "by": "groups grid module role",
    "steps": "run training history",
    "compare": "diff difference changes scatter",
    "error": "quantization quantisation sqnr",
}


class Plots:
    """Pictures of the tensors of a Dataset or DataTree.

    Every method draws with matplotlib (``pip install 'xckpt[plot]'``) into the given axes, or into
    a new figure, and returns the axes; the first ones, if the figure has several panels.

    Parameters
    ----------
    obj : xarray.Dataset or xarray.DataTree
        Object opened by an engine of xckpt, flat or stacked; most pictures accept any other object.
    stats : xarray.Dataset, optional
        Result of `xckpt.stats` for this object, which is then not computed again.

    Notes
    -----
    By default, `layers` and `histogram` draw the parameters. A line below the title counts the
    omitted tensors, such as buffers and optimizer state; choose these by name. Tensors of codes,
    such as int8 weights with separate scales, are never drawn with weights: they are omitted, or
    labelled as codes if nothing else is chosen. New figures are transparent, in colours for light
    and dark notebooks, unless matplotlib has another style than its default. Arguments are checked
    before any data are read.

    Examples
    --------
    >>> ds = xr.open_dataset("m.zt", engine="ztensor")
    >>> ds.ckpt.plot.layers("std", "*_proj.weight")
    """

    def __init__(self, obj: xr.Dataset | xr.DataTree, stats: xr.Dataset | None = None) -> None:
        self._obj = obj
        self._stats = stats

    if not TYPE_CHECKING:  # a type checker would take any name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            from xckpt.labels.filters import suggest_word

            meant = suggest_word(name, _PICTURES, _PICTURES)
            hint = f"did you mean .plot.{meant}?" if meant else f"it has {', '.join(_PICTURES)}"
            raise AttributeError(f".plot has no picture {name!r}; {hint}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise a TypeError that lists the pictures."""
        raise TypeError(f"choose a picture: {', '.join(f'.plot.{name}()' for name in _PICTURES)}")

    def __repr__(self) -> str:
        return f"<Plots: {', '.join(_PICTURES)}>"

    @property
    def _given(self) -> Drawn:
        return Drawn(self._obj, self._stats)

    layers = Forwarded(lambda: draw_layers)
    histogram = Forwarded(lambda: draw_histogram)
    treemap = Forwarded(lambda: draw_treemap)
    spectrum = Forwarded(lambda: draw_spectrum)
    heatmap = Forwarded(lambda: draw_heatmap)
    by = Forwarded(lambda: draw_groups)
    steps = Forwarded(lambda: draw_steps)
    compare = Forwarded(lambda: draw_differences)
    error = Forwarded(lambda: draw_error)
