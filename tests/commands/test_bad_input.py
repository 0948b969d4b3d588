"""Bad calls and bad command lines: each ends in one line with the value, the rule and the remedy,
and the next call finds everything as it was.
"""

import gc
import json
import math
import re
import sys
import tempfile
import weakref
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from helpers import own_kernel
from helpers.cli import SIMULATOR, SMALL, command, files, line_of, says, still_works
from helpers.problems import FORWARD

import cupyfa
from cupyfa import DeviceError, Kernel, Launch, Matmul, Problem, Simulator, Unsupported
from cupyfa.problem import MOST
from cupyfa.verify import failures
from cupyfa.verify.case import Case


@pytest.fixture(scope="module", autouse=True)
def own_folders(tmp_path_factory):
    """A cache and a folder for temporary files that no other process writes to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPYFA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
        still_works()
        yield


ALIVE = []


def a(*shape, dtype=np.float32, of=np.zeros):
    """An array that must be gone after the call."""
    array = of(shape, dtype)
    ALIVE.append(weakref.ref(array))
    return array


def attention(q=(4, 8), k=(4, 8), v=(4, 8), **options):
    """The call with arrays, or with arrays of shapes."""
    q, k, v = (a(*x) if isinstance(x, tuple) else x for x in (q, k, v))
    return cupyfa.attention(q, k, v, **{"backend": "simulator", **options})


def alike(dtype):
    """The call with arrays of a dtype."""
    return attention(*(a(4, 8, dtype=dtype) for _ in range(3)))


def softmax(x, **options):
    return cupyfa.softmax(x, backend="simulator", **options)


def view(strides, shape=(4, 8)):
    """An array of more elements than memory."""
    return np.lib.stride_tricks.as_strided(a(16), shape, strides)


def read_only():
    array = a(4, 8)
    array.flags.writeable = False
    return array


class Foreign:
    """Another library's array, with what a test gives it."""

    shape, ndim, dtype = (4, 8), 2, np.dtype(np.float32)

    def __init__(self, **given):
        vars(self).update(given)


def raising(error):
    def call(*_, **__):
        raise error

    return call


def gpu_array():
    return Foreign(__cuda_array_interface__={"shape": (4, 8), "typestr": "<f4", "version": 3})


def launch(grid=lambda p, c: 1, threads=lambda p, c: 32, args="Q K V O M N scale", **more):
    return Launch("own", args, grid, threads, **more)


def own(**change):
    """A record of a kernel that has no file."""
    return Kernel(**{"name": "own", "adds": "", "launches": (launch(),), "folder": "/", **change})


def with_launch(**change):
    return attention(kernel=own(launches=(launch(**change),)))


def problem(**sizes):
    return Problem.of_sizes(**{"M": 4, "d": 8, **sizes})


