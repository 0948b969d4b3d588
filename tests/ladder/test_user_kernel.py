"""A user's kernel outside the project: called from Python, and by its script's name."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from helpers import own_kernel
from helpers.cli import cli
from helpers.problems import DTYPES, qkv

import cupyfa
from cupyfa import Kernel, Launch
from cupyfa.numerics import reference

BARE = Path(__file__).with_name("bare.cu").read_text()
BARE_ARGS = ("Q K V O M N scale", "Q.data K.data V.data O.data M N heads scale")
HELPER = Path(__file__).with_name("helper.cuh").read_text()


def record(folder, *args, **changes):
    """Writes a script to a folder and returns its Kernel."""
    return runpy.run_path(str(own_kernel.write(folder, *args, **changes)))["mine"]


def bare(folder, helper=HELPER):
    """Writes a kernel with bare pointers as parameters, and its header; returns the record."""
    (folder / "helper.cuh").write_text(helper)
    kernel = record(folder, BARE, py=BARE_ARGS)
    return cupyfa.Kernel(**{**vars(kernel), "features": ()})


def arrays(M=70, N=45, d=20, dv=20, dtype="float32"):
    return qkv(M, N, dtype, heads=2, d=d, dv=dv)


def close(o, q, k, v):
    expected, _ = reference.attention(q, k, v, scale=q.shape[-1] ** -0.5)
    np.testing.assert_allclose(o, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_every_dtype(backend, tmp_path, dtype):
    q, k, v = arrays(dtype=dtype, dv=9)
    o = cupyfa.attention(q, k, v, kernel=record(tmp_path), backend=backend, check=True)
    assert (o.shape, o.dtype) == ((2, 2, 70, 9), q.dtype)


@pytest.mark.parametrize("written", [record, bare])
def test_tensors_carry_strides_and_bare_pointers_get_contiguous_copies(backend, tmp_path, written):
    q, k, v = (np.repeat(x, 2, axis=2)[:, ::-1, ::-2] for x in arrays())
    o = cupyfa.attention(q, k, v, kernel=written(tmp_path), backend=backend, check=True)
    close(o, q, k, v)


def test_bare_pointers_read_the_other_layout_too(backend, tmp_path):
    q, k, v = arrays()
    tokens = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    o = cupyfa.attention(*tokens, layout="bshd", kernel=bare(tmp_path), backend=backend, check=True)
    close(o.swapaxes(1, 2), q, k, v)


def test_the_next_call_uses_a_changed_kernel_or_header(backend, tmp_path):
    q, k, v = arrays(M=9, N=7, d=8, dv=8)
    for written, change in (
        (record, {"cu": ("score *= scale", "score *= -scale")}),
        (bare, {"helper": HELPER.replace("sum += real(a[i])", "sum -= real(a[i])")}),
    ):
        close(cupyfa.attention(q, k, v, kernel=written(tmp_path), backend=backend), q, k, v)
        kernel = written(tmp_path, **change)
        close(cupyfa.attention(q, k, v, kernel=kernel, backend=backend), q, -k, v)
    with pytest.raises(cupyfa.WrongResult, match=r"wrong result of mine on .*\n  O: error"):
        cupyfa.attention(q, k, v, kernel=kernel, backend=backend, check=True)


def test_run_on_every_backend(backend, tmp_path):
    script = own_kernel.write(tmp_path)
    shown = cli("run", f"{script}:mine", "--backend", backend.name, code=0).stdout.splitlines()
    assert shown[-1] == "PASS"
    assert shown[0] == "kernel   mine: a kernel of my own"


def test_run_in_the_users_own_folder(tmp_path, monkeypatch):
    own_kernel.write(tmp_path, py=("folder=", "folder=helped or "))
    script = tmp_path / "script.py"
    script.write_text("from beside import helped\n" + script.read_text())
    (tmp_path / "beside.py").write_text("helped = None\n")
    monkeypatch.chdir(tmp_path)
    assert cli("run", "script.py:mine", "--backend", "simulator", code=0).stdout.endswith("PASS\n")


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(6))
def test_random_sizes_suit_the_kernel(tmp_path, seed):
    script = own_kernel.write(tmp_path, py=('"strides", "dv"', '"strides",'))
    cli("run", f"{script}:mine", "--backend", "simulator", "--seed", str(seed), code=0)


def test_a_kernel_with_a_mangled_name_is_refused(tmp_path):
    script = own_kernel.write(tmp_path, cu=('extern "C" __global__', "__global__"))
    done = cli("run", f"{script}:mine", "--backend", "simulator", code=2)
    assert 'has no kernel mine; write there extern "C" __global__ void mine(...)' in done.stderr


TWO = Path(__file__).with_name("two.cu").read_text()


def test_a_file_may_have_several_kernels_and_shared_memory_of_any_size(backend, tmp_path):
    (tmp_path / "two.cu").write_text(TWO)
    rows = {"grid": lambda p, c: p.M * p.heads * p.batch, "file": "two.cu"}
    threads = {"weigh": 64, "divide": 1}
    two = Kernel(
        name="two",
        adds="nothing",
        operation="softmax",
        dtypes=("float64",),
        launches=tuple(
            Launch(
                entry,
                args=args,
                threads=lambda p, c, entry=entry: threads[entry],
                shared=lambda p, c, entry=entry: p.bytes(scalars=p.N) if entry == "weigh" else 0,
                **rows,
            )
            for entry, args in (("weigh", "S P M N heads"), ("divide", "P M N heads"))
        ),
        folder=tmp_path,
    )
    for N in (10, 20000, 7000, 20):
        x = np.random.default_rng(N).standard_normal((3, N))
        right, _ = reference.softmax(x)
        y = cupyfa.softmax(x, kernel=two, backend=backend)
        np.testing.assert_allclose(y, right, rtol=1e-12)
