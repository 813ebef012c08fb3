"""Pictures of checkpoints: ``ds.ckpt.plot``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import xarray as xr
    from matplotlib.axes import Axes

    from xckpt.labels import TensorFilter

__all__ = ["Plots"]


class Plots:
    """Pictures of the tensors of a Dataset or DataTree.

    Every method draws with matplotlib (``pip install 'xckpt[plot]'``) into the axes that it is
    given, or into those of a new figure, and gives the axes back.

    Parameters
    ----------
    obj : xarray.Dataset or xarray.DataTree
        Opened by one of our engines, flat or stacked; for most pictures any other will do.

    Examples
    --------
    >>> ds = xr.open_dataset("m.zt", engine="ztensor")  # doctest: +SKIP
    >>> ds.ckpt.plot.layers("std", "*_proj.weight")  # doctest: +SKIP
    """

    def __init__(self, obj: xr.Dataset | xr.DataTree) -> None:
        self._obj = obj

    def __repr__(self) -> str:
        kinds = [name for name in vars(Plots) if not name.startswith("_")]
        return f"<Plots: {', '.join(kinds)}>"

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
        """Draw a statistic along the numbered modules of a model: one line for each role.

        The tensors ``layers.0.mlp.w``, ``layers.1.mlp.w``, ... make one line. Where they are
        numbered twice, as experts in layers are, the line is the median over the other numbers, in
        a band from the least to the largest. Tensors without a number are not shown.

        Parameters
        ----------
        statistic : str, default "std"
            One that `xckpt.stats` gives.
        names : str, iterable of str, re.Pattern or callable, optional
            Which tensors, as ``ds.ckpt.find`` takes it; by default all.
        x : str, optional
            The module whose numbers are on the axis; by default the outermost, mostly the layers.
        hue : str or callable, optional
            What lines of one colour have in common: another numbered module, for one line for
            each of its numbers; or what a function makes of the name without numbers. By default
            every line has its own colour.
        stats : xarray.Dataset, optional
            A result of `xckpt.stats` of this object; by default it is computed, or taken from the
            cache.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.
        **kwargs
            For `matplotlib.axes.Axes.plot`.

        Returns
        -------
        matplotlib.axes.Axes
            With a logarithmic axis where the values span more than two powers of ten.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If no tensor has a number, or there is no such statistic.

        Examples
        --------
        >>> ds.ckpt.plot.layers("absmax", "*.mlp.*", hue="experts")  # doctest: +SKIP
        """
        from xckpt.plots.layers import draw_layers

        return draw_layers(self._obj, statistic, names, x=x, hue=hue, stats=stats, ax=ax, **kwargs)

    def histogram(
        self,
        names: TensorFilter | None = None,
        *,
        bins: int | Sequence[float] = 200,
        scale: str = "linear",
        log: bool = True,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> Axes:
        """Draw how the elements of tensors are distributed, one line for each tensor.

        Lines of numbered modules have the colour of their number.

        Parameters
        ----------
        names : str, iterable of str, re.Pattern or callable, optional
            Which tensors, as ``ds.ckpt.find`` takes it; by default all.
        bins : int or sequence of float, default 200
            Number of bins, or their edges.
        scale : {"linear", "symlog"}
            Scale of the values: the latter is logarithmic on both sides of zero.
        log : bool, default True
            Whether the axis of shares is logarithmic, so that outliers are to be seen.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.
        **kwargs
            For `matplotlib.axes.Axes.stairs`.

        Returns
        -------
        matplotlib.axes.Axes
            Shares are of the finite elements of each tensor.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If there is no such tensor, or an argument is none of these.

        Examples
        --------
        >>> ds.ckpt.plot.histogram("*.q_proj.weight")  # doctest: +SKIP
        """
        from xckpt.plots.distribution import draw_histogram

        return draw_histogram(self._obj, names, bins=bins, scale=scale, log=log, ax=ax, **kwargs)

    def treemap(self, names: TensorFilter | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw where the bytes of a checkpoint are: rectangles in rectangles, as modules are.

        Areas are stored bytes, colours element types. Modules that differ in their numbers are
        one rectangle, with ``*`` for the number. Nothing is read.

        Parameters
        ----------
        names : str, iterable of str, re.Pattern or callable, optional
            Which tensors, as ``ds.ckpt.find`` takes it; by default all.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.

        Returns
        -------
        matplotlib.axes.Axes
            Without ticks.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If there is no such tensor, or all are empty.

        Examples
        --------
        >>> ds.ckpt.plot.treemap()  # doctest: +SKIP
        """
        from xckpt.plots.treemap import draw_treemap

        return draw_treemap(self._obj, names, ax)

    def heatmap(
        self,
        name: str,
        *,
        rows: int = 256,
        columns: int = 256,
        robust: bool = False,
        ax: Axes | None = None,
        **kwargs: Any,
    ) -> Axes:
        """Draw the elements of a tensor, of a large one as many as there are pixels.

        A large tensor is cut into `rows` x `columns` blocks. Of each block its middle row is read,
        and the element of largest magnitude in that is shown, so that outliers along a column are
        not missed; a NaN makes it NaN. No other rows are read, and at most 2**24 elements: where
        rows are that long, a part of each block's. What is compressed, or sparse with coordinates,
        is decoded whole, once.

        Parameters
        ----------
        name : str
            Of a tensor in the file, also of one that is stacked; or of a variable.
        rows, columns : int, default 256
            Most blocks along the axes.
        robust : bool, default False
            Whether colours span the 98 % of elements in the middle, in place of all.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.
        **kwargs
            For `matplotlib.axes.Axes.imshow`.

        Returns
        -------
        matplotlib.axes.Axes
            Ticks have the indices of the tensor. One of more than two axes has its first along
            the rows and all others along the columns.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        KeyError
            If there is no such tensor.
        ValueError
            If it has no elements, or `rows` or `columns` is not positive.

        Examples
        --------
        >>> ds.ckpt.plot.heatmap("layers.5.mlp.gate_proj.weight", robust=True)  # doctest: +SKIP
        """
        from xckpt.plots.heatmap import draw_heatmap

        return draw_heatmap(self._obj, name, size=(rows, columns), robust=robust, ax=ax, **kwargs)

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
            What to compare with, as `xckpt.compare` takes it; or what that gave.
        statistic : str, default "rel_l2"
            One that `xckpt.compare` gives.
        names : str, iterable of str, re.Pattern or callable, optional
            Which tensors, as ``ds.ckpt.find`` takes it; by default all.
        most : int, default 20
            So many bars at most: of the tensors that changed most.
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.
        **kwargs
            For `matplotlib.axes.Axes.barh`.

        Returns
        -------
        matplotlib.axes.Axes
            Most changed first, with a logarithmic axis where the values span more than two powers
            of ten. The title says how many tensors are the same, or on one side only.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If there is no such statistic, or `most` is not positive.

        Examples
        --------
        >>> base.ckpt.plot.compare(tuned)  # doctest: +SKIP
        """
        from xckpt.plots.differences import draw_differences

        return draw_differences(self._obj, other, statistic, names, most=most, ax=ax, **kwargs)
