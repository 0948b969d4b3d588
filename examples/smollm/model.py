"""The model as a function of tokens, and the paged cache of its keys and values."""

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
from numpy_layers import NumpyLayers
from weights import Arrays

import cupyfa
from cupyfa.numerics import reference

Attend = Callable[[int, Any], Any]  # (block, qkv [rows, all heads, d]) -> out [rows, heads, d]
BACKENDS = ("cuda", "simulator", "numpy")


class Model:
    """A Llama model: sizes, layers, and how attention is computed.

    backend: "cuda"; "simulator", which runs the same kernels of attention on the CPU; or "numpy",
    with cupyfa's reference. kernel: a rung or `script.py:name`; decoding needs one that has pages.
    """

    def __init__(self, sizes: Any, weights: Arrays, dtype: str, backend: str, kernel: str = "auto"):
        self.sizes, self.backend = sizes, backend
        layers = import_module("cupy_layers").CupyLayers if backend == "cuda" else NumpyLayers
        self.layers = layers(sizes, weights, dtype)
        record: Any = "auto" if kernel == "auto" else cupyfa.kernel(kernel)
        features = getattr(record, "features", ("ragged", "paged"))
        self.is_ragged = "ragged" in features
        self.prefilling = {"kernel": record, "backend": backend}
        self.decoding = {"kernel": record if "paged" in features else "auto", "backend": backend}

    def forward(self, tokens: Any, attend: Attend) -> Any:
        """Computes the last residual stream [rows, width] of tokens [rows]."""
        x, layers = self.layers.embed(tokens), self.layers
        for i in range(self.sizes.blocks):
            qkv = layers.product(x, f"{i}.qkv", norm=f"{i}.attention_norm")
            out = attend(i, qkv.reshape(len(x), -1, self.sizes.d))
            layers.product(out.reshape(len(x), -1), f"{i}.out", into=x)
            y = layers.product(x, f"{i}.gate_up", norm=f"{i}.mlp_norm", gated=True)
            layers.product(y, f"{i}.down", into=x)
        return x

    def logits(self, x: Any) -> Any:
        """Computes logits [rows, vocabulary]; the embeddings are the weights, too."""
        return self.layers.product(x, "embedding", norm="norm")

    def split(self, qkv: Any) -> tuple[Any, Any, Any]:
        """Returns views of q, k and v, each [rows, heads, d]."""
        ends = self.sizes.heads, self.sizes.heads + self.sizes.kv_heads
        return qkv[:, : ends[0]], qkv[:, ends[0] : ends[1]], qkv[:, ends[1] :]


class Pages:
    """Keys and values of all blocks in pages, and the page table that all blocks share.

    A sequence in a slot has pages for all tokens that it may grow to, at most `capacity`. A slot
    without one writes into a page of its own, so that arrays have the same shapes in every step.
    """

    def __init__(self, model: Model, slots: int, capacity: int, size: int = 64) -> None:
        layers, sizes, most = model.layers, model.sizes, cupyfa.cdiv(capacity, size)
        self.model, self.size, self.xp = model, size, layers.xp
        shape, blocks = (slots * (1 + most), size, sizes.kv_heads, sizes.d), range(sizes.blocks)
        self.k, self.v = ([self.xp.zeros(shape, layers.dtype) for _ in blocks] for _ in "kv")
        self.free, self.taken = list(range(slots, shape[0])), {}  # taken: pages by slot
        own = np.arange(slots, dtype=np.int32)[:, None]
        self.table, self.lengths = self.xp.asarray(own.repeat(most, 1)), self.xp.zeros(slots, "i4")
        rotary = cupyfa.Rotary(layers.cos, layers.sin, interleaved=True)
        how = {"lengths": self.lengths, "pages": self.table, "layout": "bshd", "rotary": rotary}
        self.caches = [cupyfa.KVCache(k, v, **how) for k, v in zip(self.k, self.v)]

    def take(self, slot: int, tokens: int) -> None:
        """Gives a slot pages for so many tokens."""
        pages = [self.free.pop() for _ in range(cupyfa.cdiv(tokens, self.size))]
        self.taken[slot], self.table[slot, : len(pages)] = pages, self.xp.asarray(pages)

    def release(self, slot: int) -> None:
        self.free += self.taken.pop(slot)
        self.table[slot], self.lengths[slot] = slot, 0

    def prefill(self, slots: Sequence[int], counts: Sequence[int]) -> Attend:
        """Returns causal attention of prompts of `counts` tokens, which also caches their keys."""
        ends, places = np.cumsum([0, *counts]), np.concatenate([np.arange(n) for n in counts])
        pages = [np.array(self.taken[x])[np.arange(n) // self.size] for x, n in zip(slots, counts)]
        found = np.concatenate(pages), places % self.size, places, ends
        *rows, offsets = (self.xp.asarray(x, np.int32) for x in found)
        how = {"causal": True, **self.model.prefilling}

        def attend(block: int, qkv: Any) -> Any:
            qkv = self.model.layers.rotate_into(qkv, self.k[block], self.v[block], rows)
            q, k, v = self.model.split(qkv)
            if self.model.backend == "numpy":
                return self._by_reference(block, q, slots, counts, counts)
            if self.model.is_ragged:
                return cupyfa.attention(*(cupyfa.Packed(x, offsets) for x in (q, k, v)), **how)
            prompts = ([x[None, a:b] for x in (q, k, v)] for a, b in pairwise(ends.tolist()))
            outs = [cupyfa.attention(*x, layout="bshd", **how)[0] for x in prompts]
            return self.xp.concatenate(outs)

        return attend

    def decode(self, block: int, qkv: Any) -> Any:
        """Computes attention of one new token per slot, whose key it rotates and caches first."""
        if self.model.backend != "numpy":
            q, k, v = (x[:, :, None] for x in self.model.split(qkv))  # [slots, heads, 1, d]
            return cupyfa.attention(q, self.caches[block], append=(k, v), **self.model.decoding)
        n, slots = self.lengths, np.arange(len(qkv))
        rows = self.table[slots, n // self.size], n % self.size, n
        qkv = self.model.layers.rotate_into(qkv, self.k[block], self.v[block], rows)
        return self._by_reference(block, self.model.split(qkv)[0], slots, np.ones_like(n), n + 1)

    def _by_reference(self, block: int, q: Any, slots: Any, counts: Any, lengths: Any) -> Any:
        """Computes causal attention of the last `counts` tokens of each slot's `lengths` keys."""
        outs = []
        for slot, count, end, n in zip(slots, counts, np.cumsum(counts), lengths):
            pages = self.table[slot, : cupyfa.cdiv(int(n), self.size)]
            k, v = (x[block][pages].reshape(-1, *x[block].shape[2:])[:n] for x in (self.k, self.v))
            q_k_v = (x.swapaxes(0, 1)[None] for x in (q[end - count : end], k, v))
            how = {"scale": q.shape[-1] ** -0.5, "causal_offset": n - count}
            outs.append(reference.attention(*q_k_v, **how)[0][0].swapaxes(0, 1))
        return np.concatenate(outs).astype(q.dtype)
