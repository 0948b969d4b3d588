"""Runs commands in this process or in a new one, and checks their errors and leftovers."""

import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import cupyfa
from cupyfa import cache_folder
from cupyfa.planner import source as sources

MAIN = runpy.run_path(str(sources.ROOT / "cli.py"))["main"]
CLI = [sys.executable, str(sources.ROOT / "cli.py")]
PACKAGE = str(Path(cupyfa.__file__).parents[1])
MODULE = [sys.executable, "-m", "cupyfa"]
SIMULATOR = ("--backend", "simulator")
SIZES = ("-B", "1", "-H", "2", "-M", "9", "-N", "7", "-d", "8", "--seed", "3")
SMALL = ("-B", "1", "-H", "1", "-M", "5", "-N", "4", "-d", "3", "--seed", "1")
COMPILED = re.compile(r"[\w-]+-[0-9a-f]{32}\.so")
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def cli(*args, code=0):
    """Runs a command in this process; returns its exit code and output."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)  # commands print these as notes
        done = CliRunner().invoke(MAIN, [str(arg) for arg in args], prog_name="cupyfa")
    assert isinstance(done.exception, (SystemExit, type(None))), done.exception
    assert done.exit_code == code, done.output
    return done


def commands(group=MAIN, *names):
    """Yields the names and the command of every command, including those in groups."""
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield (*names, name), command


def strict(text):
    """Parses strict JSON; fails for NaN and Infinity."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def process(args, *, begin=CLI, env=None, **options):
    """Runs a command in a new process; a value of None in ``env`` unsets the variable."""
    changed = {**os.environ, "PYTHONPATH": PACKAGE, **(env or {})}
    return subprocess.run(
        [*begin, *map(str, args)],
        env={name: str(value) for name, value in changed.items() if value is not None},
        **{"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, **options},
        check=False,
        timeout=120,
    )


def write_programs(folder):
    """Writes programs `cupyfa` and `python` that run this checkout; returns their folder."""
    for name, module in (("cupyfa", "-m cupyfa"), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def refused(*args, code):
    """Runs a command that must fail without output to stdout; returns its error message."""
    done = cli(*args, code=code)
    assert done.stdout == ""
    return line_of(done.stderr)


def still_works():
    """Checks that a correct call still succeeds, for use after an error."""
    out = cupyfa.attention(X, X, X, kernel="fa2", backend="simulator", check=True)
    assert out.shape == X.shape


def files():
    """Returns all files in the cache and the temporary directory, except compiled kernels."""
    folders = (cache_folder.folder(), tempfile.gettempdir())
    found = {os.path.join(at, x) for folder in folders for at, _, xs in os.walk(folder) for x in xs}
    return {path for path in found if not COMPILED.fullmatch(os.path.basename(path))}


def line_of(stderr):
    """Returns the error message on stderr, which must be the only line besides notes."""
    lines = [line for line in stderr.splitlines() if line and not line.startswith("note: ")]
    assert len(lines) == 1, stderr
    assert lines[0].startswith("cupyfa: "), stderr
    return lines[0].removeprefix("cupyfa: ")


def says(message, *words):
    """Asserts that a message matches all of the patterns ``words``, in this order."""
    assert re.search(".*".join(words), message), message


def table(file, columns=2):
    """Reads a table file: each row's first ``columns`` cells, then a list of its other cells."""
    rows = (sources.ROOT / "tests" / file).read_text(encoding="utf-8").splitlines()
    cells = [row.split(" | ") for row in rows if not row.startswith("#")]
    return [(*row[:columns], row[columns:]) for row in cells]
