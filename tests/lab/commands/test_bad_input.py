"""Invalid calls and command lines: each ends in one line with the value, the rule and the remedy,
and leaves no trace for later calls.
"""
# ruff: noqa: F401 (the calls of bad_calls.txt use the names that are imported here)

import gc
import json
import math
import operator
import shlex
import sys
import tempfile
import weakref
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import own_kernel, sloped as scripts
from helpers.cli import SIMULATOR, SMALL, cli, files, line_of, says, still_works, table
from helpers.far_device import FarDevice
from helpers.private_cache import with_runtime
from helpers.problems import FORWARD

import cupyfa
from cupyfa import (
    DeviceError,
    Devices,
    Dropout,
    Input,
    Kernel,
    Launch,
    Limits,
    Packed,
    Padded,
    Problem,
    Scaled,
    Simulator,
    Unsupported,
    distributed,
)
from cupyfa.lab.bench import suite, sweeps
from cupyfa.lab.verify import failures
from cupyfa.lab.verify.case import Case
from cupyfa.ladder.kernel import Matmul
from cupyfa.problem.dtypes import E4M3
from cupyfa.problem.lengths import lengths_of
from cupyfa.problem.options import AttentionOptions
from cupyfa.problem.problem import MOST
from cupyfa.problem.structured_arrays import wrap
from cupyfa.runtime import transfer


