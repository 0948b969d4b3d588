"""Runs a call: looks it up among the known ones, prepares it if it is new, and launches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyfa.arrays.block_mask import BlockMask
from cupyfa.call.call import ARRAYS, Call, Devices
from cupyfa.call.inputs import adopt_leading_array
from cupyfa.call.keywords import read_call
from cupyfa.call.prepare import prepare_call
from cupyfa.errors import described
from cupyfa.ladder.kernel import Kernel
from cupyfa.problem.optional_inputs import name_of
from cupyfa.problem.options import AttentionOptions, NotGiven
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.call_cache import last_calls
from cupyfa.runtime.choose_backend import adopt_foreign, devices_of, owner
from cupyfa.runtime.environment import Progress
from cupyfa.runtime.prepared import Form, Prepared, list_forms

# What ``repeat_call`` knows a call by: its function, and all of its arguments that are no arrays.
Repeatable = tuple[str, tuple[Any, ...]]
# Types of arguments that cannot change between two calls.
_FIXED = {
    *(type(None), NotGiven, bool, int, float, str, tuple, AttentionOptions, Kernel, BlockMask)
}


def run_call(
    call: Call,
    arrays: Sequence[Any],
    out: Any = None,
    grads: Any = None,
    *,
    check: bool = False,
    progress: Progress | None = None,
    before: Callable[[], None] | None = None,
    repeat: Repeatable | None = None,
    devices: Devices | None = None,
    several: tuple[int, ...] = (),
) -> Any:
    """The results of a call on arrays, some of them in the caller's ``out`` or ``grads``.

    before: what is done when all arguments were checked, ahead of the launches. devices: as callers
    give them; ``several`` of them share the work.
    """
    if devices is not None:
        return _run_on_devices(devices, call, arrays, out, grads, check, progress)
    call, check = read_call(call, check, progress)
    theirs = owner(call.backend, arrays)
    if theirs is None:
        backend, arrays, forms = _adopt_arrays(call, arrays)
    else:
        backend, forms = theirs, tuple(map(theirs.form, arrays))
    key = _make_key(call, forms)
    prepared = backend.calls.find(key)
    if prepared is None:
        prepared = _prepare_or_copy(call, backend, arrays, forms)
        backend.calls.add(key, prepared)
    elif repeat is not None and backend.stream is not None and not check:
        function, fixed = repeat
        if {*map(type, fixed)} - {type(backend)} <= _FIXED:
            last_calls[function] = fixed, prepared
    targets = prepared.targets(out, grads)
    if before is not None:
        before()
    return prepared.run(arrays, targets, check=check, progress=progress, devices=several)


def _run_on_devices(
    devices: Devices,
    call: Call,
    arrays: Sequence[Any],
    out: Any,
    grads: Any,
    check: bool,
    progress: Progress | None,
) -> Any:
    """A call on NumPy arrays that devices share; what they cannot share runs on the first one."""
    backend, q = adopt_leading_array(call, arrays)
    if not isinstance(q, np.ndarray):
        raise TypeError(
            f"devices is {described(devices)}, and the arrays lie on a device already; leave "
            "devices out, or give NumPy arrays"
        )
    numbers = devices_of(backend, devices)
    several = numbers if len(numbers) > 1 else ()
    with backend.on(numbers[0]):
        return run_call(call, arrays, out, grads, check=check, progress=progress, several=several)


def _adopt_arrays(
    call: Call, arrays: Sequence[Any]
) -> tuple[Backend, Sequence[Any], tuple[Form, ...]]:
    """The backend for arrays, the arrays as its own or NumPy's, and their forms."""
    names = *ARRAYS[call.operation], *map(name_of, call.inputs)
    backend, arrays = adopt_foreign(call.backend, dict(zip(names, arrays)))
    return backend, arrays, list_forms(backend, arrays)


def _make_key(call: Call, forms: tuple[Form, ...]) -> tuple[Any, ...]:
    """What decides how a call runs. Options are written out: True equals 1, which is refused."""
    kernel = call.kernel if isinstance(call.kernel, str) else id(call.kernel)  # kept by the plan
    asked = repr(call.asked) if call.asked else None
    tiles: Any = call.tiles
    if tiles is not None:  # whatever kind of mapping it is
        tiles = repr(dict(tiles) if isinstance(tiles, Mapping) else tiles)
    return (
        *(call.operation, forms, str(kernel), asked, call.options, call.layout),
        *(tiles, call.return_lse, call.return_max, call.deterministic),
        *(call.inputs, call.outputs, call.numbers, call.blocks, call.wrt),
    )


def _prepare_or_copy(
    call: Call, backend: Backend, arrays: Sequence[Any], forms: tuple[Form, ...]
) -> Prepared:
    """The prepared form of a call, copied from that of a call with other numbers if there is one.

    Numbers are those that expressions read, the softcap and those of dropout.
    """
    # A record's formulas may depend on the numbers.
    if call.operation == "softmax" or not isinstance(call.kernel, str):
        return prepare_call(call, backend, arrays, keep=False)
    options = AttentionOptions.of(call.options, call.asked)
    if not (call.numbers or options.softcap is not None or options.dropout):
        return prepare_call(call, backend, arrays, keep=False)
    names: Any = tuple((x.name, x.dtype) for x in call.numbers)
    alike = call._replace(options=None, asked={}, numbers=names)
    key = *_make_key(alike, forms), options.form
    if (like := backend.calls.find(key)) is not None:
        return like.with_numbers(options, call.numbers)
    prepared = prepare_call(call, backend, arrays, keep=False)
    backend.calls.add(key, prepared)
    return prepared
