"""Checks that all ranks make the same call before any arrays are sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from cupyfa import errors
from cupyfa.version import __version__

if TYPE_CHECKING:
    from cupyfa.distributed.communicator import Group

# Fields that must be equal on all ranks, with their names in error messages.
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
_LONGEST = 400  # bytes sent per field if digests differ; longer fields are truncated
_SHOWN = 4  # largest number of ranks in an error message
_REMEDY = "make them equal on all ranks"


def difference(
    group: Group, fields: Mapping[str, str], error: Exception | None = None
) -> Exception | None:
    """Returns the exception that all ranks must raise, or None if they agree.

    It is the first rank's error, or else a ValueError about the first field that differs. Ranks
    exchange 64-byte digests, and their fields only if digests differ or a rank has an error. An
    exception raised by this function itself is a failure of this rank alone.
    """
    mine = {**dict.fromkeys(FIELDS, ""), "version": __version__, **fields}
    if error is not None:
        mine["error"] = f"{type(error).__name__}: {error}"
    # Encoding must not raise: the other ranks would not know about an error here.
    encoded = [mine[name].replace("\0", " ").encode(errors="backslashreplace") for name in FIELDS]
    digests = group.agree(blake2b(b"\0".join(encoded)).digest())
    if error is None and len({*digests}) == 1:
        return None
    message = b"\0".join(x[:_LONGEST] for x in encoded)
    messages = group.agree(message.ljust((_LONGEST + 1) * len(FIELDS), b"\0"))
    of_ranks = [dict(zip(FIELDS, x.decode(errors="ignore").split("\0"))) for x in messages]
    found = _first_error(of_ranks) or _first_difference(of_ranks)
    found.__cause__ = error
    return found


def _first_error(of_ranks: Sequence[Mapping[str, str]]) -> Exception | None:
    """Returns the error of the first rank that failed, for all ranks to raise, or None."""
    rank = next((rank for rank, x in enumerate(of_ranks) if x["error"]), None)
    if rank is None:
        return None
    kind, _, message = of_ranks[rank]["error"].partition(": ")
    known = {"TypeError": TypeError, "ValueError": ValueError} | vars(errors)
    made = known.get(kind)
    if not (isinstance(made, type) and issubclass(made, Exception)) or kind == "SimulatorFault":
        made, message = errors.DeviceError, of_ranks[rank]["error"]
    return made(f"rank {rank}: {message}")


def _first_difference(of_ranks: Sequence[Mapping[str, str]]) -> Exception:
    """Returns a ValueError about the first field that differs between ranks."""
    for name, what in FIELDS.items():
        texts, remedy = [x[name] for x in of_ranks], _REMEDY
        if name == "sizes":
            texts = _differing_sizes(texts)
            if {size.partition("=")[0] for x in texts for size in x.split(", ")} <= {"M", "N"}:
                remedy = "pass rows=, the total number of rows, to Sharded on all ranks"
        ranks = defaultdict(list)
        for rank, text in enumerate(texts):
            ranks[text].append(rank)
        if len(ranks) > 1:
            found = [*ranks.items()][:_SHOWN]
            shown = "; ".join(f"{x or 'none'} on {_list_ranks(own)}" for x, own in found)
            return ValueError(f"{what} must be equal on all ranks: {shown}; {remedy}")
    return ValueError(f"options differ between ranks after the first {_LONGEST} bytes; {_REMEDY}")


def _differing_sizes(of_ranks: Sequence[str]) -> list[str]:
    common = set.intersection(*(set(x.split(", ")) for x in of_ranks))
    return [", ".join(size for size in x.split(", ") if size not in common) for x in of_ranks]


def _list_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + ", …" * (len(ranks) > _SHOWN)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
