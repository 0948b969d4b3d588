"""Runs solutions of an exercise in a separate process.

A solution may crash, print or never return; this must not affect the process of the command.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cupyfa.errors import CompileError, SimulatorFault
from cupyfa.lab.exercises.exercise import Example, Exercise, arrays_in, exercise_named

SECONDS = 10.0  # time limit for all solutions that one process runs
_GUARD_BYTES = 1 << 16  # unused bytes before and after each array that a kernel receives
_TOO_SLOW = "it did not end within"
_PROGRAM = f"import sys; from {__name__} import run_in_file; run_in_file(*sys.argv[1:])"


@dataclass(frozen=True)
class Outcome:
    """A solution's result for one example: arrays by name, or a failure and its location.

    ``lines`` holds the source lines of the solution to which ``place`` refers.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    failure: str = ""
    place: str = ""
    lines: tuple[str, ...] = ()

    @property
    def is_too_slow(self) -> bool:
        """Whether the solution exceeded the time limit."""
        return self.failure.startswith(_TOO_SLOW)


def run_solutions(
    exercise: Exercise, texts: Sequence[str], schedule: int | None = None
) -> list[list[Outcome]]:
    """Runs solutions on all examples of their exercise.

    ``schedule`` seeds a pseudo-random order of a kernel's threads; None runs them in the order of
    their indices. The time limit starts when all solutions are compiled. Returns a list of outcomes
    for each solution. If a solution exceeds the limit or ends the process, its last outcome is that
    failure, and no further examples or solutions are run. Raises CompilerNotFound if kernels cannot
    be compiled here.
    """
    if exercise.is_kernel:
        from cupyfa.runtime.simulator import machine

        machine.compiler()
    with tempfile.TemporaryDirectory() as folder:
        work, results = Path(folder, "work"), Path(folder, "results")
        work.write_bytes(pickle.dumps((exercise.name, [*texts], schedule)))
        results.touch()
        command = [sys.executable, "-c", _PROGRAM, str(work), str(results)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()  # returns when the solutions are compiled
            try:
                _, errors = process.communicate(timeout=SECONDS)
                ending = f"it ended the process with {process.returncode}: {errors[-500:]}"
            except subprocess.TimeoutExpired:
                process.kill()
                ending = f"{_TOO_SLOW} {SECONDS:g} seconds"
        return _read(results, len(texts), len(exercise.examples()), ending)


def _read(results: Path, solutions: int, examples: int, ending: str) -> list[list[Outcome]]:
    """Reads the outcomes of a process; if some are missing, appends the failure ``ending``."""
    found: list[list[Outcome]] = [[]]
    with results.open("rb") as file:
        while True:
            try:
                outcome = pickle.load(file)
            except EOFError:
                break
            if len(found[-1]) == examples:
                found.append([])
            found[-1].append(outcome)
    if len(found[-1]) < examples:
        found[-1].append(Outcome(failure=ending))
    return found + [[] for _ in range(solutions - len(found))]


def run_in_file(work: str, results: str) -> None:
    """Runs the solutions in the file ``work``, and appends each outcome to the file ``results``.

    Writes a line to standard output when all solutions are compiled.
    """
    name, texts, schedule = pickle.loads(Path(work).read_bytes())
    exercise = exercise_named(name)
    if exercise.is_kernel:
        _compile_all(exercise, texts)
    os.write(1, b"compiled\n")
    with open(results, "wb", buffering=0) as file, redirect_stdout(sys.stderr):
        for text in texts:
            for example in exercise.examples():
                file.write(pickle.dumps(_outcome(exercise, text, example, schedule)))


def _compile_all(exercise: Exercise, texts: Sequence[str]) -> None:
    """Compiles solutions in parallel for later calls of machine.build, which repeat any errors."""
    from cupyfa.planner.source import INCLUDE
    from cupyfa.runtime.simulator import machine

    def compile_one(text: str) -> None:
        with suppress(Exception):
            machine.build(text, (INCLUDE,), exercise.entry)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compile_one, texts))


