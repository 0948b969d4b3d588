"""Tracks the running call of a measurement so that another thread can detect a hung kernel.

A process cannot stop a kernel that hangs on its GPU. The watching thread therefore ends the
process, and ``Watch`` holds the state from which a new process continues without the hung kernel.
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
    """A measurement's running call and finished problems.

    timeout: seconds that a call may take.
    hung: calls that did not return in an earlier process; they are skipped.
    done: number of finished problems.
    began: when the current problem began, by ``monotonic``, a clock that all processes share.
    rows: a benchmark's rows for the finished problems.
    running: the running call and when it began.
    """

    timeout: float = inf
    hung: Sequence[str] = ()
    done: int = 0
    began: float = 0.0
    rows: Sequence[Measurement] = ()
    running: tuple[str, float] | None = field(default=None, init=False)

    @property
    def verdict(self) -> str:
        """The note that tables print for a call that did not return."""
        return f"timed out after {self.timeout:g} s"

    def begins(self, call: str) -> None:
        """Records that a call begins, and that the previous call has ended."""
        self.running = call, monotonic()

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Returns a context for making calls; on exit it records that no call is running."""
        try:
            yield
        finally:
            self.running = None

    @property
    def overdue(self) -> str | None:
        """The running call if it has exceeded the timeout, else None."""
        call, since = self.running or ("", inf)
        return call if monotonic() - since > self.timeout else None

    def save(self, path: Path, hung: str) -> None:
        """Writes the state from which another process continues without the hung call."""
        state = {
            "hung": [*self.hung, hung],
            "done": self.done,
            "began": self.began,
            "rows": [row.record() for row in self.rows],
        }
        path.write_text(json.dumps(state))

    def load(self, path: Path) -> None:
        """Restores the state that an earlier process saved."""
        state = json.loads(path.read_text())
        self.hung, self.done, self.began = state["hung"], state["done"], state["began"]
        self.rows = [Measurement.of_record(record) for record in state["rows"]]
