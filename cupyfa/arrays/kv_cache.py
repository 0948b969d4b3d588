"""KV caches, and the kernel launch that appends the keys and values of new tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from cupyfa.errors import Unsupported, described
from cupyfa.ladder.kernel import Kernel, Launch, cdiv
from cupyfa.numerics import tolerance
from cupyfa.numerics.tolerance import Expected
from cupyfa.planner.plan import FIRST_AXES, TENSOR, Argument, Limits, Plan, PlannedLaunch
from cupyfa.problem import optional_inputs
from cupyfa.problem.dtypes import DTYPES, E4M3
from cupyfa.problem.options import read_flag
from cupyfa.problem.problem import Problem, check_page_size
from cupyfa.problem.structured_arrays import KINDS, Scaled, Structured
from cupyfa.runtime.arrays import (
    columns_contiguous,
    is_masked,
    overlap,
    require_one_device,
    share_memory,
)
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import adopt
from cupyfa.runtime.launcher import find_launcher
from cupyfa.runtime.workspace import PER_THREAD, of_graphs

LAYOUTS = ("bshd", "bhsd")
SCALES = optional_inputs.SCALES
E4M3_SINCE = 89
_IDENTIFIED = ("q", "lengths", "pages", "k", "v", "cos", "sin")  # arrays compared by identity
THREADS = 128  # threads per block; each warp writes one row
_MOST_KEPT = 1 << 20  # maximum bytes of q, k and v that a cache keeps to repeat a call
APPEND = Launch(
    "append_keys",
    args="Q turned_Q new_K new_V K V cosines sines positions lengths.data used.data pages.data "
    "number_stride most page_count capacity shift tokens heads kv_heads batches "
    "prefix_keys.data k_scale v_scale",
    grid=lambda p, c: c.count,
    threads=lambda p, c: THREADS,
    file="forward/steps/append_keys.cu",
    begins_early=True,
    awaits_all=True,
)
_KERNEL = Kernel("append_keys", "writes new keys and values into a cache", (APPEND,))


class Rotary(NamedTuple):
    """A rotary position embedding (RoPE): rotates pairs of columns of q and k by position.

    cos, sin: each [positions, angles], of the dtype of q or of lse. Columns from 2 · angles on are
        not rotated.
    interleaved: whether columns (2 x, 2 x + 1) form a pair, instead of (x, x + angles).

    Su et al., 2021, arXiv:2104.09864.
    """

    cos: Any
    sin: Any
    interleaved: bool = False


class KVCache(Structured):
    """Keys and values of several sequences, stored in the caller's arrays.

    ``attention(q, cache)`` computes the attention of new tokens to the cache, and
    ``cache.append(k, v)`` writes the keys and values of new tokens into it.

    k, v: [batch, kv_heads, capacity, d] and [batch, kv_heads, capacity, dv]; with ``layout="bshd"``
        [batch, capacity, kv_heads, d | dv]. With ``pages`` they hold pages: [pages, kv_heads,
        page_size, d | dv], or [pages, page_size, kv_heads, d | dv]; page_size is 16, 32, 64, 128 or
        256. float8_e4m3 arrays need an even d and dv, and may be ``Scaled``. New keys and values
        are divided by the scales, rounded to nearest and clamped to [-448, 448].
    lengths: [batch] of int32, the number of keys of each sequence.
    pages: [batch, most] of int32, the page table: key j of sequence b is row j % page_size of page
        pages[b, j // page_size]. Sequences may share pages. Entries after the last page that a
        sequence needs are ignored.
    rotary: a ``Rotary``, or its (cos, sin). New keys are rotated before they are written, and the
        queries of new tokens before attention is computed.
    prefix: keys and values that all sequences share, and that precede the keys in the cache: a
        tuple (k, v) of arrays [1, kv_heads, keys, d | dv], or a KVCache of one sequence. A prefix
        is read once for all sequences, by an automatically chosen kernel; kernel and tiles of a
        call apply to the keys in the cache. If the prefix has g sequences, each of them is shared
        by batch / g consecutive sequences. A list nests several prefixes, the outermost first.
        Positions, windows and expressions are the same as if one cache held all keys.

    All arrays are NumPy arrays, or all are in the memory of one GPU. No array is copied: a call
    reads the current contents of k, v, lengths and pages. Lists of lengths, pages or scales are
    converted to new arrays in the memory of k. If new tokens are appended, k and v must not share
    memory. Calls never change lengths.

    Raises ValueError or TypeError for arrays whose shapes or dtypes do not match, and
    Unsupported for other page sizes.

    Pages: Kwon et al., 2023, arXiv:2309.06180.
    """

    def __init__(
        self,
        k: Any,
        v: Any,
        lengths: Any,
        pages: Any = None,
        *,
        layout: str = "bhsd",
        rotary: tuple[Any, ...] | None = None,
        prefix: Any = None,
    ) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {described(layout)}; use one of {', '.join(LAYOUTS)}")
        self.layout, self.prefix = layout, prefix
        self.rotary = None if rotary is None else _read_rotary(rotary)
        self.last_call: Any = None  # a LastStep of ``call/decode.py``
        scales = [x.scale if isinstance(x, Scaled) else None for x in (k, v)]
        k, v = (x.array if isinstance(x, Scaled) else x for x in (k, v))
        self.k, self.v = seen("k", k), seen("v", v)
        check_keys(self.k, self.v, layout)
        self.lengths = _read_whole("lengths", lengths, self.k, axes=1)
        self.pages = None if pages is None else _read_whole("pages", pages, self.k, axes=2)
        if self.pages is not None:
            self._check_pages()
        wanted = len(self.k) if self.pages is None else len(self.pages)
        if len(self.lengths) != wanted:
            whose = "k" if self.pages is None else "pages"
            raise ValueError(
                f"lengths has shape {tuple(self.lengths.shape)}, but {whose} has {wanted} "
                "sequences; pass one length per sequence"
            )
        self.k_scale, self.v_scale = (
            None if x is None else _there(name, x, self.k) for name, x in zip(SCALES, scales)
        )
        self._scales = tuple(map(self._seen_scale, SCALES, (self.k_scale, self.v_scale)))

    def __getstate__(self) -> dict[str, Any]:
        """Drops the last call, whose launches are bound to this process."""
        return {**self.__dict__, "last_call": None}

    @classmethod
    def from_csr(
        cls,
        k: Any,
        v: Any,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        *,
        layout: str = "bhsd",
        rotary: tuple[Any, ...] | None = None,
        prefix: Any = None,
    ) -> KVCache:
        """Makes a paged cache from a page table in FlashInfer's CSR format.

        Sequence b has the pages indices[indptr[b]] to indices[indptr[b + 1] - 1]. All of them are
        full, except the last one, which holds last_page_len[b] keys. indptr is [batch + 1], indices
        [all pages of all sequences], last_page_len [batch], all of int32.

        The page table and the lengths are new arrays, computed from the current contents. New keys
        can be appended only up to the end of each sequence's last page. For arrays in GPU memory
        the host does not synchronize, and the page table has as many columns as ``indices`` has
        elements.
        """
        keys = seen("k", k.array if isinstance(k, Scaled) else k)
        starts = _read_whole("indptr", indptr, keys, axes=1)
        listed = _read_whole("indices", indices, keys, axes=1)
        last = _read_whole("last_page_len", last_page_len, keys, axes=1)
        if len(starts) != len(last) + 1:
            raise ValueError(
                f"indptr has {len(starts)} elements and last_page_len has {len(last)}; indptr must "
                "have one element more than last_page_len: the start of each sequence's pages, "
                "followed by the end of the last sequence"
            )
        counts = starts[1:] - starts[:-1]
        most = len(listed)
        if isinstance(counts, np.ndarray):
            _check_csr(starts, listed)
            most = int(counts.max(initial=0))
        steps = np.ones_like(listed, shape=(max(most, 1),)).cumsum() - 1
        places = np.clip(starts[:-1, None] + steps[None], 0, max(len(listed) - 1, 0))
        table = listed[places] if len(listed) else 0 * places
        size = keys.shape[LAYOUTS.index(layout) + 1 if layout in LAYOUTS else 1]
        lengths = (counts - 1) * size + last
        lengths *= counts > 0
        how: Any = {"layout": layout, "rotary": rotary, "prefix": prefix}
        return cls(k, v, lengths.astype("i4"), table.astype("i4"), **how)

    def append(
        self,
        k: Any,
        v: Any,
        *,
        backend: str | Backend = "auto",
        check: bool = False,
    ) -> None:
        """Writes the keys and values of new tokens into the cache, from row ``lengths`` on.

        k [batch, kv_heads, new tokens, d], v [batch, kv_heads, new tokens, dv]. Keys are rotated if
        the cache has a rotary embedding. ``lengths`` is not changed: add the number of new tokens
        before the next call. ``attention(q, cache, append=(k, v))`` appends the tokens and computes
        attention in one call. check: also compare the written rows with a reference.

        Raises the errors of ``attention``.
        """
        functions: Any = import_module("cupyfa.call.decode")
        functions.append_tokens(self, k, v, backend=backend, check=check)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.lengths)

    @property
    def page_size(self) -> int | None:
        """The number of keys per page; None without pages."""
        return None if self.pages is None else self.rows_of(self.k).shape[2]

    @property
    def capacity(self) -> int:
        """The largest number of keys that the cache can hold per sequence."""
        rows = self.rows_of(self.k).shape[2]
        return rows if self.pages is None else rows * self.pages.shape[1]

    @property
    def is_e4m3(self) -> bool:
        """Whether keys and values are float8_e4m3."""
        return bool(self.k.dtype == E4M3)

    @property
    def is_interleaved(self) -> bool:
        """Whether the cache's rotary embedding pairs adjacent columns."""
        return self.rotary is not None and self.rotary.interleaved

    def __repr__(self) -> str:
        pages = "" if self.pages is None else f" in pages of {self.page_size}"
        return (
            f"<KVCache: {self.batch} sequences of up to {self.capacity} keys{pages}, "
            f"{self.k.dtype} {self.layout} {tuple(self.k.shape)}>"
        )

    def rows_of(self, array: Any) -> Any:
        """Views keys or values as [batch or pages, kv_heads, rows, columns]."""
        return array.swapaxes(1, 2) if self.layout == "bshd" else array

    def _seen_scale(self, name: str, scale: Any) -> Any:
        """Checks a scale; returns it as [batch or 1, kv_heads], or [pages, 1, kv_heads]."""
        if scale is None:
            return None
        heads, shape = self.rows_of(self.k).shape[1], tuple(scale.shape)
        count = 0 if self.pages is None else len(self.k)
        wanted = f"[kv_heads], here ({heads},), or [batch, kv_heads], {(self.batch, heads)}"
        if count:
            wanted += f", or [pages, kv_heads], {(count, heads)}"
        if not self.is_e4m3:
            raise ValueError(
                f"{name[0]} is Scaled, but only {E4M3} caches support scales and k is "
                f"{self.k.dtype}; pass the array itself"
            )
        if shape not in ((heads,), (self.batch, heads)) and (not count or shape != (count, heads)):
            raise ValueError(f"{name} has shape {shape}; it must be {wanted}")
        if str(scale.dtype) != "float32":
            raise TypeError(f"{name} is {scale.dtype}; it must be float32: convert it")
        if not columns_contiguous(scale):
            raise ValueError(
                f"{name} has strides {scale.strides}; its last axis must be contiguous"
            )
        if len(shape) == 1:
            return scale[None]
        if count and count == self.batch:
            raise ValueError(
                f"{name} has shape {shape}, which is ambiguous because there are as many pages as "
                "sequences; add an unused page to k and v"
            )
        return scale[:, None] if count and count == shape[0] else scale

    def _check_pages(self) -> None:
        count, columns = len(self.k), self.pages.shape[1]  # type: ignore[union-attr]
        check_page_size("page_size", self.page_size, Unsupported)
        if not (count and columns):
            raise ValueError(
                f"k has {count} pages and the page table has {columns} columns; both must have at "
                "least one"
            )

    @property
    def _room(self) -> str:
        """The capacity per sequence and the axes of k, for error messages."""
        rows = "page_size" if self.pages is not None else "capacity"
        first = "pages" if self.pages is not None else "batch"
        axes = f"{rows}, kv_heads" if self.layout == "bshd" else f"kv_heads, {rows}"
        return (
            f"the cache has room for {self.capacity} keys per sequence (its k has shape "
            f"{tuple(self.k.shape)}, with layout={self.layout!r} [{first}, {axes}, d])"
        )

    def check_numbers(self, lengths: np.ndarray, pages: np.ndarray | None, new: int) -> None:
        """Raises ValueError if lengths + new or pages are out of range."""
        wrong = np.flatnonzero((lengths < 0) | (lengths > self.capacity - new))
        if wrong.size:
            i = int(wrong[0])
            more = f" and the call appends {new}" if new else ""
            raise ValueError(
                f"lengths[{i}] is {lengths[i]}, but {self._room}{more}; lengths must be from 0 to "
                f"{self.capacity - new}"
            )
        if pages is None:
            return
        size, count = int(self.page_size or 1), len(self.k)
        needed = np.arange(pages.shape[1]) < -(-(lengths[:, None] + new) // size)
        missing = np.argwhere(needed & ((pages < 0) | (pages >= count)))
        if len(missing):
            b, i = map(int, missing[0])
            raise ValueError(
                f"pages[{b}, {i}] is {pages[b, i]}, but k has {count} pages; the page numbers for "
                f"the {lengths[b] + new} keys of sequence {b} must be from 0 to {count - 1}"
            )


KINDS[KVCache] = "cupyfa.call.decode"


@dataclass(frozen=True)
class Step:
    """One decoding step: queries, cache and new tokens in a backend's memory.

    q: the queries, rotated by ``write`` if the cache has a rotary embedding. k, v: [batch or pages,
    kv_heads, rows, columns]. lengths: include the new keys. scales: the scales of e4m3 k and v,
    else None. is_moved: whether the arrays are copies of the caller's NumPy arrays. may_repeat:
    whether the cache may keep the step and reuse it if the next call has identical arguments.
    """

    backend: Backend
    q: Any
    k: Any
    v: Any
    lengths: Any
    pages: Any
    scales: tuple[Any, Any]
    is_moved: bool
    may_repeat: bool
    _new: _New | None = None

    @property
    def writes(self) -> bool:
        return self._new is not None

    def read_lengths(self, cache: KVCache) -> None:
        """Reads lengths and pages in host memory again, because the caller may change them."""
        count = 0 if self.lengths is cache.lengths else self.q.shape[2]
        cache.check_numbers(cache.lengths, cache.pages, count)
        if cache.rotary is not None:
            _check_positions(cache.rotary.cos, cache.lengths, count)
        if count:
            np.add(cache.lengths, count, out=self.lengths)

    def write(self) -> None:
        """Launches the kernel that rotates q and k and appends new tokens, if there is one."""
        if self._new is not None:
            self._new.write()

    def write_and_check(self) -> None:
        """Like ``write``, then raises WrongResult if the written rows differ from a reference."""
        if self._new is not None:
            self._new.write()
            self._new.check()


def list_arrays(q: Any, cache: KVCache, new: tuple[Any, Any] | None) -> list[Any]:
    """Lists a call's arrays, with None for missing ones, and the flag ``interleaved``."""
    rotary = cache.rotary or _NO_ROTARY
    return [q, cache.lengths, cache.pages, *(new or (None, None)), *rotary, cache.k, cache.v]


_NO_ROTARY = Rotary(None, None)


def step(
    backend: str | Backend,
    q: Any,
    cache: KVCache,
    new: tuple[Any, Any] | None,
    *,
    look: bool,
    prefix_keys: Any = None,
) -> Step:
    """Checks a call's arrays and moves them to a backend's memory; launches nothing yet.

    new: keys and values of the new tokens. look: whether to check lengths and pages in GPU memory,
    too. prefix_keys: [batch], the number of keys that precede the cache in each sequence.
    """
    given, rotary = _named(q, cache, new), cache.rotary
    if prefix_keys is not None:
        given["prefix_keys"] = prefix_keys
    where, arrays = adopt(backend, **given)
    given = dict(zip(given, arrays))
    require_one_device(where, given)
    _check_shapes(given, cache)
    if new is not None and share_memory(given["cache.k"], given["cache.v"]):
        raise ValueError(
            "cache.k and cache.v share memory, but the call appends to both; pass arrays that do "
            "not overlap"
        )
    on_host = isinstance(given["lengths"], np.ndarray)
    if on_host or look:
        _check_contents(where, given, cache)
    lengths = given["lengths"]
    if cache.is_e4m3:
        _check_arch(where)
        given = scales_of(where, cache, cache.k, given["q"]) | given
    if is_moved := not where.owns(lengths):
        given = {name: where.upload(x) for name, x in given.items()}
    tokens = given["q"].shape[2]
    count = tokens if "k" in given else 0
    made = {}
    cache.last_call = None  # frees the last call's memory for this step
    with where.working_on(given["q"]):
        if count:
            made["used"] = (
                where.upload((lengths + count).astype("i4"))
                if on_host
                else where.empty((cache.batch,), np.dtype(np.int32))
            )
        if rotary is not None:
            made["turned"] = where.empty(tuple(given["q"].shape), given["q"].dtype)
        if made and where.is_capturing:  # every launch of the graph will write to these arrays
            of_graphs.append(made)
        for name in ("k", "v") if rotary is None else ("q", "k", "v", "cos", "sin"):
            if name in given and not columns_contiguous(given[name]):
                given[name] = given[name].copy()
        alike = copy(cache)  # avoids a reference cycle: the cache refers to the step
        new_tokens = _New(where, {**given, **made}, alike, is_moved) if made else None
    may_repeat = not is_moved if on_host else where.stream not in (None, PER_THREAD)
    return Step(
        backend=where,
        q=made.get("turned", given["q"]),
        k=given["cache.k"],
        v=given["cache.v"],
        lengths=made.get("used", given["lengths"]),
        pages=given.get("pages"),
        scales=(given.get("k_scale"), given.get("v_scale")),
        is_moved=is_moved,
        may_repeat=may_repeat
        and prefix_keys is None
        and not where.is_capturing
        and _may_keep(given, list_arrays(q, cache, new)),
        _new=new_tokens,
    )


def _may_keep(given: Mapping[str, Any], arrays: Iterable[Any]) -> bool:
    """Returns whether a cache may keep a step: q, k and v must be small, and no array may be a
    copy or a view.

    A copy would not reflect later changes to the caller's array. A view of another library's array
    would keep the old address if that library reallocates the array.
    """
    are_given = all(x is given.get(name) for name, x in zip(_IDENTIFIED, arrays))
    return are_given and sum(given[x].nbytes for x in "qkv" if x in given) <= _MOST_KEPT


def _read_rotary(given: Any) -> Rotary:
    if not isinstance(given, tuple | list) or len(given) not in (2, 3):
        raise TypeError(
            f"rotary is {described(given)}; pass cupyfa.Rotary(cos, sin), both [positions, angles]"
        )
    rotary = Rotary(*given)
    return rotary._replace(interleaved=read_flag("interleaved", rotary.interleaved))


def _named(q: Any, cache: KVCache, new: tuple[Any, Any] | None) -> dict[str, Any]:
    """Returns a call's arrays by name; cache.k and cache.v are in the layout of ``rows_of``."""
    named = {"q": q, "cache.k": cache.rows_of(cache.k), "cache.v": cache.rows_of(cache.v)}
    named["lengths"] = cache.lengths
    if cache.pages is not None:
        named["pages"] = cache.pages
    named |= {name: x for name, x in zip(SCALES, cache._scales) if x is not None}
    if new is not None:
        named |= zip("kv", new)
    if cache.rotary is not None:
        named |= zip(("cos", "sin"), cache.rotary)
    return named


def check_keys(k: Any, v: Any, layout: str) -> None:
    """Raises ValueError or TypeError if the shapes or dtypes of k and v are invalid or differ."""
    shapes = f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}"
    if len(k.shape) != 4 or len(v.shape) != 4 or k.shape[:3] != v.shape[:3]:
        axes = "rows, kv_heads" if layout == "bshd" else "kv_heads, rows"
        raise ValueError(
            f"{shapes}; both must be [batch or pages, {axes}, columns], and only columns may differ"
        )
    for name, x in (("k", k), ("v", v)):
        if (str(x.dtype) not in DTYPES and x.dtype != E4M3) or x.dtype != k.dtype:
            raise TypeError(
                f"k is {k.dtype} and v is {v.dtype}; both must have the same dtype, one of "
                f"{', '.join(DTYPES)}, {E4M3}"
            )
        if x.dtype == E4M3 and (x.shape[3] % 2 or any(n % 2 for n in x.strides[:3])):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and strides {x.strides}; {E4M3} requires an "
                "even number of columns and even strides: add a column of zeros"
            )
        if 0 not in x.shape and not columns_contiguous(x):
            raise ValueError(
                f"{name} has strides {x.strides}; its last axis must be contiguous: pass a "
                "contiguous copy"
            )


