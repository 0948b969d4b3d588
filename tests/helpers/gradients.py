"""Backward kernels with tile sizes for tests, and reference gradients."""

import cupyfa
from cupyfa.ladder import LADDER
from cupyfa.numerics import reference, tolerance

BACKWARD = LADDER["backward"]
MMA = [kernel for kernel in BACKWARD.values() if kernel.name.startswith("mma_")]
# Tile sizes of kernels with mma.sync: multiples of an mma, small to save compile and run time.
_COLUMNS = {"Br": 16, "Bc": 32, "warps": 2, "stages": 1}
MMA_TILE = {
    "mma_columns": _COLUMNS,
    "mma_f64_columns": _COLUMNS,
    "mma_two_pass": {**_COLUMNS, "Qr": 32, "Qc": 16, "Qw": 16, "Qs": 2, "room": 2},
    "mma_fp16x2_two_pass": {**_COLUMNS, "Qr": 32, "Qc": 16, "Qw": 16, "Qs": 2},
    "mma_slices_backward": {
        **{"Br": 32, "Bc": 64, "Wr": 16, "Wc": 32, "Bd": 16},
        **{"stages": 2, "room": 3},
    },
}


def tiles_of(kernel, *sizes):
    """Returns tile sizes by name; ``sizes`` of tensor-core rungs default to small tiles."""
    if kernel in MMA:
        tile = MMA_TILE[kernel.name]
        return dict(zip(tile, sizes or tile.values()))
    return dict(zip(("Br", "Bc"), sizes))


def gradients_of(wrt, kernel, arrays, backend="simulator", more=None, **how):
    """Computes the gradients of the arrays ``wrt``, with O and lse from fa2.

    arrays: dO, Q, K and V. more: further arguments of ``cupyfa.backward``.
    """
    dout, q, k, v = arrays
    forward = {"kernel": "fa2", "return_lse": True, "backend": backend, **how}
    out, lse = cupyfa.attention(q, k, v, **forward)
    backward = {"wrt": wrt, "kernel": kernel, "backend": backend, **how, **(more or {})}
    return cupyfa.backward(dout, q, k, v, out, lse, **backward)


def reference_gradients(dout, q, k, v, *, out=None, lse=None, **score):
    """Computes reference gradients of q, k and v, by default from the reference's forward pass."""
    if out is None:
        out, lse = reference.attention(q, k, v, **score)
    expected = tolerance.expected_gradients(q, k, v, out, lse, dout, dtype="float64", **score)[None]
    return [x.value for x in expected.values()]
