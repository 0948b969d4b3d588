"""Copies NumPy arrays to and from the device at bus speed, and cuts problems that do not fit.

A problem is cut into pieces along batch and key heads, with its bias, mask, slopes and sinks. While
one piece is computed, the next pieces are copied to the device and earlier results are copied back.
A part of an array that consecutive pieces share is copied once.

Asynchronous copies need page-locked memory: several threads copy chunks of the caller's arrays,
with any strides, into a few page-locked buffers, and chunks of results out of other buffers. One
thread would be slower than the bus, especially in memory that is touched for the first time. Arrays
that are already page-locked are copied directly.

The device holds a few pieces at a time, so a problem may be larger than device memory. A single
head that does not fit is cut along its rows and keys; partial results are merged by their lse.

Several devices get shares of equal work. A share consists of consecutive pieces; a piece on the
boundary between two shares is cut. One thread starts the pieces of all devices in turn.
"""

from cupyfa.runtime.transfer.devices import spread
from cupyfa.runtime.transfer.host import Transfer, configure, held, new_result, release
from cupyfa.runtime.transfer.pieces import Pieces
from cupyfa.runtime.transfer.streamed_call import Call

__all__ = ["Call", "Pieces", "Transfer", "configure", "held", "new_result", "release", "spread"]
