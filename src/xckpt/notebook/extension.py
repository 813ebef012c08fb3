"""``%load_ext xckpt``: large Datasets of checkpoints are shown as the folded summary.

xarray's own HTML takes time that grows with the square of the number of variables, about a minute
and 30 MB for 10,000 (https://github.com/pydata/xarray/issues/8173). An engine cannot change how a
Dataset is shown, and this changes it for the whole session; so it is done only when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr

__all__ = ["MOST_VARIABLES", "load_ipython_extension", "unload_ipython_extension"]

#: Datasets with more variables than this are shown as the summary.
MOST_VARIABLES = 500


class _DatasetHtml:
    """Shows large Datasets of checkpoints as their summary, and all others as before.

    `before` was registered for Datasets. `otherwise` showed them: that, or what was registered for
    a class that they inherit from.
    """

    def __init__(
        self, before: Callable[[Any], Any] | None, otherwise: Callable[[Any], Any] | None
    ) -> None:
        self.before = before
        self._otherwise = otherwise

    def __call__(self, ds: xr.Dataset) -> Any:
        if len(ds.variables) > MOST_VARIABLES:
            # Every Dataset has it once one of our engines is loaded, so all of ours have it.
            accessor: Any = getattr(ds, "ckpt", None)
            if getattr(accessor, "format", None) is not None:
                return accessor._repr_html_()
        return ds._repr_html_() if self._otherwise is None else self._otherwise(ds)


def load_ipython_extension(ipython: Any) -> None:
    """Show Datasets of checkpoints with more than 500 variables as ``ds.ckpt``.

    Parameters
    ----------
    ipython : IPython.core.interactiveshell.InteractiveShell
        The session, as ``%load_ext`` hands it over.
    """
    import xarray as xr

    formatter = _formatter(ipython)
    # What is registered by the name of a class moves to the class when that is looked up.
    otherwise = formatter.for_type(xr.Dataset)
    before = formatter.type_printers.get(xr.Dataset)
    if not isinstance(before, _DatasetHtml):
        formatter.for_type(xr.Dataset, _DatasetHtml(before, otherwise))


def unload_ipython_extension(ipython: Any) -> None:
    """Show Datasets as before.

    Parameters
    ----------
    ipython : IPython.core.interactiveshell.InteractiveShell
        The session, as ``%unload_ext`` hands it over.
    """
    import xarray as xr

    formatter = _formatter(ipython)
    ours = formatter.type_printers.get(xr.Dataset)
    # Whoever registered something else since then wants that.
    if not isinstance(ours, _DatasetHtml):
        return
    if ours.before is None:
        formatter.pop(xr.Dataset)
    else:
        formatter.for_type(xr.Dataset, ours.before)


def _formatter(ipython: Any) -> Any:
    return ipython.display_formatter.formatters["text/html"]
