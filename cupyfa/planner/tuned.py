"""Tuned constants, stored on disk: the fastest constants that ``tune`` found on each device."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cupyfa import cache_folder
from cupyfa.cache_folder import records
from cupyfa.planner.plan import Tuned
from cupyfa.problem.problem import MOST

_ENTRY = records.record(
    {
        **dict.fromkeys(("kernel", "dtype"), records.text()),
        "folder": records.optional(records.text()),
        **dict.fromkeys(("d", "dv"), records.whole(0, MOST)),
        "constants": records.mapping_of(records.whole(1, MOST)),
        "tflops": records.number(1e-9),
    }
)


def on(device: str) -> tuple[Tuned, ...]:
    facts = cache_folder.recall(cache_folder.facts_file("tuned", device))
    return tuple(tuned for tuned in map(_parsed, facts.values()) if tuned)


def remember(device: str, tuned: Tuned, about: Mapping[str, Any]) -> None:
    """Stores an entry on disk; ``about`` holds additional facts for human readers."""
    file = cache_folder.facts_file("tuned", device)
    name = f"{tuned.kernel} {tuned.dtype} d={tuned.d} dv={tuned.dv}"
    name = f"{name} {tuned.folder}" if tuned.folder else name
    fact = {**asdict(tuned), "constants": dict(tuned.constants), **about}
    cache_folder.remember(file, {**cache_folder.recall(file), name: fact})


def _parsed(fact: Any) -> Tuned | None:
    """Parses an entry of a file that users may have edited; returns None if it is invalid."""
    try:
        given = _ENTRY(fact)
    except ValueError:
        return None
    return Tuned(**{**given, "constants": tuple(given["constants"].items())})
