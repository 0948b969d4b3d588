"""Gradients to compare with."""

from cupyfa.numerics import reference, tolerance


def reference_gradients(dout, q, k, v, *, out=None, lse=None, **score):
    """The reference's gradients of q, k and v, for the results of a forward pass or its own."""
    if out is None:
        out, lse = reference.attention(q, k, v, **score)
    expected = tolerance.expected_gradients(q, k, v, out, lse, dout, dtype="float64", **score)[None]
    return [x.value for x in expected.values()]
