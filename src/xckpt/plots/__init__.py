"""Pictures of checkpoints, ``ds.ckpt.plot``, drawn with matplotlib.

The room may import health, comparison, statistics and everything below them; matplotlib is imported
when a picture is drawn. Read `Plots` below first: it has one method per picture and checks the
arguments. Each picture has a module; `panels`, `axes` and `theme` are shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import xarray as xr
    from matplotlib.axes import Axes

    from xckpt.comparison.cells import Reduced
    from xckpt.labels import TensorFilter

__all__ = ["Plots"]

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

    def layers(
        self,
        statistic: str = "std",
        names: TensorFilter | None = None,
        *,
        x: str | None = None,
        hue: str | Callable[[str], Any] | None = None,
        stats: xr.Dataset | None = None,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> Axes:
        """Draw a statistic along the numbered modules of a model, each kind in its own panel.

        The tensors ``layers.0.mlp.w``, ``layers.1.mlp.w``, ... make one line. Tensors numbered
        twice, like experts in layers, make a line of the medians over the other numbers, a band
        from the smallest to the largest value and, if they are eight or more, another band of the
        middle 90 %. Labels name lines at their ends, and tensors at extremes and out of line.

        Weights, gains of norms, biases and tensors of other roles are in different panels, and so
        are modules with many lines: at most six panels of eight lines each. Beyond that, lines
        whose names differ in one word are united, and then the smallest ones. With `ax`, there is a
        single panel. Modules of several names that repeat the same tensors, such as the stages of a
        ResNet or UNet, follow each other. Tensors without a number are not shown.

        Parameters
        ----------
        statistic : str, default "std"
            A statistic of `xckpt.stats`, or of `xckpt.spectrum`, which takes longer.
        names : str, iterable of str, re.Pattern or callable, optional
            Which tensors to draw, as for ``ds.ckpt.find``; by default all.
        x : str, optional
            Module whose numbers are on the axis; by default the outermost, usually the layers.
        hue : str or callable, optional
            Colours of lines: another numbered module, for one line for each of its numbers, or
            bands if these are more than twelve; or a function of the name without numbers. Lines
            are in one panel then. By default every line of a panel has its own colour.
        stats : xarray.Dataset, optional
            Result of `xckpt.stats` for this object, or of `xckpt.compare`; by default the last
            result of ``ds.ckpt.stats()``, else computed or taken from the cache.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.
        **kwargs
            Passed on to `matplotlib.axes.Axes.plot`.

        Returns
        -------
        matplotlib.axes.Axes
            The axes of the first panel, logarithmic where the values span more than two powers of
            ten. ``ax.figure.axes`` has the axes of all panels.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If `ax` is not one Axes.
        ValueError
            If no tensor matches or has a number, or the statistic does not exist.

        Examples
        --------
        >>> moe = xckpt.open("moe.zt")
        >>> moe.ckpt.plot.layers("absmax", "*.experts.*", hue="experts")
        """
        from xckpt.plots.layers import draw_layers

        options: Any = {"x": x, "hue": hue, "stats": stats, "ax": ax, **kwargs}
        return draw_layers(self._obj, statistic, names, computed=self._stats, **options)

    def histogram(
        self,
        names: TensorFilter | None = None,
        *,
        bins: int | Sequence[float] | None = None,
        scale: str = "linear",
        log: bool = True,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> Axes:
        """Draw the distributions of the elements of tensors, as densities.

        Up to twelve tensors have a line each; if they differ only by number, it determines the
        colour. More tensors become bands of quantiles, one for each role as in `layers`. The tensor
        with the largest spread has a labelled line as well, and with few roles also the one with
        the smallest. Bins are at least as wide as the spacing of the stored element type.

        Parameters
        ----------
        names : str, iterable of str, re.Pattern or callable, optional
            Which tensors to draw, as for ``ds.ckpt.find``; by default all.
        bins : int or sequence of float, optional
            Number of bins from the smallest to the largest element of a line or band, or their
            edges. By default at most 200, and fewer for small tensors; if a few outliers stretch
            the range, as many again for all other elements.
        scale : {"linear", "symlog"}
            Scale of the values; ``"symlog"`` is logarithmic on both sides of zero.
        log : bool, default True
            Whether the axis of densities is logarithmic, which makes outliers visible.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.
        **kwargs
            Passed on to `matplotlib.axes.Axes.stairs`.

        Returns
        -------
        matplotlib.axes.Axes
            The axes, with ticks at the smallest and the largest element and at zero. A density is
            the share of the finite elements of a tensor for each unit of the values, or for each
            decade if these are logarithmic.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If no tensor matches, or an argument has an unknown value.

        Examples
        --------
        >>> ds.ckpt.plot.histogram("*.q_proj.weight")
        """
        from xckpt.plots.distribution import draw_histogram

        return draw_histogram(self._obj, names, bins=bins, scale=scale, log=log, ax=ax, **kwargs)

    def treemap(self, names: TensorFilter | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw where the bytes of a checkpoint are: nested rectangles, like its modules.

        Areas show stored bytes, colours show element types as in the summary. Modules that only
        differ in their number are one rectangle, with ``*`` for the number. Rectangles without
        room for a name have a number, which a list explains. No data are read.

        Parameters
        ----------
        names : str, iterable of str, re.Pattern or callable, optional
            Which tensors to draw, as for ``ds.ckpt.find``; by default all.
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
        from xckpt.plots.treemap import draw_treemap

        return draw_treemap(self._obj, names, ax=ax)

    def spectrum(
        self,
        name: str,
        *,
        minus: Any = None,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> Axes:
        """Draw the singular values of a matrix, and their density next to them.

        The line in the density is a power law, fitted to the tail of their squares; a dotted line
        marks the start of the tail.

        Parameters
        ----------
        name : str
            Name of a tensor in the file, also one that is stacked, or of a variable.
        minus : path, Index, xarray.Dataset or xarray.DataTree, optional
            Draw the singular values of the difference to this checkpoint, and the largest one
            that rounding to the stored types explains.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure. The density is drawn at its right.
        **kwargs
            Passed on to `matplotlib.axes.Axes.plot`.

        Returns
        -------
        matplotlib.axes.Axes
            The axes of the values, which are logarithmic.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        KeyError
            If the tensor does not exist, or is not a matrix.
        ValueError
            If all its elements are zeros, or some are not finite.

        Examples
        --------
        >>> ds.ckpt.plot.spectrum("model.layers.0.mlp.up_proj.weight")
        """
        from xckpt.plots.distribution import draw_spectrum

        return draw_spectrum(self._obj, name, minus=minus, ax=ax, **kwargs)

    def heatmap(
        self,
        name: str | None = None,
        *,
        rows: int | Literal["all"] = 256,
        columns: int = 256,
        robust: bool = False,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> Axes:
        """Draw the elements of a tensor, a large one with as many blocks as there are pixels.

        A large tensor is cut into `rows` x `columns` blocks. The middle row of each block is read,
        and its element of largest magnitude is shown, so that outliers along a column are not
        missed; one NaN in that row makes the block NaN. No other rows are read, and at most 2**24
        elements: long rows are read in part. Tensors that are compressed, or sparse with
        coordinates, are decoded whole, once. With ``rows="all"`` everything is read, chunk by
        chunk, and a block shows the element of largest magnitude in all of its rows.

        The heading states which rows and elements were read. If statistics were computed before, it
        also has the numbers of NaN, infinities and rows of zeros in the whole tensor. Such rows are
        marked at the right edge.

        Parameters
        ----------
        name : str
            Name of a tensor in the file, stacked or not, or of a variable. It can be omitted if
            there is a single tensor.
        rows : int or "all", default 256
            The largest number of blocks along the rows; ``"all"`` reads all rows for 256 blocks.
        columns : int, default 256
            The largest number of blocks along the columns.
        robust : bool, default False
            Whether colours span the middle 98 % of the elements instead of all of them.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.
        **kwargs
            Passed on to `matplotlib.axes.Axes.imshow`.

        Returns
        -------
        matplotlib.axes.Axes
            The axes, with the indices of the tensor as ticks. A tensor of more than two axes has
            its first axis along the rows and all others along the columns.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        KeyError
            If the tensor does not exist.
        ValueError
            If it has no elements, or `rows` or `columns` is not positive, or there are several
            tensors and no name.

        Examples
        --------
        >>> ds.ckpt.plot.heatmap("model.layers.5.mlp.gate_proj.weight", robust=True)
        """
        from xckpt.datasets.tensors import OpenTensors
        from xckpt.plots.heatmap import draw_heatmap

        name = OpenTensors(self._obj).only if name is None else name
        options: Any = {"size": (rows, columns), "robust": robust, "ax": ax, **kwargs}
        return draw_heatmap(self._obj, name, known=self._stats, **options)

    def by(
        self,
        statistic: str = "std",
        *keys: str,
        stats: xr.Dataset | None = None,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> Axes:
        """Draw a statistic of groups of tensors as a heat map, such as layers against modules.

        The object is a checkpoint, a result of `stats`, `compare` or `spectrum`, or groups from
        ``.ckpt.by``, also those of findings. The colours do not span a few values far beyond the
        others: these are marked with a cross, and the heading names them. They are logarithmic if
        the values span more than two powers of ten, and have zero in the middle if there are
        values of both signs.

        Parameters
        ----------
        statistic : str, default "std"
            A statistic of the result; of a checkpoint, one of `xckpt.stats` or `xckpt.spectrum`.
        *keys : str
            One or two keys, as for ``.ckpt.by``: rows, then columns. By default ``"layer"`` and
            ``"module"``. Groups have their own.
        stats : xarray.Dataset, optional
            Result of `xckpt.stats` for a checkpoint; by default the last one, else computed or
            taken from the cache.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.
        **kwargs
            Passed on to `matplotlib.axes.Axes.imshow`.

        Returns
        -------
        matplotlib.axes.Axes
            The axes, with labels at equal intervals. Cells without tensors are transparent, those
            whose value is infinite grey, and undefined ones pink.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If there are more than two keys, no tensor has them, or the groups lack the statistic.

        Examples
        --------
        >>> ds.ckpt.plot.by("kurtosis", "layer", "role")
        >>> ds.ckpt.compare("tuned.zt").ckpt.plot.by("rel_l2")
        """
        from xckpt.plots.groups import draw_groups

        options: Any = {"stats": stats, "ax": ax, **kwargs}
        return draw_groups(self._obj, statistic, keys, known=self._stats, **options)

    def steps(
        self,
        names: TensorFilter | None = None,
        *,
        relative: bool = False,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> Axes:
        """Draw how much each layer changes from step to step of a training run.

        Each step of a Dataset of `xckpt.open_steps` is compared with the step before. A row is a
        numbered module, or a module without numbers. Parameters, buffers and the state of an
        optimizer have panels with colour scales of their own; counters are left out. Axes in `ax`
        show the first of these groups.

        Parameters
        ----------
        names : str, iterable of str, re.Pattern or callable, optional
            Which tensors to compare, by their names without the step; by default all.
        relative : bool, default False
            Whether to divide the norm of a change by the norm of the weights at the later step.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.
        **kwargs
            Passed on to `matplotlib.axes.Axes.imshow`.

        Returns
        -------
        matplotlib.axes.Axes
            The axes, with logarithmic colours; unchanged layers are grey.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If the object does not have several steps, or no tensor matches.

        Examples
        --------
        >>> xckpt.open_steps("run/step-*.zt").ckpt.plot.steps()
        """
        from xckpt.plots.steps import draw_steps

        return draw_steps(self._obj, names, relative=relative, ax=ax, **kwargs)

    def compare(
        self,
        other: Any,
        statistic: str = "rel_l2",
        names: TensorFilter | None = None,
        *,
        most: int = 20,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> Axes:
        """Draw how much the tensors of two checkpoints differ: a bar for each that changed.

        Parameters
        ----------
        other : path, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
            Checkpoint to compare with, as for `xckpt.compare`; or the result of that function.
        statistic : str, default "rel_l2"
            A statistic of `xckpt.compare`.
        names : str, iterable of str, re.Pattern or callable, optional
            Which tensors to draw, as for ``ds.ckpt.find``; by default all.
        most : int, default 20
            The largest number of bars, for the tensors that changed most.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.
        **kwargs
            Passed on to `matplotlib.axes.Axes.barh`.

        Returns
        -------
        matplotlib.axes.Axes
            The axes, most changed first, logarithmic where the values span more than two powers of
            ten. The title counts the tensors that are equal, or on one side only; if nothing
            changed, a sentence replaces the bars.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If no tensor matches, the statistic does not exist, or `most` is not positive.

        Examples
        --------
        >>> ds.ckpt.plot.compare("tuned.zt")
        """
        from xckpt.plots.comparisons import draw_differences

        return draw_differences(self._obj, other, statistic, names, most=most, ax=ax, **kwargs)

    def error(
        self,
        other: Any = None,
        statistic: str = "sqnr_db",
        names: TensorFilter | None = None,
        *,
        dim: Reduced = -1,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> Axes:
        """Draw the error of each channel, with a row for each tensor, such as a layer.

        Parameters
        ----------
        other : path, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree, optional
            Checkpoint to compare with, such as the quantised model; or the result of
            `xckpt.compare` with `dim`. By default the object is such a result itself.
        statistic : str, default "sqnr_db"
            A statistic of `xckpt.compare`.
        names : str, iterable of str, re.Pattern or callable, optional
            Which tensors to draw, as for ``ds.ckpt.find``; by default all with several channels.
        dim : str, int, iterable of these, or mapping of these to int, default -1
            Dimensions to reduce, as for `xckpt.compare`; the others are channels.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.
        **kwargs
            Passed on to `matplotlib.axes.Axes.imshow`.

        Returns
        -------
        matplotlib.axes.Axes
            The axes, with channels along the columns. Tensors with fewer channels are stretched to
            the full width. Many tensors are grouped in blocks whose names differ only in numbers.
            If there is no room for all channels or tensors, the worst of several neighbours is
            shown. Equal channels are grey; channels that are zero on one side only are pink.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If there is nothing to compare with.
        ValueError
            If no tensor matches or is in both, the statistic does not exist, or there is only one
            value for each tensor.

        Examples
        --------
        >>> ds.ckpt.plot.error("quantised.safetensors", names="*.q_proj.weight")
        """
        from xckpt.plots.channels import draw_error

        return draw_error(self._obj, other, statistic, names, dim=dim, ax=ax, **kwargs)
