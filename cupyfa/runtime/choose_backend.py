"""Chooses the backend of a call by its name and by the memory of its arrays."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from cupyfa.errors import DeviceError, described, nearest, warn
from cupyfa.problem.optional_inputs import of_list
from cupyfa.runtime.arrays import is_masked
from cupyfa.runtime.backend import Backend

NAMES = ("auto", "cuda", "simulator")
CHOICE = "CUPYFA_BACKEND"  # the environment variable that overrides "auto"
_choosing = threading.RLock()
_owners: dict[type, Backend] = {}  # backend by array type
_HOST, _CUDA, _CUDA_MANAGED = 1, 2, 13  # DLPack device types


def backend_named(backend: str | Backend) -> Backend:
    """Returns a backend by its name; returns a Backend unchanged. "auto" prefers CUDA.

    CUPYFA_BACKEND overrides "auto". Raises DeviceError if "cuda" is requested and not available.
    """
    if isinstance(backend, str) and backend in NAMES:
        with _choosing:  # concurrent threads get the same backend
            return {"auto": _automatic, "cuda": _cuda, "simulator": _simulator}[backend]()
    if isinstance(backend, Backend):
        return backend
    known = f"use one of {', '.join(NAMES)}, or a Simulator with custom options"
    raise ValueError(f"backend {backend!r} is unknown{nearest(backend, NAMES)}; {known}")


def backend_to_measure(backend: str | Backend) -> Backend:
    """Returns the backend for measurements: the simulator only if it is requested by name.

    Raises DeviceError if "auto" would choose the simulator because there is no CUDA device.
    """
    if backend == "auto" and chosen_backend() == "auto" and (reason := _no_cuda()) is not None:
        raise DeviceError(
            f"{reason}, and simulator times do not predict GPU times; to measure them anyway, pass "
            'backend="simulator"'
        )
    return backend_named(backend)


def chosen_backend() -> str:
    """Returns CUPYFA_BACKEND, by default "auto". Raises ValueError for unknown names."""
    chosen = os.environ.get(CHOICE) or "auto"
    if chosen not in NAMES:
        known = f"use one of {', '.join(NAMES)}, or unset it"
        raise ValueError(f"{CHOICE} is {chosen!r}{nearest(chosen, NAMES)}; {known}")
    return chosen


def owner(backend: str | Backend, arrays: Sequence[Any]) -> Backend | None:
    """Returns the backend whose array type all arrays have, or None."""
    found = _owners.get(type(arrays[0]))
    if found is None or not (backend == "auto" or backend is found or backend == found.name):
        return None
    return found if len({*map(type, arrays)}) == 1 else None


def adopt(backend: str | Backend, **arrays: Any) -> tuple[Backend, list[Any]]:
    """Returns the backend for these arrays, and NumPy or CuPy views of them.

    NumPy arrays run anywhere; arrays in GPU memory (CuPy, DLPack, __cuda_array_interface__) run
    on CUDA. Raises TypeError for other types and for a mix of NumPy and GPU arrays.
    """
    values = list(arrays.values())
    theirs = owner(backend, values)
    return (theirs, values) if theirs is not None else adopt_foreign(backend, arrays)


def adopt_all(
    backend: str | Backend, names: Sequence[str], arrays: Sequence[Any]
) -> tuple[Backend, Sequence[Any]]:
    """Like ``adopt``, for names and arrays in two sequences."""
    theirs = owner(backend, arrays) if type(arrays[0]) in _owners else None
    return adopt_foreign(backend, dict(zip(names, arrays))) if theirs is None else (theirs, arrays)


def adopt_foreign(backend: str | Backend, arrays: Mapping[str, Any]) -> tuple[Backend, list[Any]]:
    """Like ``adopt``, for arrays that ``owner`` does not assign to a backend."""
    values = list(arrays.values())
    if (seen := _tensors(backend, values)) is not None:
        return seen
    if set(map(type, values)) == {np.ndarray}:
        return backend_named(backend), values
    host = {name: _on_host(name, array) for name, array in arrays.items()}
    if len(set(host.values())) > 1:
        where = ", ".join(f"{name} in {'host' if h else 'GPU'} memory" for name, h in host.items())
        raise TypeError(
            f"some arrays are in host memory and others in GPU memory ({where}); copy all arrays "
            "to host memory or to GPU memory"
        )
    if all(host.values()):
        return backend_named(backend), [
            np.asarray(x) if isinstance(x, np.ndarray) else _foreign(name, x, np.from_dlpack)
            for name, x in arrays.items()
        ]
    if backend == "simulator" or getattr(backend, "name", "cuda") == "simulator":
        are = "is" if len(arrays) == 1 else "are"
        raise TypeError(
            f"the simulator requires NumPy arrays, but {', '.join(arrays)} {are} in GPU memory; "
            "copy with cupy.asnumpy, or with .cpu() in torch"
        )
    cuda = backend_named("cuda" if backend == "auto" else backend)
    return cuda, [_foreign(name, array, cuda.adopt) for name, array in arrays.items()]


def as_array(backend: str | Backend, name: str, given: Any) -> Any:
    """Converts lists and other libraries' arrays to NumPy or CuPy arrays; keeps other values."""
    given = of_list(name, given)
    _refuse_masked(name, given)
    is_foreign = hasattr(given, "__dlpack__") or hasattr(given, "__cuda_array_interface__")
    if isinstance(given, np.ndarray) or hasattr(given, "get") or not is_foreign:
        return given
    _, (array,) = adopt(backend, **{name: given})
    return array


