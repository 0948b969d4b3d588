"""Continuous batching: requests join and leave between steps, each of which is one CUDA graph."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
from model import Model, Pages


class Request:
    """A prompt to extend by at most `new` tokens. seed: of the tokens that are drawn."""

    def __init__(self, tokens: list[int], new: int, seed: int = 0) -> None:
        self.tokens, self.new, self.seed, self.prompt = tokens, new, seed, len(tokens)


class Generator:
    """Generates tokens for requests, `slots` at a time, each of at most `capacity` tokens.

    temperature: 0 takes the most likely token. end: the token after which a request ends.
    """

    def __init__(self, model: Model, slots: int, capacity: int, temperature=0.0, end=-1) -> None:
        self.model, self.temperature, self.end = model, temperature, end
        capacity = self.capacity = min(capacity, model.sizes.context)
        xp = self.xp = model.layers.xp
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by slot
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self.stream = nullcontext() if xp is np else xp.cuda.Stream(non_blocking=True)
        with self.stream:
            self.pages = Pages(model, slots, capacity)
            self.tokens, self.active = xp.zeros((2, slots), np.int32)  # active: 1 with a request
            self.seeds = xp.zeros(slots, np.uint32)
            self.launch = self._step_of_slots if xp is np else self._capture().launch

    def submit(self, request: Request) -> None:
        """Queues a request; raises ValueError if it is empty or longer than the capacity."""
        if min(request.prompt, request.new) < 1 or request.prompt + request.new > self.capacity:
            given = f"a request has {request.prompt} tokens and {request.new} new ones"
            raise ValueError(f"{given}; give at least 1 of each, at most {self.capacity} in total")
        self.waiting.append(request)

    def step(self) -> list[tuple[Request, int]]:
        """Generates a token of each running request; returns the tokens with their requests."""
        made = []
        with self.stream:
            for name, work in (("prefill", self._prefill), ("decode", self._decode)):
                start = time.perf_counter()
                for slot, token in work().items():
                    request = self.running[slot]
                    request.tokens.append(token)
                    made.append((request, token))
                    if token == self.end or len(request.tokens) == request.prompt + request.new:
                        del self.running[slot]
                        self.pages.release(slot)
                        self.active[slot] = 0
                self.seconds[name] += time.perf_counter() - start
        return made

    def run(self) -> Iterator[tuple[Request, int]]:
        """Yields each token of all requests, with its request, as soon as it is generated."""
        while self.waiting or self.running:
            yield from self.step()

    def _prefill(self) -> dict[int, int]:
        """Admits requests to free slots; returns the tokens that follow their prompts, by slot."""
        slots = [x for x in range(len(self.tokens)) if x not in self.running][: len(self.waiting)]
        if not slots:
            return {}
        joined, xp = [self.waiting.popleft() for _ in slots], self.xp
        self.running |= zip(slots, joined)
        for slot, request in zip(slots, joined):
            self.pages.take(slot, request.prompt + request.new)
        counts = [request.prompt for request in joined]
        tokens = xp.asarray(np.concatenate([request.tokens for request in joined]), np.int32)
        x = self.model.forward(tokens, self.pages.prefill(slots, counts))
        logits = self.model.logits(x[xp.asarray(np.cumsum(counts) - 1)])
        seeds = xp.asarray([request.seed for request in joined], np.uint32)
        lengths, there = xp.asarray(counts, np.int32), xp.asarray(slots)
        drawn = self.model.layers.sample(logits, seeds, lengths - 1, self.temperature)
        self.tokens[there], self.seeds[there], self.active[there] = drawn, seeds, 1
        self.pages.lengths[there] = lengths
        return dict(zip(slots, drawn.tolist()))

    def _decode(self) -> dict[int, int]:
        """Runs one step of all slots; returns the new tokens of requests, by slot."""
        if self.running:
            self.launch()
        tokens = self.tokens.tolist() if self.running else []
        return {slot: tokens[slot] for slot in self.running}

    def _step_of_slots(self) -> None:
        """Computes each slot's next token from its last one, entirely in arrays of the device."""
        layers, lengths = self.model.layers, self.pages.lengths
        logits = self.model.logits(self.model.forward(self.tokens, self.pages.decode))
        self.tokens[...] = layers.sample(logits, self.seeds, lengths, self.temperature)
        lengths += self.active

    def _capture(self) -> Any:
        """Captures a step in a CUDA graph, whose arrays have a memory pool of their own."""
        self._step_of_slots()  # compiles the kernels; without requests it writes to unused pages
        self.pool = self.xp.cuda.MemoryPool()
        with self.xp.cuda.using_allocator(self.pool.malloc):
            self.stream.begin_capture()
            self._step_of_slots()
            return self.stream.end_capture()
