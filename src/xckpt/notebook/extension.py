"""In IPython, large Datasets and trees of checkpoints are shown as the folded summary.

xarray's own HTML takes time that grows with the square of the number of variables, minutes and
50 MB for 18,000 (https://github.com/pydata/xarray/issues/8173), and an engine cannot change how a
Dataset is shown. So opening a checkpoint loads this extension; see
`xckpt.registration.register_formatter`. The option ``xckpt.summary-above`` of dask's configuration
is the number of variables above which a Dataset is large; None is never. Formatters that others
registered for a type of content come first.

It also lets IPython complete names of tensors in ``ds.ckpt["``: by default it looks up no attribute
of a Dataset when Tab is pressed, since any class may compute something there.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from xckpt import registration

_OPTION = "xckpt.summary-above"
_MOST_VARIABLES = 500
_BUNDLED = ("text/plain", "text/html")
# Short, as all of it has to fit into a line of text.
_NOTE = (
    "shown as a summary; for xarray's own view, which can take minutes: "
    f"dask.config.set({{{_OPTION!r}: None}})"
)
# Classes with attributes that are looked up in next to no time.
_COMPLETED = {
    ("xarray", "Dataset"),
    ("xarray", "DataTree"),
    ("xckpt", "accessor", "CheckpointAccessor"),
}


class _Shown:
    """Shows large checkpoints as their summary, and all other objects of a class as before.

    `before` was registered for the class. `otherwise` showed them: that, or what was registered for
    a class that they inherit from.
    """

    def __init__(self, formatter: Any, shown: type) -> None:
        # A lookup moves a formatter that is registered by the name of a class to the class.
        self.otherwise = formatter.for_type(shown)
        self.before = formatter.type_printers.get(shown)
        self.method = str(formatter.print_method)


class _Bundle(_Shown):
    """Shows them in all ways at once."""

    def __call__(self, obj: Any) -> Any:
        if _is_large(obj) and (bundle := obj.ckpt._repr_large_(_NOTE)) is not None:
            return bundle
        return None if self.otherwise is None else self.otherwise(obj)


class _Nothing(_Shown):
    """Returns no content of other types for large checkpoints.

    IPython would ask the object for `_repr_png_` and others, and xarray would look for similar
    names among all variables, which takes longer than the summary.
    """

    def __call__(self, obj: Any) -> Any:
        if _is_large(obj):
            return None
        if self.otherwise is not None:
            return self.otherwise(obj)
        method = getattr(type(obj), self.method, None)
        return None if method is None else method(obj)


def _is_large(obj: Any) -> bool:
    import dask

    most = dask.config.get(_OPTION, _MOST_VARIABLES)
    # Every Dataset has the accessor once one of our engines is loaded, so all of ours have it.
    if most is None or most is False or not hasattr(type(obj), "ckpt"):
        return False
    nodes = obj.subtree if hasattr(type(obj), "subtree") else [obj]
    return any(count > most for count in accumulate(len(node.variables) for node in nodes))


def load_ipython_extension(ipython: Any) -> None:
    """Show checkpoints with more than 500 variables as ``ds.ckpt``.

    Parameters
    ----------
    ipython : IPython.core.interactiveshell.InteractiveShell
        The session, as ``%load_ext`` hands it over.
    """
    registration.is_extension_declined = False
    for formatter, kind in _formatters(ipython):
        for shown in _classes():
            if not isinstance(formatter.type_printers.get(shown), _Shown):
                formatter.for_type(shown, kind(formatter, shown))
    _completed_classes().update(_COMPLETED)


def unload_ipython_extension(ipython: Any) -> None:
    """Show Datasets and trees as before.

    Parameters
    ----------
    ipython : IPython.core.interactiveshell.InteractiveShell
        The session, as ``%unload_ext`` hands it over.
    """
    registration.is_extension_declined = True
    for formatter, _ in _formatters(ipython):
        for shown in _classes():
            ours = formatter.type_printers.get(shown)
            # Keep formatters that were registered later.
            if not isinstance(ours, _Shown):
                continue
            if ours.before is None:
                formatter.pop(shown)
            else:
                formatter.for_type(shown, ours.before)
    _completed_classes().difference_update(_COMPLETED)


def _completed_classes() -> set[tuple[str, ...]]:
    """Return the classes whose attributes IPython may look up to complete a name."""
    try:
        from IPython.core.guarded_eval import EVALUATION_POLICIES

        policy: Any = EVALUATION_POLICIES["limited"]
        classes: set[tuple[str, ...]] = policy.allowed_getattr_external
    except (ImportError, KeyError, AttributeError):  # another version
        return set()
    return classes


def _formatters(ipython: Any) -> list[tuple[Any, type[_Shown]]]:
    display = ipython.display_formatter
    unused = [formatter for kind, formatter in display.formatters.items() if kind not in _BUNDLED]
    bundle = (display.mimebundle_formatter, _Bundle)
    return [bundle, *[(formatter, _Nothing) for formatter in unused]]


def _classes() -> tuple[type, ...]:
    import xarray as xr

    return xr.Dataset, xr.DataTree