def devices_of(backend: Backend, devices: Any) -> tuple[int, ...]:
    """Returns the numbers of the devices that share a call, all of one model.

    devices: numbers, or "all" for all devices of the current device's model, the current one first.
    """
    models = backend.models
    if isinstance(devices, str) and devices == "all":
        alike = [i for i, model in enumerate(models) if model == models[backend.device]]
        return tuple(sorted(alike, key=lambda i: i != backend.device))
    numbers = _numbers(devices)
    if unknown := [i for i in numbers if not 0 <= i < len(models)]:
        raise ValueError(
            f'device {unknown[0]} does not exist; {_known(backend)}: pass device numbers, or "all"'
        )
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"devices is {list(numbers)}; pass one or more distinct device numbers; "
            f"{_known(backend)}"
        )
    if len({models[i] for i in numbers}) > 1:
        named = ", ".join(f"{i} is {models[i]}" for i in numbers)
        raise ValueError(
            f"the devices are different models ({named}); pass devices of the same model"
        )
    return numbers


def _known(backend: Backend) -> str:
    count = len(backend.models)
    return f"{backend.name} has device{'s' * (count > 1)} {', '.join(map(str, range(count)))}"


def _numbers(devices: Any) -> tuple[int, ...]:
    if isinstance(devices, Iterable) and not isinstance(devices, str):
        given = tuple(devices)
        if all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in given):
            return tuple(map(int, given))
    raise TypeError(f'devices is {described(devices)}; pass "all", or numbers such as [0, 1]')


def writable_view(backend: Backend, name: str, array: Any) -> Any:
    """Returns a writable view of another library's array, as a NumPy or backend array."""
    _, (view,) = adopt(backend, **{name: array})
    # Older DLPack versions only return read-only views.
    if isinstance(view, np.ndarray) and not view.flags.writeable:
        other = np.asarray(array)
        view = other if np.may_share_memory(other, view) else view
    return view


def _tensors(backend: str | Backend, values: list[Any]) -> tuple[Backend, list[Any]] | None:
    """Converts torch tensors in GPU memory without DLPack; returns None for other arrays."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    if kind is None or any(type(x) is not kind or not x.is_cuda for x in values):
        return None
    if getattr(backend, "name", backend) not in ("auto", "cuda"):
        return None
    cuda = backend_named("cuda" if backend == "auto" else backend)
    views = cuda.adopt_tensors(values)
    return None if views is None else (cuda, views)


def _refuse_masked(name: str, array: Any) -> None:
    if is_masked(array):
        raise TypeError(f"{name} is a MaskedArray, but kernels ignore masks; pass {name}.data")


def _on_host(name: str, array: Any) -> bool:
    _refuse_masked(name, array)
    if isinstance(array, np.ndarray):
        return True
    if hasattr(array, "__dlpack_device__"):
        device = _foreign(name, array, lambda x: x.__dlpack_device__()[0])
        if device == _HOST:
            return True
        if device in (_CUDA, _CUDA_MANAGED):
            return False
    elif hasattr(array, "__cuda_array_interface__"):
        return False
    remedy = "pass a NumPy or CuPy array, or an object with __dlpack__ or __cuda_array_interface__"
    if type(array).__module__.startswith("jax.") and type(array).__name__.endswith("Tracer"):
        remedy = "inside of jax.jit and other transformations of JAX, call cupyfa.jax.attention"
    raise TypeError(f"{name} is {described(array)}; {remedy}")


def _foreign(name: str, array: Any, view: Callable[[Any], Any]) -> Any:
    """Views another library's array; turns any error into a TypeError that names the array."""
    try:
        return view(array)
    except (DeviceError, MemoryError):
        raise
    except Exception as error:
        raise TypeError(
            f"{name}, a {type(array).__name__}, cannot be viewed as an array "
            f"({type(error).__name__}: {error}); pass it as a NumPy or CuPy array"
        ) from error


@cache
def _automatic() -> Backend:
    if (chosen := chosen_backend()) != "auto":
        return backend_named(chosen)
    reason = _no_cuda()
    if reason is None:
        return _cuda()
    warn(
        f"{reason}: running in the simulator on the CPU, which is slow; {CHOICE}=simulator runs "
        "there without this note"
    )
    return _simulator()


@cache
def _cuda() -> Backend:
    reason = _no_cuda()
    if reason is not None:
        raise DeviceError(f"{reason}; use backend 'simulator', or 'auto'")
    from cupyfa.runtime.cuda.device import ARRAY, Cuda

    _owners[ARRAY] = cuda = Cuda()
    return cuda


def _no_cuda() -> str | None:
    """Returns the reason why CUDA cannot be used here, or None if it can."""
    try:
        from cupyfa.runtime.cuda import device as cuda
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); run `cupyfa doctor`"
    return cuda.unavailable()


@cache
def _simulator() -> Backend:
    from cupyfa.runtime.simulator import Simulator

    return Simulator()