def _read_whole(name: str, given: Any, keys: Any, *, axes: int) -> Any:
    """Checks an int32 array; converts a list to an array on the device of ``keys``."""
    array = _there(name, given, keys)
    if len(array.shape) != axes:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {axes}-D")
    if str(array.dtype) != "int32":
        raise TypeError(
            f"{name} is {array.dtype}; it must be int32: pass {name}.astype(numpy.int32)"
        )
    if not columns_contiguous(array):
        raise ValueError(f"{name} has strides {array.strides}; its last axis must be contiguous")
    return array


def _check_csr(starts: np.ndarray, listed: np.ndarray) -> None:
    if (np.diff(starts) < 0).any() or (starts[0], starts[-1]) != (0, len(listed)):
        raise ValueError(
            f"indptr is {starts.tolist()}; it must start at 0, not decrease, and end at "
            f"{len(listed)}, the number of indices"
        )


def _check_shapes(given: Mapping[str, Any], cache: KVCache) -> None:
    q, keys, values = given["q"], given["cache.k"], given["cache.v"]
    shape = tuple(q.shape)
    if len(shape) != 4 or shape[0] != cache.batch or shape[3] != keys.shape[3]:
        raise ValueError(
            f"q has shape {shape}; it must be [batch, heads, new tokens, d] with "
            f"batch={cache.batch} and d={keys.shape[3]}, to match the cache"
        )
    if cache.is_e4m3:
        if str(q.dtype) not in ("float16", "bfloat16"):
            raise TypeError(
                f"q is {q.dtype}; with a {E4M3} cache, q must be float16 or bfloat16: convert q"
            )
    elif q.dtype != keys.dtype:
        raise TypeError(f"q is {q.dtype}, but the cache is {keys.dtype}; convert one of them")
    for name, like in (("k", keys), ("v", values)):
        wanted = cache.batch, keys.shape[1], shape[2], like.shape[3]
        if name in given and (tuple(given[name].shape), given[name].dtype) != (wanted, q.dtype):
            x = given[name]
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)}; it must be {q.dtype} {wanted}, [batch, "
                f"kv_heads, new tokens, columns], to match q and the cache ({cache._room})"
            )
    if "k" in given and shape[2] > cache.capacity:
        raise ValueError(
            f"k has {shape[2]} new tokens (its shape is [batch, kv_heads, new tokens, d]), but "
            f"{cache._room}; append fewer tokens"
        )
    if "cos" in given:
        _check_angles(given["cos"], given["sin"], q)


