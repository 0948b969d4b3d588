"""Failures of a check: the outcome, the command that repeats it, and the file that stores it."""

import hashlib
import io
import json
import re
import shlex
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cupyfa import store
from cupyfa.dtypes import INPUTS
from cupyfa.numerics.tolerance import Verdict
from cupyfa.operations import OPERATIONS
from cupyfa.problem import Problem
from cupyfa.verify.case import Case

RIGHT, UNSUPPORTED, NO_MEMORY = "right", "not supported", "out of memory"
# All other kinds of outcomes are failures:
WRONG_RESULT = "wrong result"
WROTE_OUTSIDE = "wrote outside"
DIFFERS = "differs between runs"
FAULT = "simulator fault"
DEVICE_ERROR = "device error"
DEVICE_LOST = "device lost"
COMPILE_ERROR = "compile error"
ERROR = "error"
NO_ANSWER = "no answer"
DIED = "the process died"
STEPS = PREPARING, RUNNING = "preparing", "running"  # no outcome yet
NOT_RUN = (UNSUPPORTED, NO_MEMORY)
LOST = (NO_ANSWER, DIED, DEVICE_LOST)  # without a result

_FORMAT = "cupyfa failure 2"
_RESULTS = ("actual_", "expected_", "bound_")  # what names of arrays begin with that are no inputs

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one kernel on one case; arrays are those of a failure's file, if asked for."""

    kernel: str
    kind: str
    message: str = ""
    verdicts: tuple[Verdict, ...] = ()
    constants: Mapping[str, int] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict, repr=False, compare=False)

    @property
    def failed(self) -> bool:
        """Whether the kernel is wrong."""
        return self.kind not in (RIGHT, *NOT_RUN)

    @property
    def worst(self) -> Verdict | None:
        """The verdict with the largest error / bound."""
        return max(self.verdicts, key=lambda verdict: verdict.ratio, default=None)


@dataclass(frozen=True)
class Failure:
    """A kernel that failed on a case, and the command that repeats it.

    found_on: the original case if ``case`` was made smaller.
    file: for ``replay``.
    cases: how many failures have this command; reduced to small cases, several may be equal.
    """

    case: Case
    outcome: Outcome
    command: str
    found_on: Case | None = None
    file: Path | None = None
    cases: int = 1

    def row(self) -> dict[str, Any]:
        """The failure as a row of a table."""
        worst = self.outcome.worst
        return {
            "kernel": self.outcome.kernel,
            "failure": self.outcome.kind,
            "cases": self.cases,
            "output": worst and worst.name,
            **{name: worst and getattr(worst, name) for name in ("error", "bound", "ratio")},
            "worst_at": worst and list(worst.index),
            "case": str(self.case),
            "found_on": self.found_on and str(self.found_on),
            "message": self.outcome.message,
            "command": self.command,
            "file": self.file and str(self.file),
        }


@dataclass(frozen=True)
class Stored:
    """A failure in a file.

    schedule: the simulator's order of threads. has_name: whether the kernel is found by its name.
    multiprocessors: of the simulator, if not as many as usual.
    """

    case: Case
    outcome: Outcome
    reruns: int = 0
    schedule: int | None = None
    has_name: bool = True
    made_with: Mapping[str, str] = field(default_factory=dict)
    multiprocessors: int | None = None

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """The inputs, contiguous, and those of the kernel's own."""
        arrays = self.outcome.arrays
        return {name: x for name, x in arrays.items() if not name.startswith(_RESULTS)}


def command(case: Case, outcome: Outcome, options: Mapping[str, Any]) -> str:
    """The command line that repeats an outcome, with the options that have a value."""
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    fixed = [f"--tile={name}={value}" for name, value in outcome.constants.items()]
    return shlex.join(["cupyfa", "run", outcome.kernel, *case.options(), *given, *fixed])


def write(folder: Path, stored: Stored, command: str) -> Path | None:
    """Writes a failure for ``read``; returns None without arrays. Raises OSError."""
    outcome = stored.outcome
    if not outcome.arrays:
        return None
    about = {
        **{name: x for name, x in vars(stored).items() if name not in ("case", "outcome")},
        **{name: x for name, x in vars(outcome).items() if name != "arrays"},
        "format": _FORMAT,
        "case": {**vars(stored.case), "problem": stored.case.problem.record()},
        "verdicts": [vars(verdict) for verdict in outcome.verdicts],
        "command": command,
        "dtypes": {name: x.dtype.name for name, x in outcome.arrays.items()},
    }
    content = io.BytesIO()
    arrays = {  # files do not have bfloat16, so its bits are written
        name: np.ascontiguousarray(x).view(np.uint16) if x.dtype.kind == "V" else x
        for name, x in outcome.arrays.items()
    }
    plain = json.dumps(about, default=dict)
    np.savez(content, allow_pickle=False, about=np.array(plain), **arrays)
    name = re.sub(r"[^A-Za-z0-9_]+", "-", Path(outcome.kernel).name).strip("-")
    digest = hashlib.sha256(command.encode()).hexdigest()[:8]
    path = folder / f"{name}-{digest}.npz"
    store.write_whole(path, content.getvalue())
    return path


def read(path: str | Path) -> Stored:
    """The failure in a file of ``write``. Raises OSError, or ValueError for other files."""
    try:
        with Path(path).open("rb") as file:
            if not zipfile.is_zipfile(file):  # np.load would read it as a pickle
                raise ValueError("it is not an .npz file")
        with np.load(path, allow_pickle=False) as members:
            about = json.loads(str(members["about"]))
            if about["format"] != _FORMAT:
                raise ValueError(f"its format is {about['format']!r}")
            arrays = {
                name: members[name].view(INPUTS[dtype].numpy if dtype in INPUTS else dtype)
                for name, dtype in about["dtypes"].items()
            }
        outcome = Outcome(
            str(about["kernel"]),
            str(about["kind"]),
            str(about["message"]),
            tuple(Verdict(**{**x, "index": tuple(x["index"])}) for x in about["verdicts"]),
            {str(name): int(x) for name, x in about["constants"].items()},
            arrays,
        )
        case = Case(**{**about["case"], "problem": Problem.of_record(about["case"]["problem"])})
        more = {name: about[name] for name in ("schedule", "has_name", "made_with")}
        more |= {"multiprocessors": about.get("multiprocessors")}
        stored = Stored(case, outcome, int(about["reruns"]), **more)
        for name, wanted in OPERATIONS[case.operation].inputs_of(case.problem).items():
            x = stored.inputs[name]
            if x.shape != wanted.shape(case.problem) or x.dtype != wanted.dtype(case.problem):
                raise ValueError(f"{name} is {x.dtype} {x.shape} in {case.problem}")
        return stored
    except OSError:
        raise
    except Exception as error:  # a damaged file can raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path} is damaged, or not a file of `cupyfa check` ({reason})") from None
