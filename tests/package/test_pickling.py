"""Every public object survives pickle and copy.deepcopy, or raises a clear error."""

import copy
import importlib
import inspect
import pickle
import pkgutil
import re
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
from helpers import own_kernel
from helpers.cli import SIMULATOR  # noqa: F401  # sets up the command line's module once

import cupyfa
import cupyfa.distributed as ranks
from cupyfa import errors
from cupyfa.errors import OfThisProcess
from cupyfa.problem.options import AttentionOptions

SIM = {"backend": "simulator"}
SIZES = {"M": 6, "N": 6, "d": 8, "heads": 2}
Q, K, V = np.random.default_rng(0).standard_normal((3, 1, 2, 6, 8)).astype(np.float32)
NOT_IMPORTED = ["cuda", "__main__", "templates", "nccl", ".mpi"]
NOT_IMPORTED += [f".{x}" for x in ("dask", "jax") if not find_spec(x)]
FAULT = errors.SimulatorFault("v1", (0, 1, 2), (3, 4, 5), "a race", "v1.cu:7")


def attended():
    return cupyfa.vjp(Q, K, V, kernel="fa2", backward_kernel="columns", **SIM)


def masked():
    """Returns a block mask that a call has already used, so that it holds stored tile maps."""
    mask = cupyfa.block_mask(mask_mod="key <= query + x", M=6, N=6, captured={"x": 1}, **SIM)
    cupyfa.attention(Q, K, V, mask=mask, kernel="fa2", **SIM)
    return mask


def cached():
    """Returns a KVCache that has been used, so that it holds the state of its last call."""
    k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (K, V))
    cache = cupyfa.KVCache(k, v, np.array([4], np.int32), layout="bshd")
    for _ in range(2):
        cupyfa.attention(Q[:, :, :1], cache, **SIM)
    return cache


@cache
def measured():
    sizes = {"M": 6, "N": 6, "d": 8, "heads": 1, "batch": 1}
    return cupyfa.bench("fa2", alone=True, budget=0, **sizes, **SIM)


def used():
    engine = cupyfa.Simulator(schedule=3, workers=2)
    for _ in range(3):
        cupyfa.attention(Q, K, V, kernel="fa2", backend=engine)
    return engine


def checked():
    return cupyfa.check("softmax_safe", grid="smoke", samples=1, dtypes="float32", **SIM)


def listed(queries):
    return cupyfa.vjp(list(queries), list(K), list(V), **SIM)[1]


def packed():
    q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (Q, K, V))
    ends = np.array([0, 2, 6], np.int32)
    return cupyfa.vjp(
        cupyfa.Packed(q, ends), cupyfa.Packed(k, ends), cupyfa.Packed(v, ends), **SIM
    )[1]


# One object of each public class and of each class that public functions return. Objects that keep
# state between calls have been used in a call.
EXAMPLES = {
    "AttentionOptions": lambda: AttentionOptions(causal=True, score_mod="score * 2"),
    "BlockMask": masked,
    "BlockMask of an array": lambda: ~cupyfa.block_mask(np.eye(6, dtype=bool)[None, None]),
    "BoundKernel": lambda: cupyfa.kernel("fa2").bind(),
    "Case": lambda: cupyfa.lab.Case("forward", cupyfa.Problem.of_sizes(**SIZES, bias="1hmn")),
    "CompilerNotFound": lambda: errors.CompilerNotFound("none"),
    "CompileError": lambda: errors.CompileError("a.cu: no"),
    "DeviceError": lambda: errors.DeviceError("lost"),
    "DeviceLost": lambda: errors.DeviceLost("lost"),
    "Devices": lambda: cupyfa.Devices([0, 1], print, "simulator"),
    "Dropout": lambda: cupyfa.Dropout(0.1, np.array([5]), 2),
    "Expected": lambda: cupyfa.lab.Expected(np.ones(3), np.zeros(3)),
    "Input": lambda: cupyfa.Input("heads", "real"),
    "Interrupted": lambda: importlib.import_module("cupyfa.lab.verify.checker").Interrupted(
        checked()
    ),
    "KVCache": cached,
    "Kernel": lambda: cupyfa.kernel("fa2"),
    "Launch": lambda: cupyfa.kernel("two_pass").launches[-1],
    "Limits": lambda: cupyfa.Simulator().limits,
    "Matmul": lambda: cupyfa.kernel("baseline").launches[0],
    "Measurement": lambda: measured()[0],
    "OutOfMemory": lambda: errors.OutOfMemory("out"),
    "Packed": lambda: cupyfa.Packed(Q[0], [0, 2, 6], used=np.array([1, 3])),
    "Padded": lambda: cupyfa.Padded(Q, [4]),
    "Plan": lambda: cupyfa.plan(**SIZES, causal=True, kernel="fa2", **SIM),
    "Prepared": lambda: cupyfa.compile(Q, K, V, kernel="fa2", **SIM),
    "Prepared of gradients": lambda: cupyfa.compile(
        Q, Q, K, V, Q, Q[..., 0], kernel="columns", **SIM
    ),
    "Problem": lambda: cupyfa.Problem.of_sizes(**SIZES, captured={"x": 2}, score_mod="score * x"),
    "Rotary": lambda: cupyfa.Rotary(Q[0, 0, :, :4], Q[0, 0, :, :4], interleaved=True),
    "Scaled": lambda: cupyfa.Scaled(Q, Q[:, :, 0, 0]),
    "Simulator": used,
    "SimulatorFault": lambda: FAULT,
    "TileChoice": lambda: cupyfa.kernel("fa2").choice,
    "Transfer": lambda: cupyfa.transfer.configure(),
    "Unsupported": lambda: errors.Unsupported("fa2 cannot compute that", "that"),
    "WrongResult": lambda: errors.WrongResult("wrong"),
    "Accuracy": lambda: cupyfa.lab.accuracy("fa2", **SIZES, **SIM)[0],
    "Checked": checked,
    "Comparison": lambda: cupyfa.lab.compare(measured(), measured())[0],
    "Finding": lambda: importlib.import_module("cupyfa.lab.analysis.diagnosis").Finding(
        "a", "ok", "b"
    ),
    "Replayed": lambda: importlib.import_module("cupyfa.lab.verify.checker").Replayed(
        None, None, "x"
    ),
    "Roof": lambda: cupyfa.lab.roofline(device="h100", d=8)[0],
    "Candidate": lambda: cupyfa.lab.tune("softmax_safe", budget=0, M=6, N=6, **SIM)[0],
    "pullback": lambda: attended()[1],
    "pullback of lists": lambda: listed(Q),
    "pullback of sequences": packed,
    "pullback of parts": lambda: cupyfa.merge_vjp([(Q, Q[..., 0])] * 2, **SIM)[1],
    "results": attended,
    "bfloat16": lambda: cupyfa.Problem.of_sizes(**SIZES, dtype=ml_dtypes.bfloat16),
    "Group": lambda: ranks.group(),
}


