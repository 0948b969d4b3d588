"""Generates tokens without torch: NumPy or CuPy arrays, attention by cupyfa.

The weights come from examples/train_transformer.py. Prompts of different lengths are prefilled as
one ragged batch of `cupyfa.Packed` arrays. New tokens attend to a paged `cupyfa.KVCache`. Requests
join and leave between steps (continuous batching): a finished request frees its pages, and a
waiting request is prefilled. If pages run out, the most recent request is preempted, and later
prefilled again with all of its tokens.

    python examples/train_transformer.py --task repeat --save weights.npz
    python examples/generate.py weights.npz                 # in the simulator if there is no GPU

Continuous batching: Yu et al., 2022 (Orca). Pages: Kwon et al., 2023, arXiv:2309.06180.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from train_transformer import (
    EVERY,
    Arrays,
    Model,
    characters,
    count,
    gelu_vjp,
    has_gpu,
    load,
    module_of,
    rms_norm_vjp,
)

import cupyfa

Attend = Callable[[int, Any, Any, Any], Any]  # (block, q, k, v) -> out, all [rows, heads, d]


def logits_of(model: Model, weights: Arrays, tokens: Any, places: Any, attend: Attend) -> Any:
    """Computes next-token logits [rows, vocabulary] from tokens [rows] at positions `places`."""
    x = weights["tokens"][tokens]
    if "positions" in weights:
        x = x + weights["positions"][places]
    for i in range(model.blocks):
        y = rms_norm_vjp(x, weights[f"{i}.norm_attention"])[0] @ weights[f"{i}.qkv"]
        y = y.reshape(len(x), -1, model.d).astype(model.attention, copy=False)
        ends = model.heads, model.heads + model.kv_heads
        o = attend(i, y[:, : ends[0]], y[:, ends[0] : ends[1]], y[:, ends[1] :])
        x = x + o.reshape(len(x), -1).astype(x.dtype, copy=False) @ weights[f"{i}.out"]
        y = rms_norm_vjp(x, weights[f"{i}.norm_mlp"])[0] @ weights[f"{i}.up"]
        x = x + gelu_vjp(y)[0] @ weights[f"{i}.down"]
    return rms_norm_vjp(x, weights["norm"])[0] @ weights["logits"]


@dataclass(eq=False)
class Request:
    """A prompt to extend by `new` tokens. It arrives at step `step`."""

    tokens: list[int]
    new: int
    step: int = 0
    end: int = field(init=False)  # final number of tokens

    def __post_init__(self) -> None:
        self.end = len(self.tokens) + self.new


class Pages:
    """The paged keys and values of all blocks of the model, and the page table that they share.

    A slot of the batch allocates pages while its request runs. Slots without a request write to a
    dummy page each, so that arrays have the same shapes in every step.
    """

    def __init__(self, model: Model, slots: int, pages: int, size: int, xp: Any) -> None:
        shape = slots + pages, size, model.kv_heads, model.d
        self.k, self.v = (
            [xp.zeros(shape, model.attention) for _ in range(model.blocks)] for _ in "kv"
        )
        self.size, self.xp = size, xp
        self.free = list(range(slots, slots + pages))
        self.table = np.repeat(np.arange(slots, dtype=np.int32)[:, None], pages, axis=1)
        self.lengths = np.zeros(slots, np.int32)  # number of keys in each slot

    def make_room(self, slot: int, keys: int) -> bool:
        """Allocates a slot's pages for `keys` keys; returns False if too few pages are free."""
        has, needs = (-(-n // self.size) for n in (int(self.lengths[slot]), keys))
        if needs - has > len(self.free):
            return False
        self.table[slot, has:needs] = [self.free.pop() for _ in range(needs - has)]
        return True

    def release(self, slot: int) -> None:
        used = -(-int(self.lengths[slot]) // self.size)
        self.free += self.table[slot, :used].tolist()
        self.table[slot], self.lengths[slot] = slot, 0

    def write(self, block: int, slots: np.ndarray, places: np.ndarray, k: Any, v: Any) -> None:
        """Writes keys and values [rows, kv_heads, d] at each row's slot and position."""
        page = self.xp.asarray(self.table[slots, places // self.size])
        row = self.xp.asarray(places % self.size)
        self.k[block][page, row] = k
        self.v[block][page, row] = v

    def caches(self) -> list[cupyfa.KVCache]:
        """Makes one KVCache per block; all of them share the page table and the lengths."""
        lengths, table = self.xp.asarray(self.lengths), self.xp.asarray(self.table)
        return [cupyfa.KVCache(k, v, lengths, table, layout="bshd") for k, v in zip(self.k, self.v)]


class Server:
    """Generates tokens for requests step by step, with greedy decoding."""

    def __init__(
        self, model: Model, weights: Arrays, slots: int, pages: int, size: int = 16
    ) -> None:
        self.model, self.weights, self.xp = model, weights, module_of(weights["norm"])
        self.pages = Pages(model, slots, pages, size, self.xp)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by slot, the most recent request last
        self.steps = self.prefilled = self.decoded = self.preempted = 0
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self.how: Arrays = {"backend": model.backend}
        if model.distances:
            self.how["score_mod"] = "score + bias_of[head, min(max(position - key, 0), last)]"

    def submit(self, request: Request) -> None:
        """Queues a request; raises ValueError if it has no tokens or is too long for the cache."""
        most = len(self.pages.table[0]) * self.pages.size
        if not self.model.distances:
            most = min(most, self.model.length)
        if not request.tokens or request.end > most:
            raise ValueError(
                f"a request has {len(request.tokens)} prompt tokens and {request.new} new tokens; "
                f"give a prompt of at least 1 token, and at most {most} tokens in total"
            )
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Generates one token per running request; returns the finished requests."""
        finished = []
        for work in (self.prefill, self.decode):
            work()
            for slot in [s for s, x in self.running.items() if len(x.tokens) == x.end]:
                finished.append(self.running.pop(slot))
                self.pages.release(slot)
        self.steps += 1
        return finished

    def prefill(self) -> None:
        """Admits requests while slots and pages are free, and prefills them as a ragged batch."""
        joined = []
        while self.waiting and self.waiting[0].step <= self.steps:
            free = [x for x in range(len(self.pages.lengths)) if x not in self.running]
            if not free or not self.pages.make_room(free[0], len(self.waiting[0].tokens)):
                break
            self.running[free[0]] = self.waiting.popleft()
            joined.append(free[0])
            self.pages.lengths[free[0]] = len(self.running[free[0]].tokens)
        if not joined:
            return
        start = time.perf_counter()
        counts = [len(self.running[x].tokens) for x in joined]
        tokens = np.concatenate([self.running[x].tokens for x in joined])
        slots = np.repeat(joined, counts)
        places = np.concatenate([np.arange(n) for n in counts])
        ends = np.cumsum([0, *counts]).astype(np.int32)
        offsets = self.xp.asarray(ends)

        def attend(block: int, q: Any, k: Any, v: Any) -> Any:
            self.pages.write(block, slots, places, k, v)
            q, k, v = (cupyfa.Packed(x, offsets) for x in (q, k, v))
            return cupyfa.attention(q, k, v, causal=True, **self.options(block))

        self.take(joined, tokens, places, attend, ends[1:] - 1)
        self.prefilled += len(tokens)
        self.seconds["prefill"] += time.perf_counter() - start

    def decode(self) -> None:
        """Generates one token per running request, and caches keys and values of its last token."""
        for slot in list(self.running):
            while slot in self.running and not self.pages.make_room(
                slot, int(self.pages.lengths[slot]) + 1
            ):
                self.preempt(next(reversed(self.running)))
        if not self.running:
            return
        start = time.perf_counter()
        pages, slots = self.pages, list(self.running)
        tokens = np.zeros(len(pages.lengths), int)
        tokens[slots] = [self.running[x].tokens[-1] for x in slots]
        caches = pages.caches()

        def attend(block: int, q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x[:, :, None] for x in (q, k, v))  # [slots, heads, 1, d]
            return cupyfa.attention(q, caches[block], append=(k, v), **self.options(block))

        self.take(slots, tokens, pages.lengths, attend, np.array(slots))
        pages.lengths[slots] += 1  # attention appends keys but does not change lengths
        self.decoded += len(slots)
        self.seconds["decode"] += time.perf_counter() - start

    def preempt(self, slot: int) -> None:
        """Returns a running request with its tokens to the queue, and frees its pages."""
        self.waiting.appendleft(self.running.pop(slot))
        self.pages.release(slot)
        self.preempted += 1

    def take(
        self, slots: list[int], tokens: np.ndarray, places: np.ndarray, attend: Attend, rows: Any
    ) -> None:
        """Runs the model and appends the most likely next token to each slot's request.

        rows: the row of each slot's last token.
        """
        tokens, places, rows = (self.xp.asarray(x) for x in (tokens, places, rows))
        logits = logits_of(self.model, self.weights, tokens, places, attend)
        for slot, token in zip(slots, logits[rows].argmax(-1).tolist()):
            self.running[slot].tokens.append(token)

    def options(self, block: int) -> Arrays:
        """Returns further arguments of attention, with the learned bias if the model has one."""
        if not self.model.distances:
            return self.how
        bias = self.weights[f"{block}.bias"]
        return {**self.how, "captured": {"bias_of": bias, "last": bias.shape[1] - 1}}

    def run(self, report: Callable[[Request], None] = lambda request: None) -> None:
        while self.waiting or self.running:
            for request in self.step():
                report(request)


def prompts(model: Model, task: str, many: int, longest: int, seed: int) -> list[list[int]]:
    """Draws prompts of different lengths that resemble the training data."""
    random = np.random.default_rng(seed)
    if task == "text":
        text, _ = characters()
        starts = random.integers(0, len(text) - longest, many)
        return [text[a : a + n].tolist() for a, n in zip(starts, random.integers(1, longest, many))]
    if task == "sort":  # prompts of this task have a fixed length
        return random.integers(0, model.vocabulary, (many, (model.length + 1) // 2)).tolist()
    made = []
    for n in random.integers(EVERY, max(longest, EVERY) + 1, many):
        made.append(np.resize(random.integers(0, model.vocabulary, EVERY), n).tolist())
    return made


def main() -> None:
    options = arguments()
    backend = options.backend
    if backend == "auto":
        backend = "cuda" if has_gpu() else "simulator"
    elif backend == "cuda" and not has_gpu():
        sys.exit("--backend cuda: there is no GPU; omit the option, or run `cupyfa doctor`")
    try:
        model, weights, about = load(options.weights, backend)
    except (OSError, ValueError, KeyError) as error:
        remedy = "write them with train_transformer.py --save"
        sys.exit(f"cannot read weights from {options.weights}: {error}; {remedy}")
    if backend == "cuda":
        import cupy

        weights = {name: cupy.asarray(x) for name, x in weights.items()}
    server = Server(model, weights, options.slots, options.pages, options.page)
    random = np.random.default_rng(options.seed)
    given = prompts(model, about["task"], options.requests, options.prompt, options.seed)
    for i, prompt in enumerate(given):
        new = int(random.integers(1, options.new + 1))
        if not model.distances:
            new = min(new, model.length - len(prompt))
        try:
            server.submit(Request(prompt, new, step=i // 2))  # two requests arrive per step
        except ValueError as error:
            sys.exit(f"{error}: change --pages, --prompt or --new")
    alphabet = about["alphabet"]

    def shown(tokens: list[int]) -> str:
        return "".join(alphabet[x] for x in tokens) if alphabet else " ".join(map(str, tokens))

    def report(request: Request) -> None:
        before = request.end - request.new
        parts = shown(request.tokens[:before]), shown(request.tokens[before:])
        print(f"step {server.steps:3}  {parts[0]} | {parts[1]}".replace("\n", "⏎"), flush=True)

    print(f"{len(given)} requests, {options.slots} at a time, pages of {options.page}: {model}")
    server.run(report)
    rates = (
        f"{name} {n} tokens, {n / max(server.seconds[name], 1e-9):,.0f} per second"
        for name, n in (("prefill", server.prefilled), ("decode", server.decoded))
    )
    print("; ".join(rates) + f"; {server.steps} steps, {server.preempted} preemptions")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Generate tokens with a transformer of train_transformer.py."
    )
    saved = "weights written by train_transformer.py --save"
    parser.add_argument("weights", metavar="FILE.npz", help=saved)
    parser.add_argument("--backend", choices=("auto", "cuda", "simulator"), default="auto")
    for name, default, what in (
        ("requests", 12, "number of requests; two arrive per step"),
        ("slots", 4, "sequences in a batch"),
        ("pages", 16, "pages of the cache"),
        ("page", 16, "keys in a page: 16, 32, 64, 128 or 256"),
        ("prompt", 20, "tokens of the longest prompt"),
        ("new", 24, "largest number of new tokens of a request"),
    ):
        parser.add_argument(f"--{name}", type=count, default=default, help=f"{what}  [{default}]")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
