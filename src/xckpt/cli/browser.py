"""The terminal application of ``xckpt browse``: a tree of modules, a search, and a page.

`Pages` states what is shown of a file, as blocks; `Browser` lays it out with textual. Statistics
are computed in a thread, for the selected tensor only.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Input, OptionList, Static, Tree
from textual.widgets.option_list import Option
from textual.worker import get_current_worker

from xckpt.formatting import binary_size, counted, figure, printable, shape_text, word
from xckpt.labels import child_nodes, select, tree_paths
from xckpt.notebook.documents import Block, Field, Folded, Heading, Sentence, Share, Table, more
from xckpt.notebook.folding import ascending
from xckpt.notebook.text import to_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pandas as pd
    import xarray as xr
    from textual.binding import BindingType
    from textual.widgets.tree import TreeNode

    from xckpt.tensor_rows import Row

    Report = Callable[[int, int], object]

_MOST_FOUND = 500
_MOST_ROWS = 200  # of a module
_MOST_BINS = 24
_MOST_LINES = 12
_MOST_BRANCHES = 2_000
_WIDEST_LABEL = 80
_ROOT = "/"
#: Colours of statuses that a comparison finds.
_STYLES = {"changed": "yellow", "shape": "bold red", "only_a": "red", "unreadable": "bold red"}


class StoppedError(Exception):
    """The user selected something else."""


class Pages:
    """Pages of a browser: an open checkpoint, and its differences from another checkpoint."""

    def __init__(self, ds: xr.Dataset, other: xr.Dataset | None = None) -> None:
        from xckpt.datasets.tensors import OpenTensors

        self._ds, self._other = ds, other
        self.tensors = OpenTensors(ds)
        self._rows = {row.name: row for row in self.tensors.rows}
        names = list(self._rows)
        self.names = [names[place] for place in ascending(names)]
        self._members: dict[str, list[str]] = {}
        self._leaves: dict[str, str] = {}
        for name, (node, leaf) in tree_paths(self.names).items():
            self._members.setdefault(node, []).append(name)
            self._leaves[name] = leaf
        self._children = child_nodes(self._members)
        self._changes: pd.DataFrame | None = None

    # --- the tree --------------------------------------------------------------------------------

    def modules_in(self, node: str) -> list[str]:
        """Return the paths of the modules directly in a module."""
        return [f"{node.rstrip(_ROOT)}/{name}" for name in self._children.get(node, ())]

    def tensors_in(self, node: str) -> list[str]:
        """Return the names of the tensors directly in a module."""
        return self._members.get(node, [])

    def label(self, name: str) -> Text:
        """Return the last word of a tensor, its shape, and its status in a comparison."""
        row = self._rows[name]
        text = Text(
            word(self._leaves[name], _WIDEST_LABEL), style=_STYLES.get(self.status(name), "")
        )
        return text.append(f"  {shape_text(row.shape, row.dtype)}", style="dim")

    def status(self, name: str) -> str:
        """Return the status of a tensor in the comparison; empty without one."""
        changes = self._changes
        return "" if changes is None or name not in changes.index else changes.loc[name, "status"]

    def found(self, text: str) -> list[str]:
        """Return the names that a glob selects, or that contain a text."""
        if set(text) & set("*?["):
            chosen = set(select(self.names, text))
            return [name for name in self.names if name in chosen]
        lowered = text.casefold()
        return [name for name in self.names if lowered in name.casefold()]

    # --- pages -----------------------------------------------------------------------------------

    @cached_property
    def summary(self) -> list[Block]:
        """The summary of the file."""
        blocks: list[Block] = self._ds.ckpt._blocks()  # noqa: SLF001
        return blocks

    def module(self, node: str) -> list[Block]:
        """Return the tensors in a module and below it."""
        if node == _ROOT:
            return self.summary
        inside = f"{node}/"
        names = [
            name
            for path, members in self._members.items()
            if path == node or path.startswith(inside)
            for name in members
        ]
        rows = [self._rows[name] for name in names]
        nbytes = sum([row.nbytes for row in rows])
        title = node.strip(_ROOT).replace(_ROOT, ".")
        fields = [
            Field("tensor", "name"),
            Field("shape", "word"),
            Field("stored as", "word"),
            Field("size", "size"),
            Field("share", "bar", is_optional=True),
        ]
        cells = [
            (
                row.name[len(title) + 1 :] if row.name.startswith(title) else row.name,
                shape_text(row.shape, row.dtype),
                _stored_as(row),
                row.nbytes,
                Share(row.nbytes, nbytes),
            )
            for row in rows[:_MOST_ROWS]
        ]
        heading = Heading(title, "Module", [counted(len(rows), "tensor"), binary_size(nbytes)])
        return [heading, Table(fields, cells, more(len(rows) - _MOST_ROWS, "tensor"))]

    def tensor(self, name: str) -> list[Block]:
        """Return the facts about a tensor that need no values."""
        row, info = self._rows[name], self.tensors.structure[name]
        kind = " ".join(filter(None, (info.slot, info.module_type, info.param)))
        facts = {
            "stored as": _stored_as(row),
            "axes": ", ".join([axis or "?" for axis in info.axes]) if any(info.axes) else "",
            "role": info.role.value,
            "kind": kind,
            "belongs to": info.owner or "",
            "in Python": self.tensors.code(name),
        }
        lines = [(key, value) for key, value in facts.items() if value]
        heading = Heading(
            name, "Tensor", [shape_text(row.shape, row.dtype), counted(row.size, "element")]
        )
        blocks: list[Block] = [heading, Table([Field("", "word"), Field("", "text")], lines)]
        if self._changes is not None and name in self._changes.index:
            values = self._changes.loc[name]
            blocks.append(_values("compared", {key: values[key] for key in self._changes}))
        return blocks

    def statistics(self, name: str, report: Report) -> Iterator[Block]:
        """Yield the findings, the statistics and the histogram of a tensor."""
        from xckpt.accessor.exploring import compute, histogram

        results = compute(self.tensors, [name], report)
        if name not in results.statistics:
            yield Sentence("", "It has no statistics: its elements are not numbers.")
            return
        for finding in results.findings:
            yield Sentence(finding.severity, f"{finding.explanation} [{finding.rule}]")
        statistics = results.statistics[name]
        yield _values("statistics", statistics)
        if not statistics["min"] < statistics["max"]:
            return
        edges, counts = histogram(self.tensors, name, report)
        step = -(-len(counts) // _MOST_BINS)
        sums = [int(sum(counts[start : start + step])) for start in range(0, len(counts), step)]
        rows = [
            (float(edges[n * step]), count, Share(count, max(sums))) for n, count in enumerate(sums)
        ]
        fields = [Field("from", "number"), Field("elements", "count"), Field("", "bar")]
        yield Table(fields, rows)

    def findings(self, report: Report) -> list[Block]:
        """Return the findings of all tensors; computes statistics, which the cache keeps."""
        blocks: list[Block] = self._ds.ckpt.findings(progress=report)._blocks()  # noqa: SLF001
        return blocks

    def differences(self, report: Report) -> list[Block]:
        """Return the differences from the other checkpoint; the tree shows their statuses."""
        if self._other is None:
            return [Sentence("hint", "There is nothing to compare with: xckpt browse A B")]
        from xckpt import compare
        from xckpt.statistics import table

        result = compare(self._ds, self._other, progress=report)
        self._changes = table(result)
        # Hints name calls of Python.
        blocks: list[Block] = result.ckpt._blocks()  # noqa: SLF001
        return [b for b in blocks if not (isinstance(b, Sentence) and b.kind == "hint")]


def _stored_as(row: Row) -> str:
    return f"{row.dtype} {row.storage}".rstrip()


def _values(title: str, values: Mapping[str, Any]) -> Folded:
    """Return names and values, without the missing ones."""
    items = [
        (name, figure(value, 6) if isinstance(value, int | float) else str(value))
        for name, value in values.items()
        if value == value and value != ""  # noqa: PLR0124  not NaN
    ]
    return Folded(title, items, len(items), most_lines=_MOST_LINES)


class Browser(App[None]):
    """The application: a tree and a search on the left, a page on the right."""

    TITLE = "xckpt"
    CSS = """
    #names { width: 38%; max-width: 60; }
    Tree, OptionList { height: 1fr; }
    OptionList { display: none; }
    #page { padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("slash", "search", "Search"),
        ("escape", "tree", "Tree"),
        ("f", "findings", "Findings"),
        ("d", "differences", "Differences"),
        ("q", "quit", "Quit"),
    ]

    def __init__(self, pages: Pages, title: str) -> None:
        super().__init__()
        self.pages = pages
        self._source = title
        self._found: Sequence[str] = ()
        #: The blocks on the page.
        self.page: list[Block] = []

    def compose(self) -> ComposeResult:
        """Lay out the widgets."""
        with Horizontal():
            with Vertical(id="names"):
                yield Input(placeholder="/ search: a part of a name, or a glob")
                yield Tree[str](Text(word(self._source, _WIDEST_LABEL)), _ROOT)
                yield OptionList()
            with VerticalScroll(id="scroll"):
                yield Static(id="page")
        yield Footer()

    def on_mount(self) -> None:
        """Show the summary and the first level of modules."""
        tree = self.query_one(Tree)
        tree.root.expand()
        tree.focus()
        self.show(self.pages.summary)

    # --- the tree and the search -----------------------------------------------------------------

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[str]) -> None:
        """Add the modules and tensors of a module when it is first seen."""
        node, path = event.node, str(event.node.data)
        if node.children:
            return
        for inner in self.pages.modules_in(path):
            node.add(Text(word(inner.rpartition(_ROOT)[2], _WIDEST_LABEL)), inner)
        names = self.pages.tensors_in(path)
        for name in names[:_MOST_BRANCHES]:
            node.add_leaf(self.pages.label(name), name)
        if omitted := more(len(names) - _MOST_BRANCHES, "tensor", "search with /"):
            node.add_leaf(omitted)

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[str]) -> None:
        """Show the page of a module or a tensor."""
        node = event.node
        if node.allow_expand:
            self.workers.cancel_group(self, "page")
            self.show(self.pages.module(str(node.data)))
        elif node.data is not None:
            self.select(node.data)

    def on_input_changed(self, event: Input.Changed) -> None:
        """List the names that match, in the place of the tree."""
        matches = self.pages.found(event.value) if event.value else []
        names = self.query_one(OptionList)
        names.clear_options()
        names.add_options(
            [Option(Text(printable(n)), str(at)) for at, n in enumerate(matches[:_MOST_FOUND])]
        )
        omitted = more(len(matches) - _MOST_FOUND, "tensor")
        if omitted or (event.value and not matches):
            names.add_option(Option(omitted or "no tensor has such a name", disabled=True))
        self._found = matches
        names.display = bool(event.value)
        self.query_one(Tree).display = not event.value

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        """Go from the search to the list."""
        names = self.query_one(OptionList)
        if names.display and self._found:
            names.focus()
            names.highlighted = 0

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show the page of a tensor in the list."""
        if event.option.id is not None:
            self.select(self._found[int(event.option.id)])

    def action_search(self) -> None:
        """Begin a search."""
        self.query_one(Input).focus()

    def action_tree(self) -> None:
        """End a search."""
        self.query_one(Input).value = ""
        self.query_one(Tree).focus()

    # --- the page --------------------------------------------------------------------------------

    def show(self, blocks: Sequence[Block]) -> None:
        """Show blocks on the page."""
        self.page = list(blocks)
        width = max(40, self.query_one("#scroll").size.width - 4)
        self.query_one("#page", Static).update(
            Text.from_ansi(to_text(self.page, width, is_terminal=True))
        )

    def on_resize(self) -> None:
        """Lay out the page anew."""
        self.call_after_refresh(lambda: self.show(self.page))

    def select(self, name: str) -> None:
        """Show a tensor, and compute its statistics."""
        first = self.pages.tensor(name)
        self.show(first)
        self.work_on(first, lambda report: self.pages.statistics(name, report))

    def action_findings(self) -> None:
        """Show the findings of all tensors."""
        self.work_on([], self.pages.findings)

    def action_differences(self) -> None:
        """Show the differences from the other file, and mark them in the tree."""
        self.work_on([], self.pages.differences, self._mark)

    @work(thread=True, exclusive=True, group="page", exit_on_error=False)
    def work_on(
        self,
        first: list[Block],
        compute: Callable[[Report], Iterator[Block] | list[Block]],
        then: Callable[[], object] | None = None,
    ) -> None:
        """Compute blocks in a thread, until something else is selected, and show them."""
        worker = get_current_worker()

        def report(done: int, total: int) -> None:
            if worker.is_cancelled:
                raise StoppedError
            share = f"{done / max(1, total):.0%}"
            self.call_from_thread(self.show, [*first, Sentence("hint", f"computing: {share}")])

        try:
            report(0, 1)
            blocks = list(compute(report))
        except StoppedError:
            return
        except Exception as error:  # noqa: BLE001  shown to the user, as there is no caller
            blocks = [Sentence("error", str(error) or type(error).__name__)]
        if not worker.is_cancelled:
            self.call_from_thread(self.show, [*first, *blocks])
            if then is not None:
                self.call_from_thread(then)

    def _mark(self) -> None:
        """Colour the tensors in the tree by their statuses."""
        nodes: list[TreeNode[str]] = [self.query_one(Tree).root]
        while nodes:
            node = nodes.pop()
            nodes += node.children
            if not node.allow_expand and node.data is not None:
                node.set_label(self.pages.label(node.data))