def _check_angles(cos: Any, sin: Any, q: Any) -> None:
    d, dtypes = q.shape[3], (q.dtype, DTYPES[str(q.dtype)].sums)
    shape = tuple(cos.shape)
    is_table = len(shape) == 2 and shape == tuple(sin.shape) and shape[0] > 0
    if not is_table or not 0 < 2 * shape[1] <= d:
        raise ValueError(
            f"rotary has shapes {shape} and {tuple(sin.shape)}; both must be [positions, angles], "
            f"with 1 to {d // 2} angles: at most one for each pair of q's {d} columns"
        )
    if cos.dtype not in dtypes or sin.dtype != cos.dtype:
        either = " or ".join(dict.fromkeys(map(str, dtypes)))
        raise TypeError(
            f"rotary has dtypes {cos.dtype} and {sin.dtype}; both must be {either}: convert them"
        )


def _check_contents(backend: Backend, given: Mapping[str, Any], cache: KVCache) -> None:
    """Raises ValueError if lengths or pages are out of range, or if inputs overlap the cache."""

    def downloaded(name: str) -> Any:
        array = given.get(name)
        is_there = array is not None and not isinstance(array, np.ndarray)
        return backend.download(array) if is_there else array

    lengths, new = downloaded("lengths"), given["q"].shape[2] if "k" in given else 0
    cache.check_numbers(lengths, downloaded("pages"), new)
    if "cos" in given and lengths.size:
        before = downloaded("prefix_keys") if "prefix_keys" in given else 0
        _check_positions(given["cos"], lengths + before, new)
    if not new:
        return
    for name in ("cache.k", "cache.v"):
        array = given[name]
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ValueError(
                f"{name} is read-only, but the call appends to it; make {name} writable"
            )
        for other in ("q", "k", "v"):
            if overlap(array, given[other]):
                raise ValueError(
                    f"{other} shares memory with {name}, which the call writes to; pass a copy of "
                    f"{other}"
                )


