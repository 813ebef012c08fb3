"""The side of the browser of an explorer: it has the rows, sends messages, and hears results."""

from __future__ import annotations

from threading import enumerate as enumerate_threads
from typing import Any

import numpy as np

LONG = 20.0  # seconds after which a test has failed


class View:
    """The state and the messages that a view of an explorer has received."""

    def __init__(self, explorer: Any) -> None:
        self.explorer = self.table = explorer
        self.told: list[tuple[dict[str, Any], list[Any]]] = []
        self.table.send = lambda message, buffers: self.told.append((message, buffers))
        self.threads = set(enumerate_threads())  # other ones compute

    @property
    def state(self) -> dict[str, Any]:
        """The synchronised traits."""
        state: dict[str, Any] = self.table.get_state()
        return state

    def names(self) -> list[str]:
        """Return the names of the rows."""
        text, start, names = self.state["_names"].decode().encode("utf-16-le"), 0, []
        for length in np.frombuffer(self.state["_lengths"], "<u4").tolist():
            names.append(text[start : start + 2 * length].decode("utf-16-le"))
            start += 2 * length
        assert start == len(text)
        return names

    def ask(self, message: dict[str, Any], *rows: int) -> None:
        """Send a message."""
        data = {"method": "custom", "content": message}
        buffers = [np.array(rows, "<u4").tobytes()]
        self.table.comm.handle_msg({"content": {"data": data}, "buffers": buffers})

    def click(self, row: int) -> None:
        """Select a row."""
        data = {"method": "update", "state": {"_row": row}}
        self.table.comm.handle_msg({"content": {"data": data}, "buffers": []})

    def done(self) -> None:
        """Wait for all computations."""
        # A thread that starts is listed before it can be joined.
        while threads := [t for t in enumerate_threads() if t not in self.threads and t.ident]:
            threads[0].join(LONG)
            assert not threads[0].is_alive()

    def statistics(self) -> dict[int, list[float]]:
        """Return all reported statistics, by row."""
        statistics_by_row: dict[int, list[float]] = {}
        for message, buffers in self.told:
            if message["tell"] == "statistics":
                rows = np.frombuffer(buffers[0], "<u4").tolist()
                values = np.frombuffer(buffers[1], "<f8").reshape(len(rows), -1).tolist()
                statistics_by_row.update(zip(rows, values, strict=True))
        return statistics_by_row

    def findings(self) -> list[tuple[Any, ...]]:
        """Return all reported findings."""
        return [finding for message, _ in self.told for finding in message.get("found", ())]