def _outcome(exercise: Exercise, text: str, example: Example, schedule: int | None) -> Outcome:
    try:
        if exercise.is_kernel:
            return Outcome(_run_kernel(exercise, text, example, schedule))
        return Outcome(_run_function(exercise, text, example))
    except SimulatorFault as fault:
        return Outcome(
            failure=fault.what, place=fault.place, lines=_lines_named(fault.place, exercise, text)
        )
    except CompileError as error:
        return Outcome(failure=f"it does not compile: {error}")
    except Exception as error:
        lines = [
            x for x in traceback.extract_tb(error.__traceback__) if x.filename == exercise.file
        ]
        place = f"{exercise.file}:{lines[-1].lineno}" if lines else ""
        return Outcome(failure=f"{type(error).__name__}: {error}", place=place)


def _lines_named(place: str, exercise: Exercise, text: str) -> tuple[str, ...]:
    """Returns the solution's lines, without spaces, to which a place such as "name.cu:3" refers."""
    numbers = re.findall(rf"\b{re.escape(exercise.file)}:(\d+)", place)
    lines = text.splitlines()
    return tuple("".join(lines[int(n) - 1].split()) for n in numbers if int(n) <= len(lines))


def _run_function(exercise: Exercise, text: str, example: Example) -> dict[str, np.ndarray]:
    names: dict[str, Any] = {"__name__": exercise.name}
    exec(compile(text, exercise.file, "exec"), names)
    if exercise.entry not in names:
        raise NameError(f"the file defines no function {exercise.entry}")
    result = names[exercise.entry](**deepcopy(dict(example.arguments)))
    if result is None:
        raise TypeError(f"{exercise.entry} returns nothing; is `return` missing?")
    results = result if isinstance(result, tuple) else (result,)
    if len(results) != len(example.expected):
        raise TypeError(f"it returns {len(results)} values, not {len(example.expected)}")
    return {name: np.asarray(x) for name, x in zip(example.expected, results)}


def _run_kernel(
    exercise: Exercise, text: str, example: Example, schedule: int | None
) -> dict[str, np.ndarray]:
    from cupyfa.planner.source import INCLUDE
    from cupyfa.runtime.launcher import Region
    from cupyfa.runtime.simulator import machine

    arguments = {
        name: _guarded_copy(x) if isinstance(x, np.ndarray) else x
        for name, x in example.arguments.items()
    }
    kernel = machine.build(text, (INCLUDE,), exercise.entry)
    values: list[Any] = [_argument(x) for x in arguments.values()]
    table = (ctypes.c_size_t * len(values))(*map(ctypes.addressof, values))
    positions = {name: number for number, name in enumerate(arguments)}
    regions = [
        Region(name, positions[name], 0, array.nbytes, itemsize=array.itemsize)
        for name, array in arrays_in(Example(example.name, arguments, {}))
    ]
    sizes = [ctypes.sizeof(x) for x in values]
    launch = example.grid, example.block, example.shared_bytes
    # With one worker, every run reports the same one of several faults.
    start = machine.starter(kernel, sizes, regions, *launch, schedule, workers=1)
    start(None, ctypes.addressof(table), 0)
    return {name: arguments[name] for name in example.expected}


def _guarded_copy(array: np.ndarray) -> np.ndarray:
    """Copies an array into a buffer with guard bytes, so that no other array is close to it."""
    buffer = np.zeros(array.nbytes + 2 * _GUARD_BYTES, np.uint8)
    copied = buffer[_GUARD_BYTES:-_GUARD_BYTES].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def _argument(value: Any) -> Any:
    """Converts a kernel argument to a ctypes value; arrays become addresses."""
    if isinstance(value, np.ndarray):
        return ctypes.c_size_t(value.ctypes.data)
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_float(value)


def without_numbers(failure: str) -> str:
    """Replaces numbers and file names in a failure, so that it can be compared with others."""
    return re.sub(r"\S+\.cuh?\b|\d+", "#", failure)
