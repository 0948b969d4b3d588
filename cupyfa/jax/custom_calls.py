"""Plans as custom calls of XLA.

A plan is made while a program is traced, from shapes alone. Its launches become a program: an array
of integers with function handles, grids, encoded arguments, and the places of addresses in them.
``handler.cpp``, which XLA calls, runs the program on XLA's buffers. It is compiled when it is first
needed, because a handler in Python would wait for the interpreter's lock in every call. Scratch
memory is one more result of the custom call, which XLA allocates.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from cupyfa.errors import Unsupported
from cupyfa.jax.array_forms import Form, ShapedCall
from cupyfa.ladder.kernel import Kernel, cdiv
from cupyfa.planner import choose_kernel as planning, source
from cupyfa.planner.plan import Plan, aligned_width
from cupyfa.runtime.arrays import contiguous_strides, is_readable
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import backend_named
from cupyfa.runtime.launcher import EncodedLaunch, Launcher
from cupyfa.runtime.simulator.machine import load_library

TARGET = "cupyfa_attention"  # XLA's name of the handler
_HANDLER = Path(__file__).with_name("handler.cpp")
_SOMEWHERE = 1 << 40  # an aligned address, for arrays without memory that describe a layout
_WORD, _ALIGNMENT = 8, 256  # bytes
_MOST_WORDS, _MOST_ARGUMENTS, _MOST_MAPS = 512, 64, 16  # of a launch, as in handler.cpp
_NO_MATMUL = "products by cuBLAS cannot run in a custom call of XLA"
_Prepare = ctypes.CFUNCTYPE(
    *(ctypes.c_bool, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
)
_DRIVER = "cuCtxGetCurrent", "cuCtxSetCurrent", "cuLaunchKernelEx", "cuTensorMapReplaceAddress"
_adding, _registering = threading.Lock(), threading.Lock()
_known: dict[int, tuple[XlaPlan, set[int]]] = {}  # plans, and the devices that have them
_kept: list[Any] = []  # programs, kernels and callbacks, which the handler reads


def call_on_gpu(shaped: ShapedCall, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Computes a call on JAX arrays by a custom call of XLA; raises if no kernel can.

    Arrays whose rows kernels cannot read as they are get padded columns.
    """
    made = prepared(shaped)
    buffers = [jax.ShapeDtypeStruct(*x) for x in made.buffers]
    padded = [
        jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x
        for x, more in zip(arrays, made.padding)
    ]
    # A scalar, since XLA's cache of compiled programs then finds equal calls in other processes.
    found = jax.ffi.ffi_call(TARGET, buffers)(*padded, plan=np.int64(made.number))
    shapes = [x.shape for x in shaped.results]
    return tuple(x if x.shape == shape else x[..., : shape[-1]] for x, shape in zip(found, shapes))


@dataclass(frozen=True, eq=False)
class XlaPlan:
    """A plan with the layout of XLA's buffers.

    padding: columns to append to each input. buffers: shapes and dtypes of the results as kernels
    write them, and of scratch memory. number: identifies the plan, in all processes alike.
    """

    shaped: ShapedCall
    plan: Plan
    padding: tuple[int, ...]
    buffers: tuple[Form, ...]
    number: int = 0

    def launcher(self, backend: Backend) -> tuple[Launcher, list[tuple[int, int]]]:
        """Compiles the kernels for the current device.

        Also returns the place of each of the launcher's arrays: the index of a buffer, of inputs
        and then of results, and bytes from its start.
        """
        shaped, plan = self.shaped, self.plan
        arrays = dict(_inputs(backend, shaped, self.padding))
        for result, (shape, dtype) in zip(shaped.results, self.buffers):
            array = _without_memory(backend, shape, dtype)
            array = array[..., : result.shape[-1]]
            arrays[result.name] = shaped.view(result.name, array)
        places = [(at, 0) for at in range(len(arrays))]
        for name, start in zip(*_scratch(plan, arrays)):
            shape, _ = {**plan.outputs, **plan.scratch}[name]
            array = _without_memory(backend, plan.stored_shape(name), plan.arrays[name][1])
            arrays[name] = array if array.shape == shape else array[..., : shape[-1]]
            places.append((len(self.padding) + len(self.buffers) - 1, start))
        return Launcher(backend, plan, arrays), places


