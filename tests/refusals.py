"""How refusals are looked at: the one line they end in, and whether all is as before."""

import os
import re
import runpy
import tempfile

import numpy as np
from click.testing import CliRunner

import cupyfa
from cupyfa import store
from cupyfa.planner import source as sources

MAIN = runpy.run_path(str(sources.ROOT / "cli.py"))["main"]
SIMULATOR = ("--backend", "simulator")
SMALL = ("-B", "1", "-H", "1", "-M", "5", "-N", "4", "-d", "3", "--seed", "1")
COMPILED = re.compile(r"[\w-]+-[0-9a-f]{32}\.so")
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def still_works():
    """A good call, checked: what was refused before it must not have left anything behind."""
    out = cupyfa.attention(X, X, X, kernel="fa2", backend="simulator", check=True)
    assert out.shape == X.shape


def files():
    """All files of the cache, but what was compiled, and of the folder for temporary ones."""
    folders = (store.folder(), tempfile.gettempdir())
    found = {os.path.join(at, x) for folder in folders for at, _, xs in os.walk(folder) for x in xs}
    return {path for path in found if not COMPILED.fullmatch(os.path.basename(path))}


def command(*args, code):
    """One command line in this process, which must end with a code and without a traceback."""
    done = CliRunner().invoke(MAIN, [str(arg) for arg in args], prog_name="cupyfa")
    assert isinstance(done.exception, (SystemExit, type(None))), repr(done.exception)
    assert done.exit_code == code, done.output
    return done


def line_of(stderr):
    """The one line, besides notes, that a command leaves on stderr."""
    lines = [line for line in stderr.splitlines() if line and not line.startswith("note: ")]
    assert len(lines) == 1, stderr
    assert lines[0].startswith("cupyfa: "), stderr
    return lines[0].removeprefix("cupyfa: ")


def says(message, *words):
    """Whether a message has all the words, each a pattern, in this order."""
    assert re.search(".*".join(words), message), message
