"""Failures of a check: their outcomes, commands that reproduce them, and files that store them."""

import hashlib
import io
import json
import math
import re
import shlex
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cupyfa import cache_folder
from cupyfa.cache_folder import records
from cupyfa.lab.verify.case import LAYOUTS, TOKENS, VALUES, Case
from cupyfa.lab.verify.problem_records import problem_of_record, record_of_problem
from cupyfa.ladder.operations import OPERATIONS, Input
from cupyfa.numerics.shown import Shown, ShownRow
from cupyfa.numerics.tolerance import Verdict
from cupyfa.problem.dtypes import INPUTS
from cupyfa.problem.optional_inputs import LENGTHS, PADDED, PAGE_TABLE, STARTS, USED
from cupyfa.problem.problem import Problem
from cupyfa.runtime.simulator import MOST_MULTIPROCESSORS

RIGHT, UNSUPPORTED, NO_MEMORY = "right", "not supported", "out of memory"
# Kinds of failures:
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
STEPS = PREPARING, RUNNING = "preparing", "running"  # steps that precede an outcome
FAILED = (
    *(WRONG_RESULT, WROTE_OUTSIDE, DIFFERS, FAULT, DEVICE_ERROR, DEVICE_LOST, COMPILE_ERROR),
    *(ERROR, NO_ANSWER, DIED),
)
NOT_RUN = (UNSUPPORTED, NO_MEMORY)
LOST = (NO_ANSWER, DIED, DEVICE_LOST)  # failures that return no result

_FORMAT = "cupyfa failure 2"
_RESULTS = ("actual_", "expected_", "bound_")  # name prefixes of arrays that are not inputs
MOST_RERUNS = 1000  # maximum number of reruns that a file may request
_MOST_BYTES = 4 << 30  # maximum size of a file, and of its problem's results
_MOST_ARRAYS = 1000

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, repr=False)
class Outcome(Shown):
    """The outcome of one kernel on one case, optionally with the arrays to store in a file."""

    kernel: str
    kind: str
    message: str = ""
    verdicts: tuple[Verdict, ...] = ()
    constants: Mapping[str, int] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict, repr=False, compare=False)

    @property
    def failed(self) -> bool:
        """Whether the kernel was run and failed."""
        return self.kind not in (RIGHT, *NOT_RUN)

    @property
    def worst(self) -> Verdict | None:
        """The verdict with the largest error / bound."""
        return max(self.verdicts, key=lambda verdict: verdict.ratio, default=None)


@dataclass(frozen=True, repr=False)
class Failure(ShownRow):
    """A kernel's failure on a case, with the command that reproduces it.

    found_on: the original case if ``case`` was shrunk.
    file: where the failure is stored for ``replay``.
    cases: number of failures with this command, since several may shrink to the same case.
    """

    case: Case
    outcome: Outcome
    command: str
    found_on: Case | None = None
    file: Path | None = None
    cases: int = 1

    def row(self) -> dict[str, Any]:
        """Returns the failure as a table row."""
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


@dataclass(frozen=True, repr=False)
class Stored(Shown):
    """A failure as stored in a file.

    schedule: the simulator's thread order. has_name: whether the kernel can be found by name.
    multiprocessors: number of multiprocessors of the simulator; None for its default.
    """

    case: Case
    outcome: Outcome
    reruns: int = 0
    schedule: int | None = None
    has_name: bool = True
    made_with: Mapping[str, str] = field(default_factory=dict)
    multiprocessors: int | None = None

    @property
    def environment(self) -> str:
        """The device and the cupyfa version on which the failure was found, in words."""
        device, version = (self.made_with.get(x) for x in ("device", "cupyfa"))
        return f"{device or 'an unknown device'} with cupyfa {version or 'of unknown version'}"

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """The inputs as contiguous arrays, including additional inputs of a custom kernel."""
        arrays = self.outcome.arrays
        return {name: x for name, x in arrays.items() if not name.startswith(_RESULTS)}


def command(case: Case, outcome: Outcome, options: Mapping[str, Any]) -> str:
    """Returns the command line that reproduces an outcome; options that are None are omitted."""
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    fixed = [f"--tile={name}={value}" for name, value in outcome.constants.items()]
    return shlex.join(["cupyfa", "run", outcome.kernel, *case.options(), *given, *fixed])