@cache  # XLA's programs refer to plans as long as the process lives
def prepared(shaped: ShapedCall) -> XlaPlan:
    """Plans a call for the current device, compiles it, and makes it known to the handler.

    Other devices of the same model load the kernels here, too, because in the first call XLA may
    be capturing a CUDA graph.
    """
    backend, call = backend_named("cuda"), shaped.call
    _handler()
    with backend.working_on(None):
        limits = replace(backend.limits, no_matmul=_NO_MATMUL)
        kernel = call.kernel
        assert isinstance(kernel, str | Kernel)
        how = {"deterministic": call.deterministic}
        record = planning.select(kernel, call.operation, shaped.problem, limits, **how)
        plan = planning.plan(record, shaped.problem, limits, **(call.tiles or {}))
        laid_out = lay_out(backend, shaped, plan)
        launcher, places = laid_out.launcher(backend)
        made = replace(laid_out, number=_number(launcher.launches, places))
        with _adding:
            _known.setdefault(made.number, (made, set()))
        _add(backend, made.number, launcher, places)
    for device in _devices_like(backend):
        _prepare_on(device, made.number)
    return made


def _devices_like(backend: Backend) -> list[int]:
    """Returns JAX's devices in this process that are of the current device's model."""
    devices = [x.local_hardware_id for x in jax.local_devices(backend="cuda")]
    return [x for x in devices if backend.models[x] == backend.models[backend.device]]


def _prepare_on(device: int, number: int) -> None:
    backend = backend_named("cuda")
    made, prepared_on = _known[number]
    if device not in prepared_on:
        with backend.on(device), backend.working_on(None):
            _add(backend, number, *made.launcher(backend))


def lay_out(backend: Backend, shaped: ShapedCall, plan: Plan) -> XlaPlan:
    """Chooses the shapes of XLA's buffers for a plan."""
    padding = []
    arrays = _inputs(backend, shaped, (0,) * len(shaped.forms))
    for (name, seen), (shape, dtype) in zip(arrays.items(), shaped.forms):
        wide = aligned_width(shape[-1], dtype.itemsize)
        padding.append(0 if is_readable(plan, name, seen) else wide - shape[-1])
    buffers = []
    for result in shaped.results:
        stored = plan.stored_shape(result.name)
        wide = stored[-1] if stored != plan.outputs[result.name][0] else result.shape[-1]
        buffers.append(((*result.shape[:-1], wide), plan.outputs[result.name][1]))
    names, starts = _scratch(plan, {x.name: None for x in shaped.results})
    end = starts[-1] + plan.stored_bytes(names[-1]) if names else 1
    buffers.append(((end,), np.dtype(np.uint8)))
    return XlaPlan(shaped, plan, tuple(padding), tuple(buffers))


