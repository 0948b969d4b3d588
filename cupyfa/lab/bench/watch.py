"""What a measurement runs now, so that another thread can see that a kernel does not return.

A kernel that hangs on a GPU cannot be stopped by the process that launched it, so whoever watches
ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from time import monotonic


@dataclass
class Watch:
    """The call that runs now, and when it began; ``timeout`` is the seconds that it may take."""

    timeout: float = inf
    running: tuple[str, float] | None = field(default=None, init=False)

    def begins(self, call: str) -> None:
        """Notes that a call begins, and that the one before it has ended."""
        self.running = call, monotonic()

    def begins_one_of(self, calls: Sequence[str], number: int) -> None:
        """Notes that one of these begins."""
        self.begins(calls[number])

    @contextmanager
    def calls(self) -> Iterator[None]:
        """The context in which calls are made: after it none runs."""
        try:
            yield
        finally:
            self.running = None

    @property
    def overdue(self) -> str | None:
        """The call that runs for too long."""
        call, since = self.running or ("", inf)
        return call if monotonic() - since > self.timeout else None
