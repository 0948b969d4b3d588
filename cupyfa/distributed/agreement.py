"""Whether all ranks make the same call, before anything of its sizes is sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

from cupyfa import errors
from cupyfa.version import __version__

if TYPE_CHECKING:
    from cupyfa.distributed.communicator import Group

# What has to be equal, and how an error names it. A digest has 8 bytes for each, 64 in all.
FIELDS = {
    "version": "the version of cupyfa",
    "call": "the call",
    "dtype": "dtype",
    "sizes": "sizes",
    "options": "options",
    "kernel": "kernel and tiles",
    "device": "the device",
    "error": "errors",
}
_TEXT_BYTES = 4096  # of a rank's description, which is sent if digests differ
_LONGEST = 400  # letters of a field in it; a text of the user may be long
_BETWEEN = "\0"
_SHOWN = 4  # ranks that an error names
_REMEDY = "give the same on all ranks"


def difference(
    group: Group, fields: Mapping[str, str], error: Exception | None = None
) -> Exception | None:
    """What all ranks have to raise if one of them has an error, or fields that differ.

    It is returned, not raised: what this function raises is a failure of this rank alone.
    """
    mine = {name: fields.get(name, "") for name in FIELDS} | {"version": __version__}
    mine["error"] = f"{type(error).__name__}: {error}" if error else ""
    digests = group.agree(digest(mine))
    no_error = all(x[-8:] == _digest("") for x in digests)
    if no_error and all(x == digests[0] for x in digests):
        return None
    found = _difference([_read(x) for x in group.agree(_written(mine))])
    found.__cause__ = error
    return found


def digest(fields: Mapping[str, str]) -> bytes:
    """64 bytes that are equal if all fields are."""
    return b"".join(_digest(fields[name]) for name in FIELDS)


def _digest(text: str) -> bytes:
    return blake2b(_encoded(text), digest_size=8).digest()


def _written(fields: Mapping[str, str]) -> bytes:
    text = _BETWEEN.join(fields[name].replace(_BETWEEN, " ")[:_LONGEST] for name in FIELDS)
    cut = _encoded(text)[: _TEXT_BYTES - 1]
    return cut + _BETWEEN.encode() * (_TEXT_BYTES - len(cut))


def _encoded(text: str) -> bytes:
    """Any text as bytes: an error here would be that of one rank alone."""
    return text.encode(errors="backslashreplace")


def _read(message: bytes) -> dict[str, str]:
    return dict(zip(FIELDS, message.decode(errors="ignore").split(_BETWEEN)))


def _difference(of_ranks: list[dict[str, str]]) -> Exception:
    """The error for what ranks say: the first error, or the first field that differs."""
    for rank, x in enumerate(of_ranks):
        if x["error"]:
            return _error(rank, x["error"])
    for name, what in FIELDS.items():
        texts, remedy = [x[name] for x in of_ranks], _REMEDY
        if name == "sizes":
            texts = _unlike([x.split(", ") for x in texts])
            if {size.partition("=")[0] for x in texts for size in x.split(", ")} <= {"M", "N"}:
                remedy = "give M= and N= of the whole on all ranks"
        ranks = defaultdict(list)
        for rank, text in enumerate(texts):
            ranks[text].append(rank)
        if len(ranks) > 1:
            found = [*ranks.items()][:_SHOWN]
            shown = "; ".join(f"{x or 'none'} on {_named(own)}" for x, own in found)
            return ValueError(f"{what} must be equal on all ranks: {shown}; {remedy}")
    return ValueError(f"texts of options differ between ranks after their first letters; {_REMEDY}")


def _unlike(of_ranks: list[list[str]]) -> list[str]:
    """Sizes of each rank, without those that all have."""
    return [", ".join(x for x in own if any(x not in y for y in of_ranks)) for own in of_ranks]


def _error(rank: int, text: str) -> Exception:
    """An error of a rank, as all ranks raise it."""
    kind, _, message = text.partition(": ")
    known = {"TypeError": TypeError, "ValueError": ValueError}
    made = known.get(kind) or getattr(errors, kind, None)
    if not (isinstance(made, type) and issubclass(made, Exception)) or kind == "SimulatorFault":
        made, message = errors.DeviceError, text
    return made(f"rank {rank}: {message}")


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + ", …" * (len(ranks) > _SHOWN)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