def encode(
    backend: Backend,
    launches: Sequence[EncodedLaunch],
    places: Sequence[tuple[int, int]],
    context: int,
    handle: Callable[[EncodedLaunch], int],
) -> list[int]:
    """Encodes launches as the program that ``handler.cpp`` runs.

    places: (buffer, bytes) of each of the launcher's arrays. context: the device's CUcontext.
    handle: returns the handle of a launch's kernel.
    """
    words = [len(launches), context]
    for launch in launches:
        step, values = launch.step, launch.values
        sizes = [cdiv(len(x), _WORD) for x in values]
        starts = [0, *accumulate(sizes)]
        too_many = max(
            *(starts[-1] / _MOST_WORDS, len(values) / _MOST_ARGUMENTS),
            len(launch.maps) / _MOST_MAPS,
        )
        if too_many > 1:
            raise Unsupported(
                f"{step.entry} has too many arguments for a custom call of XLA; call "
                "cupyfa.attention outside of jax.jit"
            )
        grid = (*step.grid, step.threads, step.shared_bytes, int(step.begins_early))
        counts = len(values), starts[-1], len(launch.addresses), len(launch.maps)
        words += [handle(launch), *grid, *counts, *starts[:-1]]
        memory = b"".join(x.ljust(n * _WORD, b"\0") for x, n in zip(values, sizes))
        words += np.frombuffer(memory, np.int64).tolist()
        for at, inside, place in launch.addresses:
            buffer, start = places[place.array]
            words += [starts[at] + inside // _WORD, buffer, start + place.offset]
        for at, place, like in launch.maps:
            buffer, start = places[place.array] if like.address else (-1, 0)
            encoded = backend.tensor_map(like._replace(address=0))
            words += [at, buffer, start + place.offset]
            words += np.frombuffer(encoded.tobytes(), np.int64).tolist()
    return words


def _inputs(backend: Backend, shaped: ShapedCall, padding: Sequence[int]) -> dict[str, Any]:
    """Returns arrays without memory, in the layout of a call's inputs, as kernels see them."""
    found = {}
    for name, (shape, dtype), more in zip(shaped.input_names, shaped.forms, padding):
        array = _without_memory(backend, (*shape[:-1], shape[-1] + more), dtype)
        found[name] = shaped.view(name, array[..., : shape[-1]])
    return found


def _without_memory(backend: Backend, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return backend.at(_SOMEWHERE, shape, dtype, contiguous_strides(shape, dtype))


def _scratch(plan: Plan, arrays: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Returns the plan's arrays that a call neither takes nor returns, and where they start."""
    names = [x for x in (*plan.outputs, *plan.scratch) if x not in arrays]
    sizes = [cdiv(plan.stored_bytes(x), _ALIGNMENT) * _ALIGNMENT for x in names]
    return names, [0, *accumulate(sizes)][: len(names)]


def _number(launches: Sequence[EncodedLaunch], places: Sequence[tuple[int, int]]) -> int:
    """Hashes launches, so that another process has the same number for an equal plan."""
    parts: list[Any] = [places]
    for x in launches:
        parts += [source.text(x.step), x.step.grid, x.step.threads, x.step.shared_bytes]
        parts += [x.step.begins_early, x.values, x.addresses, x.maps]
    digest = sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _add(
    backend: Backend, number: int, launcher: Launcher, places: Sequence[tuple[int, int]]
) -> None:
    """Makes a plan known to the handler, on the current device."""
    from cupyfa.runtime.cuda.device import driver_library

    context = ctypes.c_void_p()
    driver_library().cuCtxGetCurrent(ctypes.byref(context))
    launches = launcher.launches
    words = encode(backend, launches, places, context.value or 0, lambda x: x.kernel.kernel.ptr)
    with _adding:
        _, devices = _known[number]
        if backend.device in devices:
            return
        program = (ctypes.c_int64 * len(words))(*words)
        _kept.append((program, launches))
        devices.add(backend.device)
        _handler().cupyfa_add(ctypes.c_int64(number), backend.device, program)


def _prepare(number: int, device: int, message: int, size: int) -> bool:
    """Prepares a plan on a device of another model than that for which it was traced."""
    try:
        if number not in _known:
            raise Unsupported("the program was compiled in another process; trace it in this one")
        _prepare_on(device, number)
    except BaseException as error:
        text = f"cupyfa: {type(error).__name__}: {error}".encode()[: size - 1]
        ctypes.memmove(message, text + b"\0", len(text) + 1)
        return False
    return True


def _handler() -> ctypes.CDLL:
    """Returns the handler, which is compiled and registered with XLA once."""
    with _registering:
        return _registered_handler()


@cache
def _registered_handler() -> ctypes.CDLL:
    from cupyfa.runtime.cuda.device import driver_library

    library = load_handler()
    names = (ctypes.cast(getattr(driver_library(), x), ctypes.c_void_p).value for x in _DRIVER)
    functions, prepare = (ctypes.c_void_p * len(_DRIVER))(*names), _Prepare(_prepare)
    library.cupyfa_begin(functions, prepare)
    _kept.append(prepare)
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.cupyfa_call), platform="CUDA")
    return library


def load_handler() -> ctypes.CDLL:
    """Compiles ``handler.cpp`` with JAX's headers, or finds it in the cache directory."""
    return load_library(_HANDLER, [jax.ffi.include_dir()], jaxlib.__version__)
