"""Measurements of a benchmark, and files of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cupyfa import store
from cupyfa.bench import timing
from cupyfa.numerics.shown import Shown, ShownRow
from cupyfa.operations import OPERATIONS
from cupyfa.problem import Problem

BASELINE, BEFORE = "baseline", "rung before"  # keys of factors; peers are others


@dataclass(frozen=True, repr=False)
class Measurement(ShownRow):
    """A kernel, or a peer, on one problem.

    milliseconds: of every timed call, in rounds with the other rows; empty if ``note`` explains why
        it was not timed.
    passed: False for a wrong result, None without a result.
    checked: the fraction of rows compared with the reference.
    peak: the device's peak rate in TFLOP/s, for a softmax and for decoding in GB/s.
    factors: speedups over others, medians of the ratios over the rounds.
    code: a digest of the compiled text and its launches; empty for a peer.
    """

    kernel: str
    operation: str
    problem: Problem
    constants: Mapping[str, int] = field(default_factory=dict)
    milliseconds: Sequence[float] = ()
    passed: bool | None = None
    checked: float | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    peak: float | None = None
    factors: Mapping[str, float | None] = field(default_factory=dict)
    note: str = ""
    code: str = ""

    @property
    def time(self) -> float | None:
        """The median, in milliseconds."""
        return median(self.milliseconds) if self.milliseconds else None

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return OPERATIONS[self.operation].flops(self.problem)

    @property
    def tflops(self) -> float | None:
        """10¹² floating-point operations a second."""
        return self.flops / self.time / 1e9 if self.time else None

    @property
    def bandwidth(self) -> float | None:
        """GB/s, every input read once and every output written once; of a cache the keys and values
        that sequences have, read once.
        """
        p = self.problem
        moved = OPERATIONS[self.operation].bytes(p)
        if p.cached is not None:
            moved = p.cached.total * p.kv_heads * (p.d + p.dv) * p.itemsize
        return moved / self.time / 1e6 if self.time else None

    @property
    def percent_of_peak(self) -> float | None:
        """The rate in percent of the device's peak."""
        is_memory = self.operation == "softmax" or self.problem.cached is not None
        rate = self.bandwidth if is_memory else self.tflops
        return 100 * rate / self.peak if rate and self.peak else None

    def row(self) -> dict[str, Any]:
        """One row of a table."""
        return {
            "kernel": self.kernel,
            **self.problem.row(),
            "constants": dict(self.constants),
            "ms": self.time,
            "spread_%": 100 * timing.spread(self.milliseconds) if self.milliseconds else None,
            "launches": len(self.milliseconds),
            "TFLOP/s": self.tflops,
            "GB/s": self.bandwidth,
            "%_of_peak": self.percent_of_peak,
            "registers": self.registers,
            "spilled_bytes": self.spilled_bytes,
            **{f"x_{name.replace(' ', '_')}": factor for name, factor in self.factors.items()},
            "checked_%": None if self.checked is None else 100 * self.checked,
            "note": self.note,
        }

    def record(self) -> dict[str, Any]:
        """All fields, for a file."""
        return {**asdict(self), "problem": self.problem.record()}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Measurement:
        """The measurement of a ``record()``."""
        sizes = {**record["problem"], "is_softmax": record["operation"] == "softmax"}
        made = cls(**{**record, "problem": Problem.of_record(sizes)})
        made.row()
        return made


@dataclass(frozen=True, repr=False)
class Results(Shown):
    """Rows, and the device, versions and options they were measured with."""

    environment: Mapping[str, str]
    rows: Sequence[Measurement]

    def save(self, path: str | Path) -> None:
        """Writes a JSON file, whole or not at all."""
        rows = [row.record() for row in self.rows]
        content = {"environment": dict(self.environment), "rows": rows}
        store.write_whole(Path(path), json.dumps(content, indent=1).encode())

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Reads a file of ``save``. Raises OSError if that fails, ValueError for other files."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = [Measurement.of_record(record) for record in content["rows"]]
            return cls(dict(content["environment"]), rows)
        except OSError as error:
            raise type(error)(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(
                f"{path} was not written by cupyfa bench --save ({type(error).__name__}: {error})"
            ) from None