def write(folder: Path, stored: Stored, command: str) -> Path | None:
    """Writes a failure to a file; returns its path, or None if no arrays were kept.

    Raises OSError if the file cannot be written."""
    outcome = stored.outcome
    if not outcome.arrays:
        return None
    about = {
        **{name: x for name, x in vars(stored).items() if name not in ("case", "outcome")},
        "reruns": min(stored.reruns, MOST_RERUNS),
        **{name: x for name, x in vars(outcome).items() if name != "arrays"},
        "format": _FORMAT,
        "case": {**vars(stored.case), "problem": record_of_problem(stored.case.problem)},
        "verdicts": [vars(verdict) for verdict in outcome.verdicts],
        "command": command,
        "dtypes": {name: x.dtype.name for name, x in outcome.arrays.items()},
    }
    content = io.BytesIO()
    arrays = {  # .npz files cannot hold bfloat16, so its bits are written
        name: np.ascontiguousarray(x).view(np.uint16) if x.dtype.kind == "V" else x
        for name, x in outcome.arrays.items()
    }
    plain = json.dumps(about, default=dict)
    np.savez(content, allow_pickle=False, about=np.array(plain), **arrays)
    name = re.sub(r"[^A-Za-z0-9_]+", "-", Path(outcome.kernel).name).strip("-")
    digest = hashlib.sha256(command.encode()).hexdigest()[:8]
    path = folder / f"{name}-{digest}.npz"
    cache_folder.write_whole(path, content.getvalue())
    return path


def read(path: str | Path) -> Stored:
    """Reads a failure from a file that ``write`` wrote.

    Raises OSError if the file cannot be read, and ValueError if it has another format.

    The file is not trusted: nothing in it is executed, the type and range of each field are
    checked, and arrays take no more memory than the file has bytes.
    """
    with records.refusing(f"{path} is damaged, or not a file of `cupyfa check`"):
        members = _members(path)
        written = members.pop("about")
        if written.dtype.kind != "U" or written.shape:
            raise ValueError(
                f"the entry 'about' is {written.dtype} {written.shape}; it must be a string"
            )
        about = _ABOUT(records.parsed(str(written)))
        arrays = {name: _viewed(members, name, x) for name, x in about["dtypes"].items()}
        outcome = Outcome(
            about["kernel"],
            about["kind"],
            about["message"],
            tuple(Verdict(**{**x, "index": tuple(x["index"])}) for x in about["verdicts"]),
            about["constants"],
            arrays,
        )
        case = Case(**{**about["case"], "problem": problem_of_record(about["case"]["problem"])})
        names = ("reruns", "schedule", "has_name", "made_with", "multiprocessors")
        stored = Stored(case, outcome, **{name: about.get(name) for name in names})
        _check_arrays(stored)
        return stored


_DTYPES = (*INPUTS, "bool", *(f"{x}{n}" for x in ("int", "uint") for n in (8, 16, 32, 64)))
_SIZE = records.whole(0, records.INT32)
_ANY = records.number(finite=False)
_ABOUT = records.record(
    {
        "format": records.one_of([_FORMAT]),
        "kernel": records.text(),
        "kind": records.one_of([RIGHT, *NOT_RUN, *FAILED]),
        "message": records.text(1 << 24),  # compiler output can be long
        "verdicts": records.list_of(
            records.record(
                {
                    "name": records.text(),
                    **dict.fromkeys(("error", "bound", "ratio", "actual", "expected"), _ANY),
                    "index": records.list_of(_SIZE, 64),
                    "unwritten": records.whole(),
                }
            ),
            _MOST_ARRAYS,
        ),
        "constants": records.mapping_of(records.whole(-records.INT32, records.INT32)),
        "dtypes": records.mapping_of(records.one_of(_DTYPES), _MOST_ARRAYS),
        "case": records.record(
            {
                "operation": records.one_of(OPERATIONS),
                "problem": records.mapping_of(lambda value: value),
                "seed": records.whole(0, 2**256),
                "values": records.one_of(VALUES),
                "layout": records.one_of(LAYOUTS),
            },
            {"tokens": records.one_of(TOKENS)},
        ),
        "reruns": records.whole(0, MOST_RERUNS),
        "schedule": records.optional(records.whole()),
        "has_name": records.flag,
        "made_with": records.mapping_of(records.text()),
    },
    {"multiprocessors": records.optional(records.whole(1, MOST_MULTIPROCESSORS))},
)


