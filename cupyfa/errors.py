"""Exceptions other than ValueError and TypeError, and helpers for messages and warnings."""

import numbers
import os
import re
import reprlib
import sys
import warnings
from collections.abc import Iterable
from typing import Any, NoReturn, Self

_FEW = 4  # messages show sequences of at most this many elements
_OTHER = "of type"  # precedes the type's name where a message does not show the value
# All control characters but tab and newline, and Unicode marks that change the text direction.
_CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
_LIBRARY = os.path.dirname(__file__) + os.sep


class Unsupported(NotImplementedError):
    """A valid problem that this kernel or device does not support; names kernels that support it.

    ``reason`` is a short reason without sizes, so that equal reasons can be counted.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class WrongResult(AssertionError):
    """A result differs from the reference by more than its error bound."""


class DeviceError(RuntimeError):
    """A failure of the device: out of memory, a kernel that trapped, a lost device."""


class DeviceLost(DeviceError):
    """A kernel trapped, and this process cannot use the device any more."""


class OutOfMemory(DeviceError):
    """The device has too little free memory for a call."""


class SimulatorFault(RuntimeError):
    """An invalid operation of a kernel: names kernel, block, thread, access and source line.

    ``kernel`` is the entry point, ``block`` and ``thread`` are (x, y, z) indices, ``what``
    describes the fault, and ``place`` is its ``file:line`` and the caller's, or "" if unknown.
    """

    def __init__(
        self,
        kernel: str,
        block: tuple[int, int, int],
        thread: tuple[int, int, int],
        what: str,
        place: str,
    ) -> None:
        where = f", at {place}" if place and place not in what else ""
        super().__init__(f"{kernel}, block {block}, thread {thread}: {what}{where}")
        self.kernel, self.block, self.thread = kernel, block, thread
        self.what, self.place = what, place

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments of the constructor, so that worker processes can send the fault."""
        parts = self.kernel, self.block, self.thread, self.what, self.place
        return type(self), parts, self.__dict__


class OfThisProcess:
    """An object that holds a device, threads or a loaded kernel, and so cannot be pickled.

    ``_instead`` tells the user what to do in another process.
    """

    _instead: str

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is tied to the process that created it and cannot be "
            f"pickled; {self._instead}"
        )

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def _another(self) -> Self:
        """Returns a shallow copy, whose attributes may then be changed."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other


class CompilerNotFound(RuntimeError):
    """No working C++ compiler was found; the message lists what was tried and how to get one."""


class CompileError(RuntimeError):
    """The compiler rejected the source of a kernel; the message is the compiler's output."""


def described(value: object) -> str:
    """Describes a wrong argument for a message: short values by their repr, others by type."""
    if value is None or isinstance(value, str | numbers.Number | type):
        return reprlib.repr(value)
    if isinstance(value, tuple | list) and len(value) <= _FEW:
        inner = ", ".join(map(described, value))
        if _OTHER in inner:
            return f"{_OTHER} {type(value).__name__}"
        end = "," if len(value) == 1 else ""
        return f"({inner}{end})" if isinstance(value, tuple) else f"[{inner}]"
    return f"{_OTHER} {type(value).__name__}"


def printable(text: str) -> str:
    """Replaces characters that control a terminal by escapes such as \\x1b.

    Strings from files may be untrusted. Newlines and tabs are kept.
    """
    return re.sub(_CONTROLS, lambda found: found[0].encode("unicode_escape").decode(), text)


def closest(name: object, known: Iterable[str]) -> str | None:
    """Returns the known name that is spelled most like ``name``, ignoring case, or None."""
    from difflib import get_close_matches

    by_case = {x.lower(): x for x in known}
    close = get_close_matches(str(name).lower(), by_case, 1)
    return by_case[close[0]] if close else None


def nearest(name: object, known: Iterable[str]) -> str:
    """Returns " (did you mean …?)" for an unknown name, or "" if no known name is similar."""
    close = closest(name, known)
    return f" (did you mean {close!r}?)" if close else ""


def warn(text: str) -> None:
    """Issues a warning that points to the line in the user's code that called the library."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_code.co_filename.startswith(_LIBRARY):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