def _check_positions(cos: Any, lengths: np.ndarray, new: int) -> None:
    positions, needed = len(cos), int(lengths.max(initial=0)) + new
    if needed > positions:
        raise ValueError(
            f"rotary has {positions} positions, but a sequence has {needed} keys; cos and sin must "
            f"have at least {needed} rows"
        )


class _New:
    """A launch of append_keys, with the arrays that the kernel reads and writes."""

    def __init__(
        self, backend: Backend, arrays: Mapping[str, Any], cache: KVCache, is_moved: bool
    ) -> None:
        self._backend, self._cache, self._is_moved = backend, cache, is_moved
        self._arrays = arrays
        key = APPEND.entry, cache.is_interleaved
        limits = backend.limits
        self._launcher = find_launcher(backend, key, arrays, lambda: _plan(arrays, cache, limits))

    def write(self) -> None:
        backend = self._backend
        with backend.working_on(self._arrays["q"]):
            self._launcher(tuple(map(backend.address, self._arrays.values())), backend.stream)
            if self._is_moved and "k" in self._arrays:
                self._copy_back()

    def check(self) -> None:
        """Raises WrongResult if the written rows differ from a reference."""
        found, expected = {}, {}
        if "used" in self._arrays:
            for name, written in self._written().items():
                given = self._on_host(name.removeprefix("cache.")).swapaxes(1, 2)
                found[name] = written
                expected[name] = Expected(given.astype(np.float64), np.zeros(given.shape))
                if name == "cache.k" and "turned" in self._arrays:
                    expected[name] = self._turned(given.swapaxes(1, 2), swapped=True)
                if self._cache.is_e4m3:
                    scale = self._scales_of_rows(f"{name[-1]}_scale")
                    expected[name] = tolerance.expected_e4m3(expected[name], scale)
        if "turned" in self._arrays:
            found["turned"] = self._on_host("turned")
            expected["turned"] = self._turned(self._on_host("q"))
        verdicts = tolerance.compare(found, expected)
        tolerance.require(verdicts, f"append_keys on {self._cache!r}")

    def _turned(self, rows: np.ndarray, *, swapped: bool = False) -> Expected:
        """Returns the expected result of rotating rows [batch, heads, tokens, d].

        With ``swapped`` the result is [batch, tokens, heads, d].
        """
        cos, sin = self._on_host("cos"), self._on_host("sin")
        tokens = rows.shape[2]
        first = self._on_host("lengths") - (0 if "used" in self._arrays else tokens)
        if "prefix_keys" in self._arrays:
            first = first + self._on_host("prefix_keys")
        at = np.clip(first[:, None, None] + np.arange(tokens), 0, len(cos) - 1)
        made = tolerance.expected_rotation(
            rows, cos[at], sin[at], interleaved=self._cache.is_interleaved, dtype=str(rows.dtype)
        )
        return Expected(*(x.swapaxes(1, 2) for x in made)) if swapped else made

    def _scales_of_rows(self, name: str) -> np.ndarray:
        """Returns each new row's scale, [batch, tokens, kv_heads, 1]."""
        scale, (places, _) = self._on_host(name), self._places()
        batch, kv_heads = len(places), self._arrays["cache.k"].shape[1]
        if scale.ndim == 3:
            return scale[places, 0, :, None]
        return np.broadcast_to(scale, (batch, kv_heads))[:, None, :, None]

    def _on_host(self, name: str) -> np.ndarray:
        array = self._arrays[name]
        return array if isinstance(array, np.ndarray) else self._backend.download(array)

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns each new token's batch element or page, and the row within it."""
        size, tokens = self._cache.page_size, self._arrays["q"].shape[2]
        rows = self._on_host("lengths")[:, None] + np.arange(tokens)
        batch: np.ndarray = np.arange(len(rows))[:, None]
        if size is not None:
            batch, rows = self._on_host("pages")[batch, rows // size], rows % size
        return tuple(np.broadcast_arrays(batch, rows))  # type: ignore[return-value]

    def _written(self) -> dict[str, np.ndarray]:
        """Reads new tokens back from the cache: k and v [batch, tokens, kv_heads, columns]."""
        there = tuple(map(self._backend.upload, self._places()))
        found = {}
        for name in ("cache.k", "cache.v"):
            array = self._arrays[name].swapaxes(1, 2)
            bits = array.view(np.uint8) if array.dtype == E4M3 else array  # CuPy cannot index e4m3
            found[name] = self._backend.download(bits[there]).view(array.dtype)
        return found

    def _copy_back(self) -> None:
        """Copies the new rows from the device into the caller's NumPy arrays."""
        cache, places = self._cache, self._places()
        for array, written in zip((cache.k, cache.v), self._written().values()):
            cache.rows_of(array).swapaxes(1, 2)[places] = written


def _plan(arrays: Mapping[str, Any], cache: KVCache, limits: Limits) -> Plan:
    q, keys, values = (arrays[name] for name in ("q", "cache.k", "cache.v"))
    appends, rotates = "used" in arrays, "turned" in arrays
    (batch, heads, tokens, d), kv_heads = q.shape, keys.shape[1]
    p = Problem.of_sizes(M=1, d=d, dv=values.shape[3], dtype=str(q.dtype))
    rows = batch * tokens * (2 * kv_heads * appends + heads * rotates)
    angles = arrays["cos"].shape[1] if rotates else 0
    one = PlannedLaunch.of_helper(
        APPEND,
        p.dtype,
        cdiv(rows, THREADS // 32),
        {
            **{"d": p.d, "dv": p.dv, "appends": appends, "rotates": rotates, "angles": angles},
            **{"interleaved": cache.is_interleaved, "page_size": cache.page_size or 0},
            **{"has_e4m3": cache.is_e4m3},
            **{f"{x}_by_page": x in arrays and len(arrays[x].shape) == 3 for x in SCALES},
            **{"angles_of_sums": rotates and arrays["cos"].dtype != q.dtype},
            **{"has_prefix": "prefix_keys" in arrays},
            **{"ragged": False, "packed": False, "windowed": False, "threads": THREADS},
        },
        *_arguments(arrays, cache),
        begins_early=limits.may_begin_early(APPEND),
    )
    written = ("turned", "cache.k", "cache.v", "used") if appends else ("turned",)
    outputs = {x: (arrays[x].shape, arrays[x].dtype) for x in written if x in arrays}
    return Plan(_KERNEL, p, {}, (one,), {}, outputs)


def _arguments(arrays: Mapping[str, Any], cache: KVCache) -> list[Argument]:
    q, table = arrays["q"], arrays.get("pages")
    tokens, appends, rotates = q.shape[2], "used" in arrays, "turned" in arrays
    numbers = {
        "most": 0 if table is None else table.shape[1],
        "page_count": 0 if table is None else len(arrays["cache.k"]),
        "capacity": cache.capacity,
        "shift": 0 if appends else -tokens,
        "tokens": tokens,
        "heads": q.shape[1],
        "kv_heads": arrays["cache.k"].shape[1],
        "batches": q.shape[0],
    }
    return [
        *(_tensor(name, rotates) for name in ("q", "turned")),
        *(_tensor(name, appends) for name in ("k", "v", "cache.k", "cache.v")),
        *(_tensor(name, rotates, (None, None, 0)) for name in ("cos", "sin")),
        Argument("positions", value=np.int32(len(arrays["cos"]) if rotates else 0)),
        *(_pointer(name, name in arrays) for name in ("lengths", "used", "pages")),
        Argument("number_stride", value=np.int64(0 if table is None else table.strides[0] // 4)),
        *(Argument(name, value=np.int32(x)) for name, x in numbers.items()),
        _pointer("prefix_keys", "prefix_keys" in arrays),
        *(_scale_argument(name, arrays.get(name)) for name in SCALES),
    ]


def _tensor(name: str, is_given: bool, axes: tuple[int | None, ...] = FIRST_AXES) -> Argument:
    """Makes a Tensor argument, whose pointer is null if the array is missing."""
    value = None if is_given else np.zeros((), TENSOR)
    return Argument(name, value=value, strides=axes)


def _pointer(name: str, is_given: bool) -> Argument:
    return Argument(name, "data", None if is_given else np.uint64(0))


def _scale_argument(name: str, scale: Any) -> Argument:
    """Makes the Tensor argument of a scale; axes of size 1 get stride 0."""
    if scale is None:
        return _tensor(name, False)
    axes = (0, len(scale.shape) - 1)
    strides = (x if scale.shape[x] > 1 else None for x in axes)
    return _tensor(name, True, (*strides, None))


def scales_of(backend: Backend, cache: KVCache | None, k: Any, like: Any) -> dict[str, Any]:
    """Returns the scales of e4m3 keys and values (1 if missing), or {} for other dtypes.

    cache: the KVCache that holds k, or None. like: an array in the memory for the returned scales.
    """
    if k.dtype != E4M3:
        return {}
    one: Any = _ONE
    if not isinstance(like, np.ndarray):
        with backend.working_on(like):
            one = _make_unit_scale(backend, backend.device)
    given = (None, None) if cache is None else cache._scales
    return {name: one if x is None else x for name, x in zip(SCALES, given)}


_ONE = np.ones((1, 1), np.float32)  # a scale of 1 for all heads


@lru_cache
def _make_unit_scale(backend: Backend, device: int) -> Any:
    return backend.upload(_ONE)


def _check_arch(backend: Backend) -> None:
    limits = backend.limits
    if limits.arch is not None and int(limits.arch) < E4M3_SINCE:
        raise Unsupported(
            f"{limits.device} is sm_{limits.arch}, but a {E4M3} cache requires sm_{E4M3_SINCE} or "
            "later; use a float16 or bfloat16 cache"
        )


def seen(name: str, given: Any) -> Any:
    """Converts other libraries' arrays to NumPy or CuPy arrays without a copy."""
    if (isinstance(given, np.ndarray) and not is_masked(given)) or hasattr(given, "get"):
        return given
    if not hasattr(given, "shape"):
        raise TypeError(f"{name} is {described(given)}; pass a NumPy or CuPy array")
    _, (array,) = adopt("auto", **{name: given})
    return array


_INTEGERS = np.iinfo(np.int32)


def _there(name: str, given: Any, keys: Any) -> Any:
    """Like ``seen``; also converts lists of numbers to arrays in the memory of ``keys``."""
    if not isinstance(given, list | tuple):
        return seen(name, given)
    array = optional_inputs.of_list(name, given)
    if name in SCALES:
        made = array.astype(np.float32)
    elif array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} contains {array.dtype} values; pass integers")
    elif array.size and not _INTEGERS.min <= array.min() <= array.max() <= _INTEGERS.max:
        raise ValueError(
            f"{name} ranges from {array.min()} to {array.max()}; its values must fit in int32"
        )
    else:
        made = array.astype(np.int32)
    if isinstance(keys, np.ndarray):
        return made
    backend, _ = adopt("auto", k=keys)
    return backend.move_beside(keys, made)