@pytest.fixture(scope="module", autouse=True)
def own_folders(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPYFA_CACHE_DIR", str(with_runtime(tmp_path_factory.mktemp("cache"))))
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
        still_works()
        yield


ALIVE = []


def a(*shape, dtype=np.float32, of=np.zeros):
    """Makes an array and records it in ALIVE; tests require that it is freed after the call."""
    array = of(shape, dtype)
    ALIVE.append(weakref.ref(array))
    return array


def attention(q=(4, 8), k=(4, 8), v=(4, 8), **options):
    """Calls attention on arrays, or on arrays of the given shapes."""
    q, k, v = (a(*x) if isinstance(x, tuple) else x for x in (q, k, v))
    return cupyfa.attention(q, k, v, **{"backend": "simulator", **options})


def alike(dtype, **options):
    return attention(*(a(4, 8, dtype=dtype) for _ in range(3)), **options)


def backward(**change):
    arrays = {name: a(4, 8) for name in ("dout", "q", "k", "v", "out")}
    given = {**arrays, "lse": a(4), "backend": "simulator", **change}
    return cupyfa.backward(**given)


def of_wrt(wrt, function=None):
    """Asks for gradients of q, k, v, alibi_slopes and table."""
    captured = {"table": a(5), "bucket": a(4, dtype=int)}
    reads = {"alibi_slopes": a(1), "score_mod": "score + table[bucket[key]]", "captured": captured}
    if function:
        return function(wrt=wrt, **reads)
    # An unknown kernel: the names are looked at before anything is computed.
    return cupyfa.vjp(a(4, 8), a(4, 8), a(4, 8), wrt=wrt, kernel="does not exist", **reads)


def with_number(n):
    return attention(score_mod="score + (1 if n > 0 else 0)", captured={"n": n})


def vjp(x=None, **options):
    x = a(4, 8) if x is None else x
    return cupyfa.vjp(x, x, x, backend="simulator", **options)


def pulled(*gradients, **options):
    _, pullback = vjp()
    return pullback(*gradients, **options)


def jvp(tangents, x=None, **options):
    x = a(5, 8) if x is None else x
    return cupyfa.jvp(x, x, x, tangents=tangents, backend="simulator", **options)


def of_shapes(tangents):
    on = {"dtype": "float32", "backend": "simulator"}
    return cupyfa.compile((5, 8), (5, 8), (5, 8), tangents=tangents, **on)


def hvp(tangents=None, x=None, **options):
    x = a(5, 8) if x is None else x
    dout = getattr(x, "array", x)
    tangents = [dout] * 3 if tangents is None else tangents
    return cupyfa.hvp(x, x, x, dout, tangents=tangents, backend="simulator", **options)


def weights_kept(*dropout):
    return cupyfa.dropout_mask(Dropout(*dropout), batch=1, heads=1, M=2, N=2)


def of_gradients():
    return [*(a(4, 8) for _ in range(5)), a(4)]


def prepared(**options):
    q, k, v = (a(4, 8) for _ in range(3))
    return cupyfa.compile(q, k, v, backend="simulator", kernel="fa2", **options)


def prepared_gradients():
    return cupyfa.compile(*of_gradients(), backend="simulator", kernel="rows")


def softmax(x, **options):
    return cupyfa.softmax(x, backend="simulator", **options)


def part(out=(2, 3, 4, 8), lse=(2, 3, 4)):
    return a(*out), a(*lse)


def merge(*parts, **options):
    return cupyfa.merge(list(parts), **{"backend": "simulator", **options})


def blocks(text="key <= query", captured=None, **sizes):
    sizes = {"M": 150, "N": 170, **sizes}
    return cupyfa.block_mask(mask_mod=text, captured=captured, **sizes, backend="simulator")


def masked(*text, **sizes):
    """Calls attention of four heads with a block mask that may have other sizes."""
    return attention((1, 4, 150, 8), (1, 4, 170, 8), (1, 4, 170, 8), mask=blocks(*text, **sizes))


def updated(captured):
    before = {"doc": a(170, dtype=int), "n": 0}
    return blocks("doc[query] == doc[key] + n", before).update(captured)


def packed(options=None, function=attention, **change):
    """Calls a function on three packed sequences, with some lengths replaced."""
    given = {"cu_seqlens_q": [0, 5, 5, 17], "cu_seqlens_k": [0, 7, 10, 10], **change}
    given = {x: np.array(y, getattr(y, "dtype", "i4")) for x, y in given.items() if y is not None}
    return function(*wrap(a(17, 2, 24), a(10, 1, 24), a(10, 1, 24), given), **options or {})


def padded(function=attention, **lengths):
    return function(*wrap(a(3, 2, 9, 16), a(3, 1, 11, 16), a(3, 1, 11, 16), lengths))


def compiled(q, k, v):
    return cupyfa.compile(q, k, v, kernel="fa2", backend="simulator")


def gradients(q, k, v):
    out, lse = a(3, 2, 9, 16), a(3, 2, 9)
    return cupyfa.backward(out, q, k, v, out, lse, backend="simulator")


def boxes(rows):
    """Plans a launch whose tensor map has boxes of this many rows."""
    step = launch(args="Q.map K", boxes={"Q": lambda p, c: rows})
    record = own(launches=(step,), arch="90")
    return cupyfa.planner.choose_kernel.plan(record, problem(), Simulator().limits)


def e4m3(options=None, **given):
    """Calls attention on arrays in e4m3 with the given descales and lengths."""
    q, k, v = (a(2, heads, 8, 16, dtype=E4M3) for heads in (4, 2, 2))
    return attention(*wrap(q, k, v, given), **options or {})


def cache():
    return cupyfa.KVCache(a(1, 1, 8, 8), a(1, 1, 8, 8), a(1, dtype=np.int32))


def kv(last=61, **change):
    """Makes a cache of six sequences; ``last`` is the length of the last sequence."""
    given = {"k": a(6, 64, 2, 24), "v": a(6, 64, 2, 16), "layout": "bshd"}
    given["lengths"] = np.array([0, 1, 15, 16, 17, last], np.int32)
    return cupyfa.KVCache(**{**given, **change})


def kv_e4m3(rows=(6, 64), k_scale=None, v_scale=None, **change):
    arrays = {x: a(*rows, 2, columns, dtype=E4M3) for x, columns in (("k", 24), ("v", 16))}
    scales = {x: of for x, of in (("k", k_scale), ("v", v_scale)) if of is not None}
    arrays |= {x: Scaled(arrays[x], of) for x, of in scales.items()}
    return kv(**{**arrays, **change})


def keys(batch=1, heads=2, dtype=np.float32):
    return tuple(a(batch, heads, 5, columns, dtype=dtype) for columns in (24, 16))


def new_tokens():
    return a(6, 2, 2, 24), a(6, 2, 2, 16)


def decode(cache=None, q=(6, 4, 2, 24), **options):
    cache = kv() if cache is None else cache
    q = a(*q) if isinstance(q, tuple) else q
    return cupyfa.attention(q, cache, backend="simulator", **options)


def sweep(operation="forward", **sizes):
    return sweeps.problems(operation, sizes)


def view(strides, shape=(4, 8)):
    """Makes an array view that may claim more elements than its memory holds."""
    return np.lib.stride_tricks.as_strided(a(16), shape, strides)


def read_only():
    array = a(4, 8)
    array.flags.writeable = False
    return array


class Foreign:
    """Another library's array, with attributes chosen by the test."""

    shape, ndim, dtype = (4, 8), 2, np.dtype(np.float32)

    def __init__(self, **given):
        vars(self).update(given)


def raising(error):
    def call(*_, **__):
        raise error

    return call


def gpu_array():
    return Foreign(__cuda_array_interface__={"shape": (4, 8), "typestr": "<f4", "version": 3})


def several(numbers):
    """Calls attention on some of three devices; the third device is a different model."""
    far = FarDevice()
    far.models = ("A", "A", "B")
    return attention(backend=Devices(numbers, backend=far))


def launch(grid=lambda p, c: 1, threads=lambda p, c: 32, args="Q K V O M N scale", **more):
    return Launch("own", args, grid, threads, **more)


def own(**change):
    return Kernel(**{"name": "own", "adds": "", "launches": (launch(),), "folder": "/", **change})


def with_launch(scratch=None, **change):
    return attention(kernel=own(launches=(launch(**change),), scratch=scratch or {}))


def sloped(options=None, **arrays):
    """Calls a kernel that takes arrays and a number of its own."""
    kernel = SLOPED.bind(**arrays)
    return attention((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), kernel=kernel, **options or {})


def problem(**sizes):
    return Problem.of_sizes(**{"M": 4, "d": 8, **sizes})


WIDE = np.broadcast_to(np.float32(0), (100, MOST, 256))  # 200 TiB if it were not a broadcast
BF16 = ml_dtypes.bfloat16
SLOPED = scripts.sloped
TURING = Limits("a T4", shared_bytes=65536, arch="75")
ONE_OF = "float16, bfloat16, float32, float64"


@pytest.mark.parametrize("call, error, words", table("lab/commands/bad_calls.txt"))
def test_errors_of_calls_are_one_line_and_leave_no_traces(call, error, words, capfd):
    ALIVE.clear()
    before = files()
    message = refusal(eval(f"lambda: {call}"), eval(error))
    assert "\n" not in message
    says(message, *(word.replace("ONE_OF", ONE_OF) for word in words))
    if any(array() is not None for array in ALIVE):
        gc.collect()  # only if needed, since collection is slow in a process with many tests
    assert not [array for array in ALIVE if array() is not None], "arrays of the call are alive"
    assert files() == before
    still_works()
    assert capfd.readouterr() == ("", "")


def refusal(call, error):
    """Returns the message of the error that a call raises, without a reference to the error."""
    try:
        call()
    except error as raised:
        assert type(raised) is error or error is MemoryError
        return str(raised)
    pytest.fail(f"no {error.__name__}")


@pytest.mark.parametrize("scale", [Fraction(1, 3), np.float16(0.5), np.int8(2)])
def test_a_scale_may_be_any_number_type(scale):
    np.testing.assert_allclose(
        attention(a(4, 8, of=np.ones), scale=scale),
        attention(a(4, 8, of=np.ones), scale=float(scale)),
    )


def test_sizes_may_be_numpy_integers():
    large = problem(**{name: np.int16(181) for name in ("M", "N", "heads", "batch")})
    plan = cupyfa.planner.choose_kernel.plan(FORWARD["fa2_coalesced"], large, Simulator().limits)
    assert plan.launches[0].grid[0] == 181 * 181 * math.ceil(181 / 128)


BEFORE = "mine = Kernel"
# A file, its content (None if it is missing), and patterns of the message.
FILES = (
    ("mine.cu", None, "mine.cu, the file of kernel mine", "create this"),
    (
        "mine.cu",
        "a folder",
        "mine.cu, the file of kernel mine",
        "Is a directory",
        "create this file",
    ),
    ("mine.cu", b"\xff\xfe", "mine.cu is not valid UTF-8", "byte 0xff", "save it"),
    ("mine.cu", b"", "mine.cu has no kernel mine", "write"),
    ("script.py", None, "does not exist", "pass a script"),
    ("script.py", "a folder", "does not exist", "pass a script"),
    ("script.py", b'x = "\xff"\n', r"script\.py: SyntaxError: .*0xff", "correct the script"),
    ("script.py", b"x = 1\0\n", r"script\.py: .*Error: .*null bytes", "correct the script"),
)


@pytest.mark.parametrize(
    "right, wrong, code, words", table("lab/commands/bad_scripts.txt", columns=3)
)
def test_errors_in_records_are_one_line(tmp_path, right, wrong, code, words):
    where = "py" if right in own_kernel.SCRIPT else "cu"
    script = own_kernel.write(tmp_path, **{where: (right, wrong)})
    refused(["run", f"{script}:mine", *SIMULATOR, *SMALL], int(code), words)


@pytest.mark.parametrize("file, content, words", [(x, y, words) for x, y, *words in FILES])
@pytest.mark.parametrize("how", ["run", "compile"])
def test_errors_in_files_are_one_line(tmp_path, file, content, words, how):
    script = own_kernel.write(tmp_path)
    (tmp_path / file).unlink()
    if content == "a folder":
        (tmp_path / file).mkdir()
    elif content is not None:
        (tmp_path / file).write_bytes(content)
    rest = [*SIMULATOR, *SMALL] if how == "run" else ["--arch", "90", "--dtype", "float32"]
    refused([how, f"{script}:mine", *rest], 2, words)


def refused(args, code, words):
    """Checks that a command fails with an exit code and a one-line message, and leaves no files."""
    before = files()
    done = cli(*args, code=code)
    assert done.stdout == ""
    says(line_of(done.stderr), *words)
    assert files() == before
    still_works()


@pytest.mark.parametrize("right, wrong, line, words", table("lab/commands/bad_kernels.txt", 3))
@pytest.mark.parametrize("how", ["run", "compile"])
def test_compiler_errors_name_file_and_line(tmp_path, right, wrong, line, words, how):
    script = own_kernel.write(tmp_path, cu=(right, wrong.replace("\\n", "\n")))
    rest = [*SIMULATOR, *SMALL] if how == "run" else ["--arch", "90", "--dtype", "float32", "-d", 3]
    before = files()
    stderr = cli(how, f"{script}:mine", *rest, code=2).stderr
    says(stderr, rf"{tmp_path}/mine\.cu[:(]{line}[:)]", "error", *words)
    assert "Traceback" not in stderr
    assert files() == before
    still_works()


def test_output_of_a_script_goes_to_stderr(tmp_path):
    script = own_kernel.write(tmp_path, py=(BEFORE, f"print('hello')\n{BEFORE}"))
    done = cli("run", f"{script}:mine", *SIMULATOR, *SMALL, "--format", "json", code=0)
    assert json.loads(done.stdout)[0]["passed"]
    assert done.stderr == "hello\n"


def test_a_script_cannot_change_the_module_path(tmp_path):
    script = own_kernel.write(tmp_path, py=(BEFORE, f"import sys\nsys.path.clear()\n{BEFORE}"))
    before = list(sys.path)
    cli("run", f"{script}:mine", *SIMULATOR, *SMALL, code=0)
    assert sys.path == before


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Makes a folder with a file of ``bench --save`` and with invalid files."""
    folder = tmp_path_factory.mktemp("results")
    save = ("--budget", "0", "--alone", "--save", folder / "good.json")
    cli("bench", "fa2", *SIMULATOR, *SMALL, *save, code=0)
    good = (folder / "good.json").read_text()
    (row,) = json.loads(good)["rows"]
    for name, rows in {
        "empty": [],
        "number": [3],
        "other": [{"kernel": "fa2"}],
        "key": [{**row, "kernal": 3}],
        "operation": [{**row, "operation": "x"}],
        "times": [{**row, "milliseconds": "x"}],
        "problem": [{**row, "problem": {}}],
        "sizes": [{**row, "problem": {**row["problem"], "M": -5}}],
        "words": [{**row, "problem": {**row["problem"], "dtype": "int8"}}],
    }.items():
        (folder / f"{name}.json").write_text(json.dumps({"environment": {}, "rows": rows}))
    for name, text in {
        "foreign": '{"a": 1}',
        "list": "[1, 2]",
        "cut": good[: len(good) // 2],
        "text": "hello",
        "nothing": "",
        "where": '{"environment": 3, "rows": []}',
        "nowhere": '{"rows": []}',
    }.items():
        (folder / f"{name}.json").write_text(text)
    (folder / "bytes.json").write_bytes(b"\xff\xfe\x00")
    stored(folder, "fa2").rename(folder / "good.npz")
    stored(folder, "gone.py:mine").rename(folder / "gone.npz")
    (folder / "cut.npz").write_bytes((folder / "good.npz").read_bytes()[:700])
    (folder / "text.npz").write_text("hello")
    np.savez(folder / "other.npz", x=1)
    (folder / "folder").mkdir()
    return folder


def stored(folder, kernel):
    """Writes the file of a failure as ``check`` does."""
    case = Case("forward", problem())
    outcome = failures.Outcome(kernel, failures.WRONG_RESULT, arrays=case.inputs())
    made_with = {"device": "the simulator", "cupyfa": "0"}
    return failures.write(folder, failures.Stored(case, outcome, made_with=made_with), "")


@pytest.mark.few(134)
@pytest.mark.parametrize("args, code, words", table("lab/commands/bad_commands.txt"))
def test_errors_of_command_lines_are_one_line(results, monkeypatch, no_device, args, code, words):
    monkeypatch.chdir(results)
    before = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    small = " ".join((*SIMULATOR, *SMALL[:-2]))
    refused(shlex.split(args.replace("SMALL", small)), int(code), words)
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.requires_grad_(),
        lambda x: x.bfloat16(),
        lambda x: x.to_sparse(),
        lambda x: x.to("meta"),
    ],
    ids=["with gradient", "bfloat16, which NumPy has not", "sparse", "without memory"],
)
def test_torch_tensors_that_numpy_cannot_read(spoil):
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError) as raised:
        attention(q=spoil(torch.ones(4, 8)))
    says(str(raised.value), "q(, a| is a) (Tensor|Parameter)", "pass (it as )?a NumPy")
    still_works()
