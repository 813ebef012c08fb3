"""An IPython extension that shows large Datasets and trees of checkpoints as folded summaries.

The time for xarray's own HTML grows with the square of the number of variables: minutes and 50 MB
for 18,000 (https://github.com/pydata/xarray/issues/8173). A backend cannot change how a Dataset is
shown, so opening a checkpoint loads this extension; see `xckpt.registration.register_formatter`.
The option ``xckpt.summary-above`` in dask's configuration is the number of variables above which a
Dataset is large; None switches summaries off. Formatters that other packages registered for a type
of content come first.

The extension also makes Tab complete names of tensors in ``ds.ckpt["``. By default, IPython reads
no attributes of a Dataset for this, because a property may be slow or have side effects.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from xckpt import registration

_OPTION = "xckpt.summary-above"
_MOST_VARIABLES = 500
_BUNDLED = ("text/plain", "text/html")
# This has to fit into one line of text.
_NOTE = (
    "shown as a summary; for xarray's own view, which can take minutes: "
    f"dask.config.set({{{_OPTION!r}: None}})"
)
# Classes whose attributes are fast to look up.
_COMPLETED = {
    ("xarray", "Dataset"),
    ("xarray", "DataTree"),
    ("xckpt", "accessor", "CheckpointAccessor"),
}


class _Shown:
    """A formatter that shows large checkpoints as summaries, and other objects as before.

    `before` is the formatter that was registered for the class itself, `otherwise` the one that
    IPython used: the same, or the formatter of a base class.
    """

    def __init__(self, formatter: Any, shown: type) -> None:
        # Look it up first: this moves a formatter from the name of a class to the class.
        self.otherwise = formatter.for_type(shown)
        self.before = formatter.type_printers.get(shown)
        self.method = str(formatter.print_method)


class _Bundle(_Shown):
    """A formatter of MIME bundles, with text and HTML."""

    def __call__(self, obj: Any) -> Any:
        if _is_large(obj) and (bundle := obj.ckpt._repr_large_(_NOTE)) is not None:
            return bundle
        return None if self.otherwise is None else self.otherwise(obj)


class _Nothing(_Shown):
    """A formatter of another type, which returns nothing for large checkpoints.

    Otherwise IPython looks up `_repr_png_` and others, and xarray searches all variables for
    similar names, which takes longer than the summary.
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
    # The accessor is missing until one of our engines is loaded.
    if most is None or most is False or not hasattr(type(obj), "ckpt"):
        return False
    nodes = obj.subtree if hasattr(type(obj), "subtree") else [obj]
    return any(count > most for count in accumulate(len(node.variables) for node in nodes))


def load_ipython_extension(ipython: Any) -> None:
    """Show checkpoints with more than 500 variables as ``ds.ckpt``.

    Parameters
    ----------
    ipython : IPython.core.interactiveshell.InteractiveShell
        The session, which ``%load_ext`` passes.
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
        The session, which ``%unload_ext`` passes.
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