WIDE = np.broadcast_to(np.float32(0), (100, MOST, 256))  # 200 TiB, were it all there
V, T, U, D, M, F = ValueError, TypeError, Unsupported, DeviceError, MemoryError, FileNotFoundError
ONE_OF = "float16, bfloat16, float32, float64"
# What is called, what it raises, and words of the message in their order.
CALLS = {
    # shapes
    "no axis": (lambda: attention(q=()), V, r"q has shape \(\)", "at least two axes"),
    "one axis": (lambda: attention(k=(8,)), V, r"k has shape \(8,\)", "at least two axes"),
    "batch differs": (
        lambda: attention((2, 3, 1, 4, 8), (2, 2, 1, 4, 8), (2, 2, 1, 4, 8)),
        *(V, "leading axes must be equal", r"k \(2, 2, 1, 4, 8\)"),
    ),
    "batch of one": (lambda: attention(q=(1, 1, 4, 8)), V, "leading axes must be equal"),
    "d differs": (lambda: attention(k=(4, 7)), V, "d, the last axis of q and k", r"k \(4, 7\)"),
    "N differs": (lambda: attention(v=(5, 8)), V, "N, the number of keys", r"v \(5, 8\)"),
    "kv heads differ": (
        lambda: attention((2, 4, 8), (2, 4, 8), (1, 4, 8)),
        *(V, "number of key heads must be equal"),
    ),
    "heads no multiple": (
        lambda: attention((3, 4, 8), (2, 4, 8), (2, 4, 8)),
        *(V, "heads=3 is not a multiple of kv_heads=2", "same number"),
    ),
    "fewer heads than kv heads": (
        lambda: attention((4, 8), (2, 4, 8), (2, 4, 8)),
        *(V, "heads=1 is not a multiple of kv_heads=2"),
    ),
    "kv heads without any": (
        lambda: attention((2, 4, 8), (0, 4, 8), (0, 4, 8)),
        *(V, "heads=2 is not a multiple of kv_heads=0"),
    ),
    "bshd of other lengths": (
        lambda: attention((2, 4, 8), (3, 5, 8), (4, 5, 8), layout="bshd"),
        *(V, "heads=4 is not a multiple of kv_heads=5|N, the number of keys"),
    ),
    "rows beyond 32 bits": (
        lambda: attention(q=view((0, 0), (2**33, 8))),
        *(V, "M is 8589934592", "0 to 2,147,418,112"),
    ),
    "keys beyond 32 bits": (
        lambda: attention(k=view((0, 0), (2**33, 8)), v=view((0, 0), (2**33, 8))),
        *(V, "N is 8589934592"),
    ),
    "more elements than can be counted": (
        lambda: problem(M=MOST, heads=2**20, d=2**20),
        *(V, "elements", r"the most are 2\*\*59"),
    ),
    "scratch that cannot be counted": (
        lambda: cupyfa.plan(M=MOST, d=1, kernel="baseline", backend="simulator"),
        *(U, "baseline", "its scratch", "kernels that can: "),
    ),
    "no memory for the result": (
        lambda: attention(WIDE, (1, 4, 256), (1, 4, 256), kernel="minimal"),
        *(M, "allocate .* TiB"),
    ),
    "no memory for a copy": (
        lambda: attention(
            k=view((0, 0), (MOST, 2**16)),
            q=(4, 2**16),
            v=view((0, 0), (MOST, 1)),
            kernel="baseline",
        ),
        *(M, "allocate .* TiB"),
    ),
    # dtypes
    "int": (lambda: alike(np.int32), T, "dtype 'int32'", ONE_OF),
    "complex": (lambda: alike(np.complex64), T, "dtype 'complex64'", ONE_OF),
    "bool": (lambda: alike(bool), T, "dtype 'bool'", ONE_OF),
    "object": (lambda: alike(object), T, "dtype 'object'", ONE_OF),
    "string": (lambda: alike("U3"), T, "dtype '<U3'", ONE_OF),
    "bytes": (lambda: alike("S3"), T, r"dtype '\|S3'", ONE_OF),
    "date": (lambda: alike("M8[s]"), T, r"dtype 'datetime64\[s\]'", ONE_OF),
    "long double": (lambda: alike(np.longdouble), T, "dtype 'float128'", ONE_OF),
    "float8": (lambda: alike(ml_dtypes.float8_e4m3fn), T, "dtype 'float8_e4m3fn'", ONE_OF),
    "big-endian": (lambda: alike(">f4"), T, "dtype '>f4'", ONE_OF),
    "structured": (lambda: alike([("x", "f4")]), T, "dtype", "'x'", ONE_OF),
    "mixed": (
        lambda: attention(v=a(4, 8, dtype=np.float16)),
        *(T, "q float32, k float32, v float16", "convert them to one"),
    ),
    # kinds
    "None": (lambda: attention(q=None), T, "q is a NoneType", "pass a NumPy or CuPy array"),
    "list": (lambda: attention(k=[[1.0]]), T, "k is a list", "pass a NumPy or CuPy array"),
    "number": (lambda: attention(v=1.0), T, "v is a float", "pass a NumPy or CuPy array"),
    "NumPy number": (lambda: softmax(np.float32(1)), T, "x is a float32", "pass a NumPy"),
    "text": (lambda: attention(q="Q"), T, "q is a str", "pass a NumPy or CuPy array"),
    "masked": (
        lambda: attention(q=np.ma.masked_array(a(4, 8), a(4, 8) > 0)),
        *(T, "q is a MaskedArray", "mask", "pass q.data"),
    ),
    "host and GPU": (
        lambda: attention(q=gpu_array()),
        *(T, "q in GPU memory, k in host memory", "move them"),
    ),
    "GPU in the simulator": (
        lambda: attention(gpu_array(), gpu_array(), gpu_array()),
        *(T, "simulator takes NumPy arrays", "cupy.asnumpy"),
    ),
    "a device that nobody knows": (
        lambda: attention(q=Foreign(__dlpack_device__=lambda: (8, 0))),
        *(T, "q is a Foreign", "pass a NumPy or CuPy array"),
    ),
    "__dlpack_device__ raises": (
        lambda: attention(q=Foreign(__dlpack_device__=raising(ZeroDivisionError("boom")))),
        *(T, "q, a Foreign, cannot be seen", "ZeroDivisionError: boom", "pass it as"),
    ),
    "__dlpack_device__ gives nothing": (
        lambda: attention(q=Foreign(__dlpack_device__=lambda: None)),
        *(T, "q, a Foreign, cannot be seen", "pass it as"),
    ),
    "__dlpack__ raises": (
        lambda: attention(
            v=Foreign(__dlpack_device__=lambda: (1, 0), __dlpack__=raising(BufferError("no")))
        ),
        *(T, "v, a Foreign, cannot be seen", "pass it as"),
    ),
    "__dlpack__ gives something else": (
        lambda: attention(
            v=Foreign(__dlpack_device__=lambda: (1, 0), __dlpack__=lambda *_, **__: 3)
        ),
        *(T, "v, a Foreign, cannot be seen", "pass it as"),
    ),
    "no __dlpack__": (
        lambda: attention(v=Foreign(__dlpack_device__=lambda: (1, 0))),
        *(T, "v, a Foreign, cannot be seen", "pass it as"),
    ),
    "pinned below 0": (
        lambda: cupyfa.empty_pinned((2, -1), backend="simulator"),
        *(V, r"shape is \(2, -1\)", "give whole numbers from 0"),
    ),
    "compile with a shape below 0": (
        lambda: cupyfa.compile((4, -8), (4, 8), (4, 8), dtype="float32", backend="simulator"),
        *(V, r"the shape of q is \(4, -8\)", "give whole numbers from 0"),
    ),
    "vjp with an option of attention's": (
        lambda: cupyfa.attention_vjp(a(4, 8), a(4, 8), a(4, 8), return_lse=True),
        *(V, "has no option return_lse", "call attention"),
    ),
    "compile with an option of attention's": (
        lambda: cupyfa.compile(a(4, 8), a(4, 8), a(4, 8), check=True, backend="simulator"),
        *(V, "has no constant 'check'", "options of compile are dtype, causal"),
    ),
    "check of nothing": (
        lambda: cupyfa.check("fa2", grid="fuzz", samples=0, backend="simulator"),
        *(V, "samples is 0", "from 1"),
    ),
    "check of more than can be drawn": (
        lambda: cupyfa.check("fa2", grid="fuzz", samples=10**11, backend="simulator"),
        *(V, "samples is 100000000000", "from 1 to 100,000"),
    ),
    "check of a word of samples": (
        lambda: cupyfa.check("fa2", grid="fuzz", samples="2", backend="simulator"),
        *(V, "samples is '2'", "give a whole number"),
    ),
    "check with half a rerun": (
        lambda: cupyfa.check("fa2", reruns=1.5, backend="simulator"),
        *(V, "reruns is 1.5", "from 0"),
    ),
    "check of a seed below 0": (
        lambda: cupyfa.check("fa2", seed=-1, backend="simulator"),
        *(V, "seed is -1", "from 0"),
    ),
    "check of a number": (
        lambda: cupyfa.check(["fa2", 3], backend="simulator"),
        *(T, "a kernel is 3", "give names, or records"),
    ),
    "bench of a seed below 0": (
        lambda: cupyfa.bench("fa2", seed=-1, backend="simulator"),
        *(V, "seed is -1", "from 0"),
    ),
    "bench of no size": (
        lambda: cupyfa.bench("fa2", M=[], backend="simulator"),
        *(V, r"M is \[\]", "give at least one"),
    ),
    "check with fewer than no processes": (
        lambda: cupyfa.check("fa2", jobs=-3, backend="simulator"),
        *(V, "jobs is -3", "from 0"),
    ),
    # out
    "out of another shape": (
        lambda: attention(out=a(4, 9)),
        *(V, r"out is float32 \(4, 9\)", r"result is float32 \(4, 8\)", "give"),
    ),
    "out of another dtype": (
        lambda: attention(out=a(4, 8, dtype=np.float64)),
        *(V, "out is float64", "result is float32", "give"),
    ),
    "out of another byte order": (lambda: attention(out=a(4, 8, dtype=">f4")), V, "out is >f4"),
    "out is a list": (lambda: attention(out=[0]), T, "out is a list", "give a NumPy array"),
    "out on the GPU": (lambda: attention(out=gpu_array()), T, "out is a Foreign", "give a NumPy"),
    "out is masked": (
        lambda: attention(out=np.ma.masked_array(a(4, 8))),
        *(T, "out is a MaskedArray", "give its data"),
    ),
    "out is read-only": (lambda: attention(out=read_only()), V, "read-only", "give"),
    "out is a broadcast view": (
        lambda: attention(out=np.broadcast_to(a(8), (4, 8))),
        *(V, r"strides \(0, 4\)", "share memory", "give"),
    ),
    "out repeats its rows": (lambda: attention(out=view((0, 4))), V, "share memory", "give"),
    "out repeats its columns": (lambda: attention(out=view((4, 0))), V, "share memory", "give"),
    "out overlaps itself": (lambda: attention(out=view((-4, 4))), V, "share memory", "give"),
    "out is an input": (
        lambda: (lambda x: attention(v=x, out=x))(a(4, 8)),
        *(V, "out overlaps the input V", "give it memory of its own"),
    ),
    "out reaches into an input": (
        lambda: (lambda x: attention(q=x[:4], out=x[3:7]))(a(8, 8)),
        *(V, "out overlaps the input Q"),
    ),
    "softmax in place": (lambda: (lambda x: softmax(x, out=x))(a(4)), V, "out overlaps", "give"),
    # scale, masks, layout, backend
    "scale nan": (lambda: attention(scale=math.nan), V, "scale is nan", "finite .* float32"),
    "scale inf": (lambda: attention(scale=-math.inf), V, "scale is -inf", "finite .* float32"),
    "scale beyond float32": (lambda: attention(scale=1e39), V, r"scale is 1e\+39", "finite"),
    "scale in powers of 2": (lambda: attention(scale=3e38), V, "scale is 3e", "finite", "log2"),
    "scale of 400 digits": (lambda: attention(scale=10**400), V, "scale is", "finite"),
    "scale of text": (lambda: attention(scale="1"), T, "scale is '1'", "None for 1/sqrt"),
    "scale complex": (lambda: attention(scale=1j), T, "scale is 1j", "give a number"),
    "scale decimal": (lambda: attention(scale=Decimal(1)), T, r"scale is Decimal", "give a number"),
    "scale array": (lambda: attention(scale=a(1)), T, "scale is array", "give a number"),
    "scale bool": (lambda: attention(scale=True), T, "scale is True", "give a number"),
    "causal number": (lambda: attention(causal=1), V, "causal=1 is unknown", "use False, True"),
    "causal word": (lambda: attention(causal="upper"), V, "'upper' is unknown", "'top-left'"),
    "causal empty": (lambda: attention(causal=""), V, "causal='' is unknown", "use False"),
    "causal list": (lambda: attention(causal=[True]), V, r"causal=\[True\]", "use False"),
    "causal array": (lambda: attention(causal=a(2)), V, "causal=array", "use False"),
    "layout": (lambda: attention(layout="sbhd"), V, "layout 'sbhd'", "use one of bhsd, bshd"),
    "layout None": (lambda: attention(layout=None), V, "layout None", "use one of bhsd, bshd"),
    "backend": (lambda: attention(backend="metal"), V, "backend 'metal'", "auto, cuda, simulator"),
    "backend class": (lambda: attention(backend=Simulator), V, "is unknown", "or a Simulator"),
    "backend None": (lambda: attention(backend=None), V, "backend None is unknown", "use one of"),
    "schedule": (lambda: Simulator(schedule="x"), V, "schedule is 'x'", "whole number from 0"),
    "no workers": (lambda: Simulator(workers=0), V, "workers is 0", "whole number from 1"),
    "half a worker": (lambda: Simulator(workers=0.5), V, "workers is 0.5", "whole number from 1"),
    "misspelt option": (
        lambda: attention(casual=True),
        *(
            V,
            "no constant 'casual'",
            "it has Br, Bc",
            "options of attention are causal, window, scale",
        ),
    ),
    "a softmax has no mask": (
        lambda: softmax(a(3), causal=True),
        *(V, "no constant 'causal'", "it has none", "options of softmax are kernel"),
    ),
    "softmax of a scalar": (lambda: softmax(a()), V, "no axis", "at least one dimension"),
    "softmax of words": (lambda: softmax(a(3, dtype="U1")), T, "dtype '<U1'", ONE_OF),
    # kernels and tiles
    "kernel": (
        lambda: attention(kernel="v9"),
        V,
        "'v9' is unknown",
        "fa2, fa2_coalesced, .* or 'auto'",
    ),
    "kernel of another operation": (
        lambda: attention(kernel="softmax_safe"),
        *(V, "'softmax_safe' computes softmax", "the forward kernels are baseline"),
    ),
    "record of another operation": (
        lambda: softmax(a(3), kernel=own()),
        *(V, "own computes forward, not softmax"),
    ),
    "kernel None": (lambda: attention(kernel=None), T, "kernel is a NoneType", "a kernel's name"),
    "kernel list": (lambda: attention(kernel=["fa2"]), T, "kernel is a list", "a kernel's name"),
    "operation": (
        lambda: cupyfa.kernels("sideways"),
        V,
        "'sideways' is unknown",
        "softmax, forward, backward",
    ),
    "operation list": (
        lambda: cupyfa.kernels([]),
        V,
        r"\[\] is unknown",
        "softmax, forward, backward",
    ),
    "tile 0": (lambda: attention(kernel="fa2", Br=0), V, "Br=0", "whole number from 1"),
    "tile negative": (lambda: attention(kernel="fa2", Br=-3), V, "Br=-3", "whole number from 1"),
    "tile float": (lambda: attention(kernel="fa2", Br=3.0), V, "Br=3.0", "whole number from 1"),
    "tile text": (lambda: attention(kernel="fa2", Br="8"), V, "Br='8'", "whole number from 1"),
    "tile breaks a rule": (
        lambda: attention(kernel="fa2", Br=17, Bc=17),
        *(V, "Br=17, Bc=17 breaks its rule: Bc is below 16 or a multiple of it"),
    ),
    "tile too large": (
        lambda: attention(kernel="fa2", Br=2**40),
        *(U, "Br=1099511627776", "threads a block", "allows 1,024", "leave Br to the plan"),
    ),
    "tiles too large together": (
        lambda: attention(kernel="fa2", Br=1024, Bc=512),
        *(U, "bytes of shared memory", "has 232,448", "leave Br, Bc to the plan"),
    ),
    "d too large": (
        lambda: attention((4, 60000), (4, 60000), (4, 60000), kernel="minimal"),
        *(U, "minimal with", "bytes of shared memory", "kernels that can: "),
    ),
    "no measured kernel": (
        lambda: attention(view((0, 0, 0), (2**21, 2**21, 8)), (1, 4, 8), (1, 4, 8)),
        *(U, "'auto' knows no measured kernel for batch=1 heads=2097152", "one that can: minimal"),
    ),
    "dtype that a kernel lacks": (
        lambda: attention(*(a(4, 8, dtype=np.float64) for _ in range(3)), kernel="v3"),
        *(U, "v3 cannot do", "its dtypes are", "kernels that can: "),
    ),
    "no lse": (
        lambda: attention(kernel=own(), return_lse=True),
        *(U, "own does not compute lse", "use another kernel"),
    ),
    "feature that a kernel lacks": (
        lambda: attention(kernel=own(), causal=True),
        *(U, "own cannot do", "lacks causal", "kernels that can: "),
    ),
    # sizes
    "size negative": (lambda: problem(M=-1), V, "M is -1", "0 to"),
    "size float": (lambda: problem(M=1.5), T, "M is 1.5", "whole numbers"),
    "size text": (lambda: problem(d="8"), T, "d is '8'", "whole numbers"),
    "size bool": (lambda: problem(N=True), T, "N is True", "whole numbers"),
    "size NaN": (lambda: problem(heads=math.nan), T, "heads is nan", "whole numbers"),
    "dtype by class": (lambda: problem(dtype=np.float32), T, "numpy.float32", ONE_OF),
    "dtype by list": (lambda: problem(dtype=[]), T, r"dtype \[\]", ONE_OF),
    "case of other values": (
        lambda: Case("forward", problem(), values="random"),
        *(V, "values 'random' is unknown", "normal, uniform"),
    ),
    "case of another operation": (
        lambda: Case("sideways", problem()),
        *(V, "operation 'sideways' is unknown", "softmax, forward, backward"),
    ),
    # records
    "no name": (lambda: own(name=""), V, "Kernel '': name is a word"),
    "no launches": (lambda: own(launches=()), V, "launches are one or more", r"but here \(\)"),
    "one launch bare": (
        lambda: own(launches=launch()),
        V,
        "launches are one or more",
        "in a tuple",
    ),
    "launch by name": (lambda: own(launches=("own",)), V, "launches are one or more", "'own'"),
    "no tiles": (lambda: own(tiles=()), V, "tiles must hold at least one", r"but here \(\)"),
    "tile value 0": (lambda: own(tiles=({"Br": 0},)), V, "whole number from 1", "'Br': 0"),
    "tile value float": (lambda: own(tiles=({"Br": 1.5},)), V, "whole number from 1", "1.5"),
    "tiles differ": (lambda: own(tiles=({"Br": 1}, {"Bc": 1})), V, "all the same names", "'Bc'"),
    "tile of a taken name": (lambda: own(tiles=({"d": 1},)), V, "tiles are not named d, dv", "'d'"),
    "unknown feature": (lambda: own(features=("mask",)), V, "features are causal", "'mask'"),
    "features as text": (lambda: own(features="lse"), V, "features are causal", "'lse'"),
    "unknown dtype": (lambda: own(dtypes=("int8",)), V, f"dtypes are {ONE_OF}", "'int8'"),
    "unknown arch": (lambda: own(arch="61"), V, "arch is one of 75, 80", "'61'"),
    "arch as number": (lambda: own(arch=90), V, "arch is one of 75, 80", "here 90"),
    "rounding": (lambda: own(rounding="int4"), V, "rounding is None or one of", "'int4'"),
    "rules without formulas": (lambda: own(rules={"odd": True}), V, "rules are", "True"),
    "scratch kind": (lambda: own(scratch={"S": ("M", "half")}), V, "one of real, s", "'half'"),
    "scratch text": (lambda: own(scratch={"S": "M real"}), V, "scratch is {name", "'M real'"),
    "scratch axes": (lambda: own(scratch={"S": ("M K", "real")}), V, "scratch has axes", "'M K'"),
    "folder": (lambda: own(folder=3), V, "folder is None or a path", "here 3"),
    "args as list": (lambda: launch(args=["Q"]), V, "Launch 'own': args is one string", r"\['Q'\]"),
    "entry": (lambda: replace(launch(), entry="my kernel"), V, "name of a C function", "my kernel"),
    "grid without formula": (lambda: launch(grid=1), V, "grid is a formula, lambda p, c", "here 1"),
    "threads without formula": (lambda: launch(threads=32), V, "threads is a formula", "here 32"),
    "scratch of a taken name": (
        lambda: attention(kernel=own(scratch={"Q": ("M", "real")})),
        *(V, "own: Q is an array of the operation", "another name"),
    ),
    "product of unknown arrays": (
        lambda: attention(kernel=own(launches=(Matmul("S", "Q", "K.T"),))),
        *(V, "a Matmul names S", "arrays are Q, K, V, O, lse"),
    ),
    "unknown operation": (
        lambda: cupyfa.planner.select.plan(own(operation="pool"), problem(), Simulator().limits),
        *(V, "own computes 'pool'", "operations are softmax, forward"),
    ),
    "grid raises": (
        lambda: with_launch(grid=lambda p, c: p.M // 0),
        *(V, "own: the record's grid of own fails with ZeroDivisionError", "called with batch=1"),
    ),
    "grid names an unknown size": (
        lambda: with_launch(grid=lambda p, c: p.L),
        *(V, "grid of own fails with AttributeError", "'L'"),
    ),
    "grid names an unknown constant": (
        lambda: with_launch(grid=lambda p, c: c.Br),
        *(V, "grid of own fails with AttributeError", "'Br'"),
    ),
    "grid takes one argument": (
        lambda: with_launch(grid=lambda p: 1),
        *(V, "grid of own fails with TypeError", "argument"),
    ),
    "grid float": (lambda: with_launch(grid=lambda p, c: p.M / 2), V, r"grid=\(2.0,\)", "whole"),
    "grid negative": (lambda: with_launch(grid=lambda p, c: -1), V, r"grid=\(-1,\)", "must give"),
    "grid zero": (lambda: with_launch(grid=lambda p, c: 0), V, r"grid=\(0,\)", "at least one"),
    "grid None": (lambda: with_launch(grid=lambda p, c: None), V, r"grid=\(None,\)", "must give"),
    "grid of four axes": (lambda: with_launch(grid=lambda p, c: (1,) * 4), V, "one to three"),
    "grid too large": (
        lambda: with_launch(grid=lambda p, c: 2**31),
        U,
        "2,147,483,648 x 1",
        "CUDA",
    ),
    "threads zero": (lambda: with_launch(threads=lambda p, c: 0), V, "threads=0", "at least one"),
    "threads tuple": (lambda: with_launch(threads=lambda p, c: (8, 8)), V, r"threads=\(8, 8\)"),
    "threads too many": (
        lambda: with_launch(threads=lambda p, c: 2048),
        U,
        "2,048 threads",
        "1,024",
    ),
    "shared negative": (lambda: with_launch(shared=lambda p, c: -1), V, "shared=-1", "must give"),
    "shared too large": (lambda: with_launch(shared=lambda p, c: 10**9), U, "1,000,000,000 bytes"),
    "when raises": (lambda: with_launch(when=lambda p: p.L), V, "when fails with AttributeError"),
    "rule raises": (
        lambda: attention(kernel=own(rules={"odd": lambda c: c.Br % 2})),
        *(V, "rule 'odd' fails with AttributeError", "'Br'"),
    ),
    "no file": (lambda: attention(kernel=own()), F, "/own.cu, the file of kernel own", "folder="),
}


@pytest.mark.parametrize(
    "call, error, words", [(c, e, w) for c, e, *w in CALLS.values()], ids=CALLS
)
def test_a_bad_call_is_one_line_and_leaves_nothing(call, error, words, capfd):
    ALIVE.clear()
    before = files()
    message = refusal(call, error)
    assert "\n" not in message
    says(message, *words)
    gc.collect()
    assert not [array for array in ALIVE if array() is not None], "arrays of the call are alive"
    assert files() == before
    still_works()
    assert capfd.readouterr() == ("", "")


def refusal(call, error):
    """What a call says that raises an error; nothing of the error lives on."""
    try:
        call()
    except error as raised:
        assert type(raised) is error or error is MemoryError
        return str(raised)
    pytest.fail(f"no {error.__name__}")


@pytest.mark.parametrize("scale", [Fraction(1, 3), np.float16(0.5), np.int8(2)])
def test_numbers_of_other_kinds_are_scales(scale):
    np.testing.assert_allclose(
        attention(a(4, 8, of=np.ones), scale=scale),
        attention(a(4, 8, of=np.ones), scale=float(scale)),
    )


def test_sizes_may_be_numpys():
    large = problem(**{name: np.int16(181) for name in ("M", "N", "heads", "batch")})
    assert cupyfa.planner.select.plan(FORWARD["fa2_coalesced"], large, Simulator().limits).launches[
        0
    ].grid[0] == 181 * 181 * math.ceil(181 / 128)


# Kernels of one's own


GRID = "grid=lambda p, c: (cdiv(p.M, 64), p.heads, p.batch)"
BEFORE = "mine = Kernel"
# What is replaced in the script or in the kernel's file, the code, and words of the message.
SCRIPTS = {
    "no tiles": (("features=", "tiles=(), features="), 2, r"script\.py:\d+: ", "tiles must hold"),
    "unknown feature": (('"strides"', '"mask"'), 2, "features are causal", r"but here \('mask'"),
    "unknown dtype": (("features=", "dtypes=('int8',), features="), 2, "dtypes are float16"),
    "scratch kind": (("features=", 'scratch={"S": ("M", "half")}, features='), 2, "'half'"),
    "unknown operation": (("features=", 'operation="pool", features='), 2, "'pool'", "softmax, f"),
    "grid float": ((GRID, "grid=lambda p, c: p.M / 2"), 2, r"mine: .* grid=\(2.5,\)", "whole"),
    "grid negative": ((GRID, "grid=lambda p, c: -p.M"), 2, r"grid=\(-5,\)", "must give whole"),
    "grid zero": ((GRID, "grid=lambda p, c: p.M // 64"), 2, r"grid=\(0,\)", "at least one block"),
    "grid raises": ((GRID, "grid=lambda p, c: p.rows"), 2, "grid of mine fails with", "'rows'"),
    "grid too large": ((GRID, "grid=lambda p, c: 2**31"), 3, "2,147,483,648 x 1 x 1", "can: "),
    "threads too many": (("p, c: 64", "p, c: 4096"), 3, "4,096 threads a block", "allows 1,024"),
    "shared too large": (("threads=", "shared=lambda p, c: 10**9, threads="), 3, "1,000,000,000 b"),
    "unknown argument": (
        ("M N scale", "M N slope"),
        2,
        "mine: argument 'slope' is unknown",
        "are Q",
    ),
    "argument too few": (("M N scale", "M N"), 2, "mine takes .* were given", "let args= "),
    "argument too many": (
        ("M N scale", "M N M scale"),
        2,
        "mine takes .* were given",
        "let args= ",
    ),
    "script raises": (
        (BEFORE, f"raise OSError('a\\n\\nb')\n{BEFORE}"),
        2,
        r":5: OSError: a b; mend",
    ),
    "script exits": ((BEFORE, f"exit(0)\n{BEFORE}"), 2, r"script\.py:5: SystemExit: 0; mend"),
    "script recurs": ((BEFORE, f"def f(): f()\nf()\n{BEFORE}"), 2, "5: RecursionError: .*; mend"),
    "script imports": ((BEFORE, f"import nothing_there\n{BEFORE}"), 2, "No module named", "mend"),
    "script breaks off": (("launches=(", "launches=["), 2, "SyntaxError: .*line", "mend"),
    "script divides by zero": ((BEFORE, f"1 / 0\n{BEFORE}"), 2, "5: ZeroDivisionError: .*; mend"),
    "no such record": (
        (BEFORE, "other = Kernel"),
        2,
        "has no Kernel named 'mine'",
        "Kernels: other",
    ),
    "not a record": ((BEFORE, "mine = 3 or Kernel"), 2, "no Kernel named 'mine'", "Kernels: none"),
    "another entry": (
        ("void mine", "void yours"),
        2,
        r"mine\.cu has no kernel mine",
        "write there",
    ),
    "entry of another name": (
        ('"mine",\n            args', '"our", file="mine.cu", args'),
        2,
        "our",
    ),
}
FILES = {
    "kernel missing": (
        lambda x: (x / "mine.cu").unlink(),
        "mine.cu, the file of kernel mine",
        "put",
    ),
    "kernel a folder": (
        lambda x: ((x / "mine.cu").unlink(), (x / "mine.cu").mkdir()),
        *("mine.cu, the file of kernel mine", "Is a directory", "put it there"),
    ),
    "kernel not text": (
        lambda x: (x / "mine.cu").write_bytes(b"\xff\xfe"),
        *("mine.cu is not text in UTF-8", "byte 0xff", "save it"),
    ),
    "kernel empty": (
        lambda x: (x / "mine.cu").write_text(""),
        "mine.cu has no kernel mine",
        "write",
    ),
    "script missing": (lambda x: (x / "script.py").unlink(), "there is no file", "give the path"),
    "script a folder": (
        lambda x: ((x / "script.py").unlink(), (x / "script.py").mkdir()),
        *("there is no file", "give the path"),
    ),
    "script not text": (
        lambda x: (x / "script.py").write_bytes(b'x = "\xff"\n'),
        *(r"script\.py: SyntaxError: .*0xff", "mend the script"),
    ),
    "script of null bytes": (
        lambda x: (x / "script.py").write_bytes(b"x = 1\0\n"),
        *(r"script\.py: SyntaxError: .*null bytes", "mend the script"),
    ),
}


@pytest.mark.parametrize(
    "change, code, words", [(c, x, w) for c, x, *w in SCRIPTS.values()], ids=SCRIPTS
)
def test_a_bad_record_is_one_line(tmp_path, change, code, words):
    where = "py" if change[0] in own_kernel.SCRIPT else "cu"
    script = own_kernel.write(tmp_path, **{where: change})
    refused(["run", f"{script}:mine", *SIMULATOR, *SMALL], code, words)


@pytest.mark.parametrize("spoil, words", [(spoil, w) for spoil, *w in FILES.values()], ids=FILES)
@pytest.mark.parametrize("how", ["run", "compile"])
def test_a_bad_file_is_one_line(tmp_path, spoil, words, how):
    script = own_kernel.write(tmp_path)
    spoil(tmp_path)
    rest = [*SIMULATOR, *SMALL] if how == "run" else ["--arch", "90", "--dtype", "float32"]
    refused([how, f"{script}:mine", *rest], 2, words)


def refused(args, code, words):
    """A command line that must end with a code and one line, and leave all as it was."""
    before = files()
    done = command(*args, code=code)
    assert done.stdout == ""
    says(line_of(done.stderr), *words)
    assert files() == before
    still_works()


BODY = "const int row"
# What is replaced in the kernel's file, and what the compilers say of it.
TEXTS = {
    "syntax": (("if (row >= M) return;", "if (row >= M return;"), 9, "expected"),
    "unknown name": (("real score = 0;", "real score = nought;"), 12, "nought"),
    "static_assert": (
        (BODY, f'static_assert(d % 2 == 0, "d is even");\n  {BODY}'),
        *(8, "static assertion failed.*d is even"),
    ),
    "shared= is not sizeof(Shared)": (
        (
            BODY,
            "struct Shared { real x[8]; };\n"
            f'static_assert(sizeof(Shared) == shared_bytes, "shared= is sizeof");\n{BODY}',
        ),
        *(9, "static assertion failed.*shared= is sizeof"),
    ),
    "header missing": (("<math.cuh>", "<nothing.cuh>"), 2, r"nothing\.cuh"),
    "error in a macro": ((BODY, f"#error not today\n  {BODY}"), 8, "not today"),
}


@pytest.mark.parametrize("change, line, words", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("how", ["run", "compile"])
def test_a_compilers_words_name_the_kernels_own_file_and_line(tmp_path, change, line, words, how):
    script = own_kernel.write(tmp_path, cu=change)
    rest = [*SIMULATOR, *SMALL] if how == "run" else ["--arch", "90", "--dtype", "float32", "-d", 3]
    before = files()
    stderr = command(how, f"{script}:mine", *rest, code=2).stderr
    place = rf"{tmp_path}/mine\.cu[:(]{line}[:)]"
    assert re.search(rf"{place}.*error.*{words}", stderr), stderr
    assert "Traceback" not in stderr
    assert files() == before
    still_works()


def test_what_a_script_prints_is_not_among_the_data(tmp_path):
    script = own_kernel.write(tmp_path, py=(BEFORE, f"print('hello')\n{BEFORE}"))
    done = command("run", f"{script}:mine", *SIMULATOR, *SMALL, "--format", "json", code=0)
    assert json.loads(done.stdout)[0]["passed"]
    assert done.stderr == "hello\n"


def test_a_script_leaves_the_path_of_modules_alone(tmp_path):
    script = own_kernel.write(tmp_path, py=(BEFORE, f"import sys\nsys.path.clear()\n{BEFORE}"))
    before = list(sys.path)
    command("run", f"{script}:mine", *SIMULATOR, *SMALL, code=0)
    assert sys.path == before


# Command lines


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with a file of ``bench --save``, and with others that are none."""
    folder = tmp_path_factory.mktemp("results")
    save = ("--budget", "0", "--alone", "--save", folder / "good.json")
    command("bench", "fa2", *SIMULATOR, *SMALL, *save, code=0)
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
    """A file of a failure, as ``check`` writes it."""
    case = Case("forward", problem())
    outcome = failures.Outcome(kernel, failures.WRONG_RESULT, arrays=case.inputs())
    failure = failures.Failure(case, outcome, command="")
    made_with = {"device": "the simulator", "cupyfa": "0"}
    return failures.write(folder, failure, reruns=0, made_with=made_with)


NO_FAILURE = "is damaged, or no file of `cupyfa check`"
NOT_OURS = "is no file that cupyfa bench --save writes"
FA2 = "fa2 --backend simulator -B 1 -H 1 -M 5 -N 4 -d 3"
COMMANDS = {
    # run, list, show, compile
    "no command": ("nonsense", 2, "No such command 'nonsense'", "--help"),
    "run": ("run", 2, "Missing argument 'KERNEL'", "--help"),
    "run empty": (["run", ""], 2, "kernel '' is unknown", "there are softmax_safe"),
    "run M": (f"run {FA2} -M 99999999999", 2, "M is 99999999999", "0 to 2,147,418,112"),
    "run M text": (f"run {FA2} -M many", 2, "'many' is not a valid integer", "--help"),
    "run -M -1": (f"run {FA2} -M -1", 2, "-1 is not in the range", "--help"),
    "run heads": (f"run {FA2} -H 3 --kv-heads 2", 2, "heads=3 is not a multiple of kv_heads=2"),
    "run scale": (f"run {FA2} --scale nan", 2, "scale is nan", "finite"),
    "run scale large": (f"run {FA2} --scale 1e39", 2, r"scale is 1e\+39", "finite"),
    "run elements": (
        "run v1 --backend simulator -B 2147418112 -H 2147418112 -M 2147418112 -d 9",
        *(2, "elements", r"the most are 2\*\*59"),
    ),
    "run memory": (
        "run v1 --backend simulator -B 1 -H 1 -M 2147418112 -N 1 -d 10000 --dv 10000",
        *(3, "allocate .* TiB", "give smaller sizes"),
    ),
    "run grid": ("run fa2 --backend simulator -M 2147418112 -N 1 -d 8 -H 2000000", 3, "a grid of"),
    "run tile": (f"run {FA2} --Br 0", 2, "Br=0 is no tile size", "whole number from 1"),
    "run tile 2": (f"run {FA2} -c Br=x", 2, "'Br=x' is not NAME=VALUE", "whole number"),
    "run tile 3": (f"run {FA2} -c =3", 2, "'=3' is not NAME=VALUE", "for example Br=64"),
    "run tile twice": (
        f"run {FA2} --Br 32 -c Br=64",
        2,
        "Br is given twice, as 32 and 64",
        "leave",
    ),
    "run constant twice": (f"run {FA2} -c Bc=32 -c Bc=64", 2, "Bc is given twice", "leave one out"),
    "run tile 4": (f"run {FA2} -c Br=99999999999999999999", 3, "threads a block", "leave Br"),
    **{
        f"run {args}": (f"run {FA2} {args}", 2, words)
        for args, words in {
            **{f"{size} -3": "-3 is not in the range x>=0" for size in ("-B", "-H", "-N", "-d")},
            "-M": "requires an argument",
            "--seed -1": "Invalid value for '--seed': -1",
            "--causal=upper": "'upper' is not one of 'bottom-right', 'top-left'",
            "-c X=3": "fa2 has no constant 'X'; it has Br, Bc",
            "-c Br": "constant 'Br' is not NAME=VALUE",
            "-c Br=-2": "constant 'Br=-2' is not NAME=VALUE",
            "-c Br=²": "constant 'Br=²' is not NAME=VALUE",
        }.items()
    },
    "run fit": (
        "run minimal -d 100000 --backend simulator",
        *(3, "needs 1,200,004 bytes of shared memory a block; the simulator has 232,448", "can: "),
    ),
    "list extra": ("list extra", 2, r"unexpected extra argument \(extra\)"),
    "run format": (f"run {FA2} --format xml", 2, "'xml' is not one of 'table', 'json'", "--help"),
    "run layout": (f"run {FA2} --layout x", 2, "'x' is not one of 'bhsd'", "--help"),
    "run schedule": (f"run {FA2} --schedule -1", 2, "-1 is not in the range", "--help"),
    "run script": ("run here.py", 2, "'here.py' names no record", "write here.py:name"),
    "run nowhere": ("run here.py:mine", 2, "there is no file 'here.py'", "give the path"),
    "run softmax": ("run softmax_safe -d 4", 2, "has no d; leave it out"),
    "run cuda": ("run fa2 --backend cuda", 3, "no CUDA device", "use backend 'simulator'"),
    "list cuda": ("list --backend cuda", 3, "no CUDA device", "use backend 'simulator'"),
    "list dtype": ("list --dtype int8", 2, "'int8' is not one of", "--help"),
    "show": ("show auto", 2, "kernel 'auto' is unknown", "there are softmax_safe"),
    "show arch": ("show fa2 --arch 61", 2, "architecture '61' is unknown", "there are 75, 80"),
    "show no arch": (["show", "fa2", "--arch", ""], 2, "architecture '' is unknown", "there are"),
    "show two": ("show fa2 --source --ptx", 2, "--source and --ptx are 2 views", "one at a time"),
    "show softmax": (
        "show softmax_safe --plan --causal -d 7 --dv 9 -H 5",
        *(2, "a softmax is M rows of N scores and has no causal, d, dv, heads; leave it out"),
    ),
    "show fit": ("show fa2 --Br 128 -d 128 --arch 75", 3, "sm_75 has 65,536", "leave Br"),
    "compile": ("compile", 2, "name kernels, or give --all"),
    "compile both": ("compile fa2 --all", 2, "name kernels, or give --all"),
    "compile fit": ("compile fa2 -d 30000", 3, "bytes of shared memory a block"),
    "compile arch": ("compile fa2 --arch 90,x", 2, "architecture 'x' is unknown", "there are 75"),
    "compile softmax": ("compile softmax_safe --causal -d 9", 2, "no causal, d; leave it out"),
    "compile window": ("compile softmax_safe --window 3,3", 2, "has no window; leave it out"),
    "compile d": ("compile fa2 -d 99999999999", 2, "d is 99999999999", "0 to"),
    "compile dtype": ("compile v3 --dtype float64", 3, "its dtypes are float16", "can: "),
    # bench, compare, tune, ladder
    "bench": ("bench --backend simulator", 2, "name kernels, or give --all"),
    "bench kernel": ("bench nope --backend simulator", 2, "kernel 'nope' is unknown", "there are"),
    "bench range": (f"bench {FA2} -p M=1:2", 2, "'1:2' is no range", "FIRST:LAST"),
    "bench backwards": (f"bench {FA2} -p M=4:1:*2", 2, "does not lead from 4 to 1"),
    "bench on and on": (f"bench {FA2} -p M=1:99999999999:+1", 2, "more than 10,000", "larger step"),
    "bench many": (
        "bench fa2 --backend simulator -p M=1:999:+1 -p N=1:999:+1",
        2,
        "998,001 combinations",
        "most",
    ),
    "bench nothing": (f"bench {FA2} -p M=", 2, "'M=' is not NAME=VALUES", "for example"),
    "bench values": (f"bench {FA2} -p M=a", 2, "M='a' is no whole number from 0", "as M=64"),
    "bench below": (f"bench {FA2} -p d=-3", 2, "d='-3' is no whole number from 0", "give one"),
    "bench tile below": (f"bench {FA2} -p Br=-3", 2, "Br='-3' is no whole number from 1", "give"),
    "bench name": (f"bench {FA2} -p X=4", 2, "'X' is no size", "constants Bc, Br"),
    "bench twice": ("bench fa2 --backend simulator -p M=3 -p M=4", 2, "M is given twice", "in one"),
    "bench both": (f"bench {FA2} -p d=16", 2, "d is given twice, as 3 and by -p d=16", "leave one"),
    "bench both B": (f"bench {FA2} -p B=2", 2, "batch is given twice, as 1 and by -p B=2", "leave"),
    "bench both dtype": (
        f"bench {FA2} --dtype float64 -p dtype=float32",
        *(2, "dtype is given twice, as float64", "leave one out"),
    ),
    "bench both masks": (
        f"bench {FA2} --causal -p causal=false",
        *(2, "causal is given twice, as bottom-right", "leave one out"),
    ),
    "bench both totals": (
        "bench fa2 --backend simulator --tokens 8 -p tokens=16",
        *(2, "tokens is given twice, as 8", "leave one out"),
    ),
    "bench graph": (f"bench {FA2} --graph", 3, "the simulator has no CUDA graphs", "leave --graph"),
    "roofline both": ("roofline -d 32 -p d=64", 2, "d is given twice, as 32", "leave one out"),
    "bench dtype": (f"bench {FA2} -p dtype=int8", 2, "dtype 'int8' is not supported", "use one of"),
    "bench causal": (f"bench {FA2} -p causal=maybe", 2, "'maybe' is unknown", "use one of false"),
    "bench scale": (f"bench {FA2} -p scale=x", 2, "scale='x' is no number"),
    "bench rule": (f"bench {FA2} -p Br=17 -p Bc=17", 2, "breaks its rule: Bc is below 16"),
    "bench tokens": (f"bench {FA2} --tokens 7", 2, "tokens and batch say the same", "leave one"),
    "bench budget": (f"bench {FA2} --budget nan", 2, "budget is nan", "a number from 0"),
    "bench budget -1": (f"bench {FA2} --budget -1", 2, "-1.0 is not in the range", "--help"),
    "bench against": (
        f"bench {FA2} --against magic",
        2,
        "peer 'magic' is unknown",
        "there are fa2",
    ),
    "bench softmax": ("bench softmax_safe -d 5 --backend simulator", 2, "no d; leave it out"),
    "bench dtype it lacks": (
        f"bench v3 --alone --dtype float64 {FA2[4:]}",
        3,
        "its dtypes",
        "can: ",
    ),
    "run far": (
        "run fa2 --layout far -M 8 -N 8 -d 8 --backend simulator",
        *(3, "the simulator does not reach so far"),
    ),
    "bench cuda": ("bench fa2 --backend cuda", 3, "no CUDA device", "use backend 'simulator'"),
    "bench save": (f"bench {FA2} --save no/where.json", 2, "cannot be written", "folder no"),
    "bench save folder": (f"bench {FA2} --save folder", 2, "'folder' is a directory", "--help"),
    "compare": ("compare good.json", 2, "Missing argument 'B.json'", "--help"),
    "compare missing": ("compare no.json good.json", 2, "no.json cannot be read: No such file"),
    "compare folder": ("compare folder good.json", 2, "folder cannot be read: Is a directory"),
    **{
        f"compare {name}": (f"compare good.json {name}.json", 2, f"{name}.json {NOT_OURS}")
        for name in [
            *("foreign", "list", "cut", "text", "nothing", "other", "bytes", "sizes", "words"),
            *("number", "key", "operation", "times", "problem", "where", "nowhere"),
        ]
    },
    "compare percent": (
        "compare good.json good.json --fail-slower nan",
        *(2, "'nan' is no percentage", "write 5%"),
    ),
    "tune": ("tune", 2, "Missing argument 'KERNEL'", "--help"),
    "tune auto": ("tune auto --backend simulator", 2, "kernel 'auto' is unknown", "there are"),
    "tune nothing": ("tune fa2 --backend simulator -M 0", 2, "nothing to do", "sizes from 1"),
    "tune budget": ("tune fa2 --backend simulator --budget nan", 2, "budget is nan", "from 0"),
    "tune softmax": ("tune softmax_safe --backend simulator -d 4", 2, "which has no d"),
    "tune fit": (
        "tune minimal --backend simulator -d 100000",
        3,
        "bytes of shared memory",
        "can: ",
    ),
    "tune dtype": ("tune v3 --backend simulator --dtype float64", 3, "its dtypes", "can: "),
    "ladder plot": ("ladder --plot x.txt", 2, "x.txt is no picture", ".svg or .png"),
    "ladder plot nowhere": ("ladder --plot no/x.svg", 2, "no/x.svg cannot be written", "folder no"),
    "ladder lengths": ("ladder --plot x.svg -N 5 --backend simulator", 2, "leave -N out"),
    "ladder from": ("ladder --from no.json", 2, "no.json cannot be read: No such file"),
    "ladder foreign": ("ladder --from foreign.json", 2, f"foreign.json {NOT_OURS}"),
    "ladder empty": ("ladder --from empty.json", 2, "no rung to make a ladder of", "measure rungs"),
    "ladder length": ("ladder --from good.json -M 9", 2, "M=9 was not measured", "there are 5"),
    **{
        f"ladder from {option}": (
            f"ladder --from good.json {option}",
            *(2, f"--from measures nothing, so {option.split()[0]} has no say", "leave one out"),
        )
        for option in ("-d 32", "--dtype float64", "--dtype float16", "--causal", "--batch 1")
        + ("-N 4", "--window 3,3", "--budget 1", "--backend simulator", "--backward")
    },
    "ladder from two": ("ladder --from good.json -d 3 --dv 3", 2, "so -d, --dv have no say"),
    "ladder save": ("ladder --save no/x.json", 2, "no/x.json cannot be written", "folder no"),
    # check, replay
    "check": ("check --backend simulator", 2, "name kernels, or give --all"),
    "check kernel": ("check nope --backend simulator", 2, "kernel 'nope' is unknown", "there are"),
    "check script": (
        "check gone.py:x --backend simulator",
        2,
        "no file 'gone.py'",
        "give the path",
    ),
    "check grid": ("check fa2 --grid large", 2, "'large' is not one of 'smoke'", "--help"),
    "check samples": ("check fa2 --samples 0", 2, "0 is not in the range", "--help"),
    "check reruns": ("check fa2 --reruns -1", 2, "-1 is not in the range", "--help"),
    "check jobs": ("check fa2 --jobs -1", 2, "-1 is not in the range", "--help"),
    "check timeout": ("check fa2 --timeout 0", 2, "0.0 is not in the range", "--help"),
    **{
        f"check timeout {seconds}": (
            f"check fa2 --backend simulator --timeout {seconds}",
            *(2, f"timeout is {re.escape(seconds)}", "more than 0 and at most 1,000,000"),
        )
        for seconds in ("nan", "inf", "1e+300")
    },
    "check failures": ("check fa2 --failures good.json", 2, "'good.json' is a file", "--help"),
    "check cuda": ("check fa2 --backend cuda", 3, "no CUDA device", "use backend 'simulator'"),
    "replay": ("replay", 2, "Missing argument 'FILE'", "--help"),
    "replay missing": ("replay no.npz", 2, "'no.npz' does not exist", "--help"),
    "replay folder": ("replay folder", 2, "'folder' is a directory", "--help"),
    **{
        f"replay {name}": (f"replay {name} --backend simulator", 2, f"{name} {NO_FAILURE}")
        for name in ("cut.npz", "text.npz", "other.npz", "good.json", "bytes.json")
    },
    "replay kernel": ("replay good.npz --kernel v9 --backend simulator", 2, "'v9' is unknown"),
    "replay operation": (
        "replay good.npz --kernel softmax_safe --backend simulator",
        *(2, "softmax_safe computes softmax", "are of forward"),
    ),
    "replay gone": ("replay gone.npz --backend simulator", 2, "no file 'gone.py'", "give the path"),
    "replay cuda": ("replay good.npz --backend cuda", 3, "no CUDA device", "use backend 'sim"),
    # the others
    "doctor": ("doctor --xml", 2, "No such option '--xml'", "--help"),
    "cache": ("cache fill", 2, "No such command 'fill'", "--help"),
    "cache clear": ("cache clear all", 2, "'all' is not one of 'compiled'", "--help"),
    "cache clear cupy": ("cache clear cupy", 2, "is every program's", "add --cupy"),
    "cache warm masks": (
        "cache warm fa2 --causal --both --backend simulator",
        *(2, "--causal and --both say different things", "leave one out"),
    ),
    "cache warm softmax": (
        "cache warm softmax_safe -d 8 --causal --backend simulator",
        *(2, "has no causal, d; leave it out"),
    ),
    "cache warm": ("cache warm", 2, "name kernels, or give --all"),
    "cache warm kernel": (
        "cache warm nope --backend simulator",
        2,
        "'nope' is unknown",
        "there are",
    ),
    "cache warm d": ("cache warm fa2 -d x --backend simulator", 2, "d='x' is no whole number"),
    "cache warm fit": (
        "cache warm minimal -d 99999 --backend simulator",
        3,
        "shared memory",
        "can: ",
    ),
    "profile": ("profile nope", 2, "kernel 'nope' is unknown", "there are"),
    "profile simulator": ("profile fa2 --backend simulator", 3, "no counters", "--print"),
    "profile print": (
        "profile fa2 --backend simulator --print",
        *(3, "no counters; profile on a GPU: leave --backend out"),
    ),
    "profile tool": ("profile fa2 --tool gdb", 2, "'gdb' is not one of 'ncu', 'nsys'", "--help"),
}


@pytest.mark.parametrize(
    "args, code, words", [(a, x, w) for a, x, *w in COMMANDS.values()], ids=COMMANDS
)
def test_a_bad_command_line_is_one_line(results, monkeypatch, no_device, args, code, words):
    monkeypatch.chdir(results)
    before = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    refused(args.split() if isinstance(args, str) else args, code, words)
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
def test_torch_tensors_that_numpy_cannot_see(spoil):
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError) as raised:
        attention(q=spoil(torch.ones(4, 8)))
    says(str(raised.value), "q(, a| is a) (Tensor|Parameter)", "pass (it as )?a NumPy")
    still_works()
