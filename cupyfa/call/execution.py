"""Runs a call: looks up its Prepared in the cache or makes one, then launches the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np

from cupyfa.arrays.block_mask import BlockMask
from cupyfa.call.call import ANYWHERE, Call, Devices
from cupyfa.call.inputs import add_inputs
from cupyfa.call.kernel_arrays import add_kernel_arrays
from cupyfa.call.keywords import read_call
from cupyfa.call.prepare import find_prepared
from cupyfa.errors import described
from cupyfa.ladder.kernel import BoundKernel, Kernel
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.call_cache import LastCall, last_calls
from cupyfa.runtime.choose_backend import adopt_all, devices_of
from cupyfa.score.dropout import Dropout

# How to store a call so that it can be repeated: the function's name in ``last_calls`` (for a
# KVCache, a function that stores the call), and the call's non-array arguments.
Repeatable = tuple[str | Callable[[LastCall], None], tuple[Any, ...]]
# Immutable argument types.
_FIXED = {type(None), bool, int, float, str, tuple, Kernel, BlockMask, Dropout}


def run_call(
    call: Call,
    arrays: Sequence[Any],
    given: Mapping[str, Any] = MappingProxyType({}),
    out: Any = None,
    grads: Any = None,
    *,
    check: bool = False,
    before: Callable[[], None] | None = None,
    repeat: Repeatable | None = None,
    devices: Devices = ANYWHERE,
) -> Any:
    """Runs a call on arrays; returns the results, written to ``out`` or ``grads`` if given.

    given: optional inputs: bias, mask and other arrays, lengths, captured numbers. before: called
    after all checks and before the launches. repeat: how to store the call for repetition; ignored
    unless the call's Prepared was cached and all its arguments are immutable. devices: the caller's
    ``Devices``.
    """
    call, check = read_call(call, check)
    names = call.callers_names if call.inputs else call.required_names
    backend, arrays = adopt_all(call.backend, names, arrays)
    if given:
        call, arrays = add_inputs(call, backend, arrays, given, check)
    if isinstance(call.kernel, BoundKernel):
        call, arrays = add_kernel_arrays(call, backend, arrays)
    several: tuple[int, ...] = ()
    if devices.numbers is not None:
        several = _read_numbers(devices, backend, on_host=isinstance(arrays[0], np.ndarray))
        repeat = None
    with backend.on(several[0]) if several else nullcontext():
        forms = backend.forms(arrays)
        prepared, is_known = find_prepared(call, backend, arrays, forms)
        if is_known and repeat is not None and not check:
            keep, fixed = repeat
            # In the simulator, which has no streams, only calls on a KVCache can be repeated.
            may_repeat = backend.stream is not None or not isinstance(keep, str)
            if may_repeat and {*map(type, fixed)} - {type(backend)} <= _FIXED:
                last = LastCall(fixed, prepared)
                if isinstance(keep, str):
                    last_calls[keep] = last
                else:
                    keep(last)
        targets = prepared.targets(out, grads)
        if before is not None:
            before()
        shared_by = several if len(several) > 1 else ()
        progress = devices.progress
        return prepared.run(arrays, targets, check=check, progress=progress, devices=shared_by)


def _read_numbers(devices: Devices, backend: Backend, *, on_host: bool) -> tuple[int, ...]:
    """Returns the devices that share a call; the first device also runs undivided calls."""
    if not on_host:
        raise TypeError(
            f"backend is Devices({described(devices.numbers)}), but the arrays are already on a "
            "device; leave backend out, or pass NumPy arrays"
        )
    return devices_of(backend, devices.numbers)
