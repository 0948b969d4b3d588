"""A simulated device with separate memory and CuPy-like arrays.

Like the CUDA backend, the device transfers NumPy arrays in pieces and cannot use their addresses.
"""

from contextlib import contextmanager
from operator import attrgetter
from types import SimpleNamespace

import numpy as np
from helpers.device_arrays import DeviceArray
from helpers.far_device import FarDevice


class GpuArray(DeviceArray):
    """An array in the device's memory, with the parts of CuPy's interface that calls use."""

    __slots__ = ()

    def __init__(self, host):
        super().__init__(host)
        self.data.device_id = 0

    @property
    def device(self):
        return SimpleNamespace(id=0)

    def view(self, dtype):
        return GpuArray(self.host.view(dtype))

    def copy(self):
        return GpuArray(self.host.copy())

    def fill(self, value):
        self.host.fill(value)

    def __getitem__(self, index):
        if isinstance(index, tuple):
            index = tuple(getattr(x, "host", x) for x in index)
        return GpuArray(self.host[index])

    def __setitem__(self, index, value):
        self.host[index] = getattr(value, "host", value)

    def __array_function__(self, function, types, arguments, keywords):
        """Implements np.empty_like, which the library calls to pack lists of sequences."""
        plain = [getattr(x, "host", x) for x in arguments]
        return GpuArray(function(*plain, **keywords))


class GpuLike(FarDevice):
    """A device that runs out of memory after ``left`` allocations, or never if ``left`` is None."""

    failures = (ZeroDivisionError,)
    form = staticmethod(attrgetter("shape", "strides", "dtype", "data.device_id"))
    address = staticmethod(attrgetter("data.ptr"))
    stream = None  # an attribute, which replaces the property of other backends

    def __init__(self):
        super().__init__()
        self.models = ("like a GPU",)
        self.stream, self.left = 7, None

    def owns(self, array):
        return isinstance(array, GpuArray)

    def empty(self, shape, dtype):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise ZeroDivisionError("out of memory")
        return GpuArray(np.asarray(super().empty(shape, dtype)))

    def upload(self, array):
        made = self.empty(array.shape, array.dtype)
        made[...] = array
        return made

    def download(self, array):
        return np.array(array.host)

    def view(self, memory, shape, dtype, offset, strides):
        return GpuArray(np.ndarray(shape, dtype, memory.host, offset, strides))

    def starter(self, kernel, launch, sizes, regions):
        start = super().starter(kernel, launch, sizes, regions)
        return lambda stream, pointers, extra: start(None, pointers, extra)

    @contextmanager
    def working_on(self, array):
        yield
