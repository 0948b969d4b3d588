"""The constants that ``tune`` measured fastest on each device, kept on disk for later plans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cupyfa import store
from cupyfa.planner.plan import Tuned


def on(device: str) -> tuple[Tuned, ...]:
    """The entries tuned on a device that can be read."""
    facts = store.recall(store.facts_file("tuned", device))
    return tuple(tuned for tuned in map(_parsed, facts.values()) if tuned)


def remember(device: str, tuned: Tuned, about: Mapping[str, Any]) -> None:
    """Keeps an entry, with facts ``about`` it for a person to read."""
    file = store.facts_file("tuned", device)
    name = " ".join(map(str, (tuned.kernel, tuned.dtype, f"d={tuned.d}", f"dv={tuned.dv}")))
    name = f"{name} {tuned.folder}" if tuned.folder else name
    fact = {**asdict(tuned), "constants": dict(tuned.constants), **about}
    store.remember(file, {**store.recall(file), name: fact})


def _parsed(fact: Any) -> Tuned | None:
    """The entry of a file that anybody may have changed; None if it is not valid."""
    try:
        tuned = Tuned(
            kernel=fact["kernel"],
            folder=fact["folder"],
            dtype=fact["dtype"],
            d=fact["d"],
            dv=fact["dv"],
            constants=tuple(fact["constants"].items()),
            tflops=fact["tflops"],
        )
        sizes = [value for _, value in tuned.constants]
        whole = all(type(x) is int for x in (tuned.d, tuned.dv, *sizes)) and min(sizes, default=1)
        return tuned if whole and whole >= 1 and 0 < tuned.tflops < math.inf else None
    except (KeyError, TypeError, AttributeError):
        return None
