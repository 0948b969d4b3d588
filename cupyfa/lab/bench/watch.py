"""Tells another thread which call a measurement runs, so that it notices a kernel that hangs.

A kernel that hangs on a GPU cannot be stopped by the process that launched it. The watching thread
ends the process; ``Watch`` has the state with which another process continues without that kernel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import monotonic

from cupyfa.lab.bench.results import Measurement


@dataclass
class Watch:
    """The running call of a measurement, and the finished problems.

    timeout: the seconds that one call may take.
    hung: calls that did not return in an earlier process; they are not made again.
    done: the number of finished problems.
    began: when the problem began, by ``monotonic``, a clock that all processes share.
    rows: the rows of the finished problems of a benchmark.
    running: the call that runs now, and when it began.
    """

    timeout: float = inf
    hung: Sequence[str] = ()
    done: int = 0
    began: float = 0.0
    rows: Sequence[Measurement] = ()
    running: tuple[str, float] | None = field(default=None, init=False)

    @property
    def verdict(self) -> str:
        """The note on a call that did not return."""
        return f"timed out after {self.timeout:g} s"

    def begins(self, call: str) -> None:
        """Notes that a call begins, and that the one before it has ended."""
        self.running = call, monotonic()

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Returns the context in which calls are made: after it no call runs."""
        try:
            yield
        finally:
            self.running = None

    @property
    def overdue(self) -> str | None:
        """Returns the call that runs for too long, or None."""
        call, since = self.running or ("", inf)
        return call if monotonic() - since > self.timeout else None

    def save(self, path: Path, hung: str) -> None:
        """Writes the state with which another process continues without a call."""
        state = {
            "hung": [*self.hung, hung],
            "done": self.done,
            "began": self.began,
            "rows": [row.record() for row in self.rows],
        }
        path.write_text(json.dumps(state))

    def load(self, path: Path) -> None:
        """Reads what an earlier process saved."""
        state = json.loads(path.read_text())
        self.hung, self.done, self.began = state["hung"], state["done"], state["began"]
        self.rows = [Measurement.of_record(record) for record in state["rows"]]