def public():
    """Returns the names of all public classes and of the classes that public functions return."""
    found = set()
    for name in cupyfa.__all__:
        x = getattr(cupyfa, name)
        if inspect.isclass(x):
            found.add(name)
            continue
        said = inspect.get_annotations(x).get("return")
        words = re.findall(r"\b[A-Z]\w+\b", said if isinstance(said, str) else repr(said))
        found |= {*words} - {"Any", "Array", "Callable", "None", "Pullback"}
    return found


@cache
def example(name):
    return EXAMPLES[name]()


def test_all_that_is_public_has_an_example():
    assert public() - EXAMPLES.keys() == set()


def exceptions():
    found = set()
    for module in pkgutil.walk_packages(cupyfa.__path__, "cupyfa."):
        if any(x in module.name for x in NOT_IMPORTED):
            continue
        for x in vars(importlib.import_module(module.name)).values():
            is_ours = inspect.isclass(x) and x.__module__ == module.name
            if is_ours and issubclass(x, BaseException) and not x.__name__.startswith("_"):
                found.add(x)
    return sorted(found, key=lambda x: x.__name__)


def test_every_exception_comes_back_with_all_that_it_has():
    every = exceptions()
    assert len(every) >= 9
    for kind in every:
        known = kind.__name__ in EXAMPLES
        made = EXAMPLES[kind.__name__]() if known else kind("a message")
        made.add_note("a note")
        for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), copy.copy(made)):
            assert type(again) is kind and str(again) == str(made)
            assert vars(again).keys() == vars(made).keys() and again.__notes__ == ["a note"]
            for name, x in vars(made).items():
                assert repr(getattr(again, name)) == repr(x)


def equal(a, b):
    """Returns whether two objects are equal, comparing arrays by their elements."""
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if is_dataclass(a) and not isinstance(a, type):
        return all(equal(getattr(a, x.name), getattr(b, x.name)) for x in fields(a))
    return a == b or (type(a).__eq__ is object.__eq__ and type(a) is type(b)) or callable(a)


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_public_object_is_pickled_or_says_why_not(name, protocol):
    made = example(name)
    if isinstance(made, OfThisProcess):
        with pytest.raises(
            TypeError, match="is tied to the process that created it and cannot be pickled; "
        ):
            pickle.dumps(made, protocol)
        assert copy.deepcopy(made) is copy.copy(made) is made
        return
    again = pickle.loads(pickle.dumps(made, protocol))
    for x in (again, copy.deepcopy(made), copy.copy(made)):
        assert type(x) is type(made)
        assert isinstance(made, BaseException) or equal(made, x), x


def test_copies_of_masks_caches_and_pullbacks_work():
    for make in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        mask = masked()
        whole = cupyfa.attention(Q, K, V, mask=mask, kernel="fa2", **SIM)
        again = cupyfa.attention(Q, K, V, mask=make(mask), kernel="fa2", **SIM)
        assert np.array_equal(whole, again)
        cache = cached()
        copied = make(cache)
        copied.lengths[0] = 3  # changes only the copy
        one, two = (cupyfa.attention(Q[:, :, :1], x, **SIM) for x in (cache, copied))
        assert cache.lengths[0] == 4 and not np.array_equal(one, two)
        _, pull = attended()
        assert equal(make(pull)(V), pull(V))


def test_a_record_made_in_a_process_says_where_to_put_it(tmp_path):
    record = cupyfa.kernel(f"{own_kernel.write(tmp_path)}:mine")
    assert pickle.loads(pickle.dumps(record)).name == "mine"
    from dataclasses import replace

    made = replace(record, adds="something else")
    for x in (made, made.launches[0]) if made.launches[0] is not record.launches[0] else (made,):
        with pytest.raises(pickle.PicklingError, match="put the Kernel into a script"):
            pickle.dumps(x)
    assert copy.deepcopy(made) is made
