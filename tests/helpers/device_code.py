"""Runs snippets of device code as kernels, in the simulator or on the GPU."""

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
from cupyfa.runtime.backend import Region
from cupyfa.runtime.simulator import machine

INCLUDE = [sources.WITH, sources.INCLUDE]
NAMES = "ABCDEFG"  # parameter names of a kernel's arrays


def code(name, **values):
    """Reads NAME.cu from the folder device_code next to a test, and fills in ``values``."""
    (file,) = sources.ROOT.glob(f"tests/**/device_code/{name}.cu")
    return Template(file.read_text()).substitute(values)


def launch(body, *arrays, scalars=(), head="", names=NAMES, **options):
    """Runs the kernel of ``source`` in the simulator."""
    text = source(body, *arrays, scalars=scalars, head=head, names=names)
    run(text, "test", *arrays, *scalars, names=names, **options)


def launch_on_device(
    body, *arrays, scalars=(), head="", names=NAMES, threads=32, shared_bytes=0, arch=None
):
    """Runs the kernel of ``source`` in one block on the GPU, compiled like the ladder's kernels."""
    import cupy

    from cupyfa.runtime.cuda import compiler

    text = source(body, *arrays, scalars=scalars, head=head, names=names)
    arch = arch or cupy.cuda.Device().compute_capability
    binary, _ = compiler.compile_text(text, "test.cu", arch, INCLUDE)
    kernel = compiler.Kernel(binary, "test").kernel
    copies = [cupy.asarray(array) for array in arrays]
    kernel((1,), (threads,), (*copies, *scalars), shared_mem=shared_bytes)
    for array, copy in zip(arrays, copies):
        array[...] = cupy.asnumpy(copy)


def run(text, entry, *arguments, names=NAMES, folders=INCLUDE, **options):
    """Runs a kernel's source in the simulator on arrays, tensor maps and scalars."""
    owned = [getattr(x, "array", x) for x in arguments]
    values = [
        np.array([y.ctypes.data]) if x is y and np.ndim(y) else np.array(getattr(x, "value", x))
        for x, y in zip(arguments, owned)
    ]
    regions = []
    for i, (name, x, y) in enumerate(zip(names, arguments, owned)):
        if np.ndim(y):
            memory = y if x is y or y.base is None else y.base
            low = memory.ctypes.data - int.from_bytes(values[i].tobytes()[:8], sys.byteorder)
            regions.append(Region(name, i, low, memory.nbytes))
    table = np.array([x.ctypes.data for x in values])
    options = {"grid": (1, 1, 1), "threads": 32, "shared_bytes": 0, **options}
    sizes = [x.nbytes for x in values]
    start = machine.starter(machine.build(text, folders, entry), sizes, regions=regions, **options)
    start(None, table.ctypes.data, 0)


def source(body, *arrays, scalars=(), head="", names=NAMES):
    """Returns the source of a kernel `test(A, B, ..., s0, s1, ...)` with this body.

    Line numbers count from the body's first line. An array may be a ``hopper_code.Map``.
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
    """Returns the source of a kernel that no cache contains yet."""
    return f'extern "C" __global__ void fresh(int* A) {{ A[0] = {value}; }}'


def run_fresh(value):
    A = np.zeros(1, np.int32)
    run(fresh(value), "fresh", A, threads=1)
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
