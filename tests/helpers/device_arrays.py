"""A simulated device whose arrays, like CuPy's, are not NumPy arrays."""

import weakref
from types import SimpleNamespace

import numpy as np

from cupyfa import Simulator


class DeviceArray:
    """An array in the device's memory, with the attributes of CuPy arrays that calls use."""

    __slots__ = ("__weakref__", "data", "host")

    def __init__(self, host):
        self.host = host
        self.data = SimpleNamespace(ptr=host.ctypes.data)

    def __getattr__(self, name):
        if name in ("shape", "strides", "dtype", "itemsize", "size", "ndim", "nbytes", "flags"):
            return getattr(self.host, name)
        raise AttributeError(name)

    def swapaxes(self, *axes):
        return type(self)(self.host.swapaxes(*axes))

    def reshape(self, *shape):
        return type(self)(self.host.reshape(*shape))

    def __getitem__(self, index):
        return DeviceArray(self.host[index])

    def get(self):
        return self.host

    def __len__(self):
        return len(self.host)

    def __array_function__(self, *call):
        return NotImplemented


class ArrayDevice(Simulator):
    """A device that counts launches. Tests set ``stream`` and ``is_capturing``."""

    failures = (ZeroDivisionError,)
    stream = is_capturing = None  # attributes, which replace the properties of other backends

    def __init__(self):
        super().__init__(workers=1)
        self.stream, self.is_capturing, self.launched = 7, False, 0
        self.made = weakref.WeakSet()

    def owns(self, array):
        return isinstance(array, DeviceArray)

    def form(self, array):
        return array.shape, array.strides, array.dtype, 0

    def address(self, array):
        return array.data.ptr

    def empty(self, shape, dtype):
        made = DeviceArray(np.empty(shape, dtype))
        self.made.add(made)
        return made

    def upload(self, array):
        return DeviceArray(np.array(array))

    def download(self, array):
        return np.array(array.host)

    def starter(self, *what):
        start = super().starter(*what)

        def counted(stream, pointers, extra):
            self.launched += 1
            return start(None, pointers, extra)

        return counted
