"""Simulated devices with separate memory, whose streams are threads."""

import ctypes
import queue
import threading
import time
from contextlib import contextmanager

import numpy as np

from cupyfa import Simulator


class Far(np.ndarray):
    """An array in the simulated device's memory."""


class Mark:
    def __init__(self):
        self.event = threading.Event()

    @property
    def done(self):
        return self.event.is_set()

    def wait(self):
        self.event.wait()


class Gate:
    """Blocks the work of a device until ``opened`` is set."""

    def __init__(self):
        self.arrived, self.opened = threading.Semaphore(0), threading.Event()

    def wait(self):
        self.arrived.release()
        assert self.opened.wait(60)


class Lane:
    def __init__(self, device, way):
        self.device, self.work, self.error = device, queue.SimpleQueue(), None
        self.gate = device.gates.get((device.device, way))
        self.context = self
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            function, *arguments = self.work.get()
            try:
                function(*arguments)
            except Exception as error:
                self.error = error

    def add(self, function, *arguments):
        self.work.put((function, *arguments))

    def enter(self):
        pass

    def copy(self, to, source, size):
        self.device.copied.append((to, source, size))
        if self.device.failing:
            raise RuntimeError("the bus failed")
        self.add(time.sleep, 0.0005)
        if self.gate:
            self.add(self.gate.wait)
        self.add(ctypes.memmove, to, source, size)

    def record(self):
        mark = Mark()
        self.add(mark.event.set)
        return mark

    def mark(self, again):
        assert again is None or again.done  # otherwise a thread could wait for the wrong copy
        return self.record()

    def wait(self, mark):
        self.add(mark.wait)

    def synchronize(self):
        self.record().wait()
        if self.error:
            raise self.error

    def __enter__(self):
        self.device.thread.lane = self

    def __exit__(self, *error):
        self.device.thread.lane = None


class FarDevice(Simulator):
    """Three simulated devices that delay each launch as long as a stream may.

    ``gates`` maps (device, way) to a Gate. The way is "to" or "back" for copies, or "launch".
    """

    def __init__(self, free=1 << 40):
        super().__init__(workers=1)
        self.models = ("far",) * 3
        self.free, self.copied, self.failing = free, [], False
        self.kept, self.gates = [], {}
        self.thread, self.memory = threading.local(), []

    @property
    def device(self):
        return getattr(self.thread, "device", 0)

    def use(self, device):
        self.thread.device = device

    def owns(self, array):
        return isinstance(array, Far)

    def upload(self, array):
        return array.copy().view(Far)

    def download(self, array):
        return np.array(array)

    def empty(self, shape, dtype):
        made = np.empty(shape, dtype)
        made.reshape(-1).view(np.uint8)[...] = 0xFF
        self.kept.append(made)  # never freed, like memory in a stream's pool
        return made.view(Far)

    def view(self, memory, shape, dtype, offset, strides):
        return super().view(memory, shape, dtype, offset, strides).view(Far)

    def starter(self, kernel, launch, sizes, regions):
        start = super().starter(kernel, launch, sizes, regions)

        def late(stream, pointers, extra):
            lane = getattr(self.thread, "lane", None)
            if lane is None:
                return start(stream, pointers, extra)
            table = (ctypes.c_uint64 * len(sizes)).from_address(pointers)
            values = [np.empty(-(-size // 8) + 8, np.uint64) for size in sizes]
            aligned = [x.ctypes.data + -x.ctypes.data % 64 for x in values]
            for to, source, size in zip(aligned, table, sizes):
                ctypes.memmove(to, source, size)
            there = (ctypes.c_uint64 * len(sizes))(*aligned)
            if (gate := self.gates.get((self.device, "launch"))) is not None:
                gate.wait()
            lane.add(lambda _: start(stream, ctypes.addressof(there), extra), values)

        return late

    def matmul(self, *arrays, **options):
        lane = getattr(self.thread, "lane", None)
        multiply = super().matmul
        if lane is None:
            multiply(*arrays, **options)
        else:
            lane.add(lambda: multiply(*arrays, **options))

    @contextmanager
    def lanes(self):
        yield tuple(Lane(self, way) for way in ("to", "on", "back"))

    def pinned(self, size):
        self.memory.append(np.full(size, 0xFF, np.uint8))
        return self.memory[-1]

    def is_pinned(self, array):
        return any(np.may_share_memory(array, memory) for memory in self.memory)

    def free_bytes(self):
        return self.free