def _members(path: str | Path) -> dict[str, np.ndarray]:
    """Reads an .npz file's arrays, rejecting objects. Raises ValueError if they are too large.

    ``write`` does not compress, so all arrays together are no larger than the file.
    """
    with Path(path).open("rb") as file:
        if not zipfile.is_zipfile(file):  # np.load would read it as a pickle
            raise ValueError("the file is not an .npz file")
        size = file.seek(0, io.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            found = archive.infolist()
            if any(x.compress_type != zipfile.ZIP_STORED for x in found):
                raise ValueError("the arrays are compressed, but must be stored uncompressed")
            if size > _MOST_BYTES or sum(x.file_size for x in found) > size:
                raise ValueError("the arrays are too large")
            if len({x.filename for x in found}) < len(found) or len(found) > _MOST_ARRAYS:
                raise ValueError(
                    "the file contains too many arrays, or two arrays with the same name"
                )
            return {x.filename.removesuffix(".npy"): _array(archive, x) for x in found}


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Reads an array from an archive. Raises ValueError unless its size matches its header."""
    with archive.open(member) as file:
        content = io.BytesIO(file.read(member.file_size + 1))
    version = np.lib.format.read_magic(content)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in read_header:
        raise ValueError(
            f"{member.filename} has version {version} of NumPy's format; only 1.0 and 2.0 are read"
        )
    shape, in_columns, dtype = read_header[version](content)
    if dtype.hasobject or dtype.kind not in "biufU" or dtype.subdtype:
        raise ValueError(f"{member.filename} has dtype {dtype}; only numbers and strings are read")
    left = content.getbuffer()[content.tell() :]
    if math.prod(shape) * dtype.itemsize != len(left):
        raise ValueError(
            f"{member.filename} contains {len(left):,} bytes, which do not match {dtype} {shape}"
        )
    found = np.frombuffer(left, dtype, math.prod(shape)) if len(left) else np.empty(0, dtype)
    return found.reshape(shape, order="F" if in_columns else "C")


def _viewed(members: Mapping[str, np.ndarray], name: str, dtype: str) -> np.ndarray:
    """Returns a stored array, viewed as its original dtype."""
    if name not in members:
        raise ValueError(f"the array {name} is missing")
    found, wanted = members[name], INPUTS[dtype].numpy if dtype in INPUTS else np.dtype(dtype)
    as_bits = np.dtype(f"u{wanted.itemsize}") if wanted.kind == "V" else wanted
    if found.dtype != as_bits:
        raise ValueError(f"{name} is {found.dtype}; it must be {as_bits}")
    return found.view(wanted)


def _check_arrays(stored: Stored) -> None:
    """Raises ValueError if the inputs do not fit the problem, or if its results are too large."""
    p, inputs = stored.case.problem, stored.inputs
    operation = OPERATIONS[stored.case.operation]
    require_inputs(inputs, operation.inputs_of(p), p)
    results = sum(x.bytes(p) for x in operation.outputs_of(p).values())
    if results > _MOST_BYTES:
        raise ValueError(f"the results of {p} need {results:,} bytes; the limit is {_MOST_BYTES:,}")
    _check_lengths(inputs, p)


def require_inputs(arrays: Arrays, wanted: Mapping[str, Input], p: Problem) -> None:
    """Raises ValueError unless all required inputs exist with the right shapes and dtypes."""
    for name, x in wanted.items():
        if name not in arrays:
            raise ValueError(f"the array {name} is missing")
        array = arrays[name]
        if array.shape != x.shape(p) or array.dtype != x.dtype(p):
            raise ValueError(f"{name} is {array.dtype} {array.shape}, which does not match {p}")


def _check_lengths(inputs: Arrays, p: Problem) -> None:
    """Raises ValueError for lengths and pages that would make kernels read outside arrays."""
    given = {
        name: inputs[f"mods.{name}"].astype(np.int64)
        for name in (*LENGTHS, PAGE_TABLE)
        if f"mods.{name}" in inputs
    }
    for starts, used, padded, rows in zip(STARTS, USED, PADDED, (p.M, p.N)):
        most: Any = rows
        if starts in given:
            offsets = given[starts]
            if offsets[0] < 0 or offsets[-1] > rows or (np.diff(offsets) < 0).any():
                raise ValueError(f"{starts} must not decrease and must lie between 0 and {rows}")
            most = np.diff(offsets)
        for name in (used, padded):
            if name in given and ((given[name] < 0) | (given[name] > most)).any():
                raise ValueError(
                    f"{name} contains lengths that are negative or exceed the size of the arrays"
                )
    if PAGE_TABLE in given and p.page_size:
        table, lengths = given[PAGE_TABLE], given.get(PADDED[1])
        if lengths is None:
            raise ValueError(f"the array {PADDED[1]} is missing")
        needed = np.arange(table.shape[1]) < -(-lengths[:, None] // p.page_size)
        if (needed & ((table < 0) | (table >= p.pages))).any():
            raise ValueError(f"{PAGE_TABLE} contains page numbers that are out of range")
