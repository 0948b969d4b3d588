"""Benchmark measurements, and the files that store them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cupyfa import cache_folder
from cupyfa.cache_folder import records
from cupyfa.lab.bench import timing
from cupyfa.lab.verify.problem_records import problem_of_record, record_of_problem
from cupyfa.ladder.operations import OPERATIONS
from cupyfa.numerics.shown import Shown, ShownRow
from cupyfa.problem.problem import Problem

_MOST_BYTES = 256 << 20  # maximum size of a results file
BASELINE, BEFORE = "baseline", "rung before"  # keys of factors; all other keys are peers


@dataclass(frozen=True, repr=False)
class Measurement(ShownRow):
    """The measurement of a kernel or a peer on one problem.

    milliseconds: times of all timed calls, one per round; empty if ``note`` explains why the row
        was not timed.
    passed: False for a wrong result, None without a result.
    checked: fraction of rows compared with the reference.
    peak: the device's peak rate in TFLOP/s, or in GB/s for a softmax and for decoding.
    factors: speedups over other kernels and peers, as medians of the ratios per round.
    code: digest of the compiled source and its launches; empty for a peer.
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
        """The median time in milliseconds."""
        return median(self.milliseconds) if self.milliseconds else None

    @property
    def flops(self) -> int:
        """The number of floating-point operations."""
        return OPERATIONS[self.operation].flops(self.problem)

    @property
    def tflops(self) -> float | None:
        """The rate in 10¹² floating-point operations per second."""
        return self.flops / self.time / 1e9 if self.time else None

    @property
    def bandwidth(self) -> float | None:
        """The bandwidth in GB/s, counting one read of every input and one write of every output.

        Of a KV cache, only the keys and values that the new tokens attend to are counted.
        """
        p = self.problem
        moved = OPERATIONS[self.operation].bytes(p)
        if p.cached is not None:
            most = p.N if p.left is None else p.left + p.M
            keys = sum(min(n, most) for n in p.cached.rows)
            moved = keys * p.kv_heads * (p.d + p.dv) * p.itemsize
        return moved / self.time / 1e6 if self.time else None

    @property
    def percent_of_peak(self) -> float | None:
        """The rate as a percentage of the device's peak."""
        is_memory = self.operation == "softmax" or self.problem.cached is not None
        rate = self.bandwidth if is_memory else self.tflops
        return 100 * rate / self.peak if rate and self.peak else None

    def row(self) -> dict[str, Any]:
        """Returns the measurement as a table row."""
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
        """Returns all fields as plain values, for a file."""
        return {**asdict(self), "problem": record_of_problem(self.problem)}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Measurement:
        """Restores a measurement from a record. Raises ValueError or TypeError if it is invalid."""
        given = _ROW(dict(record))
        sizes = {**given["problem"], "is_softmax": given["operation"] == "softmax"}
        made = cls(**{**given, "problem": problem_of_record(sizes)})
        made.row()
        return made


# Fields of a row in a file. Files written by older versions lack the optional fields.
_POSITIVE = records.number(0.0)
_ROW = records.record(
    {
        "kernel": records.text(),
        "operation": records.one_of(OPERATIONS),
        "problem": records.mapping_of(lambda value: value),
    },
    {
        "constants": records.mapping_of(records.whole(0, records.INT32)),
        "milliseconds": records.list_of(_POSITIVE),
        "passed": records.optional(records.flag),
        "checked": records.optional(records.number(0.0, 1.0)),
        **dict.fromkeys(("registers", "spilled_bytes"), records.optional(records.whole())),
        "peak": records.optional(_POSITIVE),
        "factors": records.mapping_of(records.optional(_POSITIVE)),
        **dict.fromkeys(("note", "code"), records.text()),
    },
    only=True,
)
_RESULTS = records.record(
    {
        "environment": records.mapping_of(records.text()),
        "rows": records.list_of(records.mapping_of(lambda value: value)),
    }
)


@dataclass(frozen=True, repr=False)
class Results(Shown):
    """Measured rows, with the device, versions and options of the measurement."""

    environment: Mapping[str, str]
    rows: Sequence[Measurement]

    @property
    def device(self) -> str:
        """The device's name, or "an unknown device" if the file does not name it."""
        return self.environment.get("device", "an unknown device")

    def save(self, path: str | Path) -> None:
        """Writes a JSON file atomically."""
        rows = [row.record() for row in self.rows]
        content = {"environment": dict(self.environment), "rows": rows}
        cache_folder.write_whole(Path(path), json.dumps(content, indent=1).encode())

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Reads a file written by ``save``.

        Raises OSError if the file cannot be read, and ValueError if it has another format."""
        with records.refusing(f"{path} was not written by cupyfa bench --save"):
            content = _RESULTS(records.parsed(records.read_file(path, _MOST_BYTES)))
            return cls(content["environment"], list(map(Measurement.of_record, content["rows"])))
