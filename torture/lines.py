"""Coverage of the package by inputs, cheap enough for many inputs.

Python 3.12 and later report each line once, at no further cost. In Python 3.11 every 24th input is
traced, except in functions whose lines were all reached. The lines in the traceback of an error are
always counted.
"""

from __future__ import annotations

import dis
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xckpt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

__all__ = ["Lines"]

_PACKAGE = str(Path(xckpt.__file__).parent)
_TRACED_EACH = 24


class Lines:
    """Lines of the package that were reached so far."""

    def __init__(self) -> None:
        self.reached: set[tuple[str, int]] = set()
        self._missing: dict[CodeType, set[int]] = {}
        self._count = 0
        self._monitoring: Any = getattr(sys, "monitoring", None)
        if self._monitoring is not None:
            self._tool = self._monitoring.COVERAGE_ID
            self._monitoring.use_tool_id(self._tool, "torture")
            line = self._monitoring.events.LINE
            self._monitoring.register_callback(self._tool, line, self._told)
            self._monitoring.set_events(self._tool, line)
            self._monitoring.restart_events()

    def __len__(self) -> int:
        return len(self.reached)

    def close(self) -> None:
        """Stop recording."""
        if self._monitoring is not None:
            self._monitoring.free_tool_id(self._tool)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the lines that an input reaches; in Python 3.11 only for some inputs."""
        self._count += 1
        if self._monitoring is not None or self._count % _TRACED_EACH:
            yield
            return
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)

    def came_through(self, error: BaseException) -> None:
        """Count the lines in the traceback of an error and of its causes."""
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_filename.startswith(_PACKAGE):
                self.reached.add((code.co_filename, trace.tb_lineno))
            trace = trace.tb_next
        if error.__cause__ is not None:
            self.came_through(error.__cause__)

    def _told(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(_PACKAGE):
            self.reached.add((code.co_filename, line))
        return self._monitoring.DISABLE

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        missing = self._missing.get(code)
        if missing is None:
            is_ours = code.co_filename.startswith(_PACKAGE)
            lines = {line for _, line in dis.findlinestarts(code) if line} if is_ours else set()
            missing = self._missing[code] = lines - {code.co_firstlineno}
        if not missing:
            return None

        def reached(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line" and frame.f_lineno in missing:
                missing.discard(frame.f_lineno)
                self.reached.add((code.co_filename, frame.f_lineno))
            return reached

        return reached
