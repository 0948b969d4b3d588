"""Pieces of device code as kernels of the simulator."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from string import Template

import numpy as np
import pytest

from cupyfa.errors import SimulatorFault
from cupyfa.planner import source as sources
from cupyfa.runtime.simulator import machine

INCLUDE = [sources.INCLUDE]
NAMES = "ABCDEFG"  # of a kernel's arrays


def code(name, **values):
    """A piece of device code, from the folder device_code beside its test; ``$name`` is a value."""
    (file,) = sources.ROOT.glob(f"tests/*/device_code/{name}.cu")
    return Template(file.read_text()).substitute(values)


def launch(body, *arrays, scalars=(), head="", names=NAMES, **options):
    """Runs the kernel of ``source``."""
    owned = [getattr(array, "array", array) for array in arrays]
    spans = [y if x is y or y.base is None else y.base for x, y in zip(arrays, owned)]
    machine.launch(
        source(body, *arrays, scalars=scalars, head=head, names=names),
        "test",
        [getattr(x, "value", np.uint64(y.ctypes.data)) for x, y in zip(arrays, owned)]
        + list(scalars),
        buffers=[machine.Buffer(n, a.ctypes.data, a.nbytes) for n, a in zip(names, spans)],
        include_dirs=INCLUDE,
        **{"grid": (1, 1, 1), "threads": 32, "shared_bytes": 0, **options},
    )


def source(body, *arrays, scalars=(), head="", names=NAMES):
    """The text of a kernel `test(A, B, ..., s0, s1, ...)`; its first line is that of the body.

    An array may be a tensor map of one, as helpers.hopper_code has them.
    """
    c_names = {"f": "float", "i": "int", "u": "unsigned", "d": "double"}
    parameters = [f"{_c_type(array)} {name}" for name, array in zip(names, arrays)]
    parameters += [f"{c_names[type(s).__name__[0]]} s{i}" for i, s in enumerate(scalars)]
    body = textwrap.dedent(body).strip("\n")
    return (
        f'{head}\nextern "C" __global__ void test({", ".join(parameters)}) {{\n'
        f'#line 1 "test.cu"\n{body}\n}}\n'
    )


def _c_type(array):
    types = {
        "float32": "float", "float64": "double", "int32": "int", "uint32": "unsigned",
        "uint64": "unsigned long long", "uint16": "unsigned short", "uint8": "unsigned char",
        "float16": "__half", "bfloat16": "__nv_bfloat16",
    }  # fmt: skip
    if hasattr(array, "array"):
        return "const __grid_constant__ TensorMap"
    return f"{types[array.dtype.name]}*"


def fault(body, *arrays, **options):
    with pytest.raises(SimulatorFault) as caught:
        launch(body, *arrays, **options)
    return caught.value


def fresh(value):
    """A kernel no cache holds yet."""
    return f'extern "C" __global__ void fresh(int* A) {{ A[0] = {value}; }}'


def run_fresh(value):
    A = np.zeros(1, np.int32)
    machine.launch(
        fresh(value), "fresh", [np.uint64(A.ctypes.data)], grid=(1, 1, 1), threads=1,
        shared_bytes=0, include_dirs=INCLUDE, buffers=[machine.Buffer("A", A.ctypes.data, 4)],
    )  # fmt: skip
    return A[0]


def in_new_process(folder, *values, **environment):
    code = (
        f"from helpers import device_code as t; print(*[t.run_fresh(v) for v in {list(values)!a}])"
    )
    paths = [str(Path(__file__).parents[1]), str(Path(machine.__file__).parents[3])]
    environment |= {"CUPYFA_CACHE_DIR": str(folder), "PYTHONPATH": ":".join(paths)}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def answer(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()
