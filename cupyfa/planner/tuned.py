"""The constants that ``tune`` measured fastest on each device, kept on disk for later plans."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from cupyfa import store
from cupyfa.planner.plan import Tuned


def on(device: str) -> tuple[Tuned, ...]:
    facts = store.recall(store.facts_file("tuned", device))
    return tuple(tuned for tuned in map(_parsed, facts.values()) if tuned)


def remember(device: str, tuned: Tuned, about: Mapping[str, Any]) -> None:
    """Keeps an entry, with facts ``about`` it for a person to read."""
    file = store.facts_file("tuned", device)
    name = f"{tuned.kernel} {tuned.dtype} d={tuned.d} dv={tuned.dv}"
    name = f"{name} {tuned.folder}" if tuned.folder else name
    fact = {**asdict(tuned), "constants": dict(tuned.constants), **about}
    store.remember(file, {**store.recall(file), name: fact})


def _parsed(fact: Any) -> Tuned | None:
    """The entry of a file that a user may have changed; None if it is not valid."""
    try:
        given = {field.name: fact[field.name] for field in fields(Tuned)}
        tuned = Tuned(**{**given, "constants": tuple(fact["constants"].items())})
        sizes = [tuned.d, tuned.dv, *(value for _, value in tuned.constants)]
        whole = all(type(x) is int for x in sizes) and min(sizes[2:], default=1) >= 1
        return tuned if whole and 0 < tuned.tflops < math.inf else None
    except (KeyError, TypeError, AttributeError):
        return None
