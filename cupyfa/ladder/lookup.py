"""Lookup of kernels by name. Records contain functions, so they are pickled by name, too."""

import copyreg
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from pickle import PicklingError
from typing import Any

from cupyfa.errors import described, nearest
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Kernel, Launch

_loaded: list[tuple[Kernel, str]] = []  # records loaded from scripts, with their names


def kernels(operation: str | None = None) -> tuple[Kernel, ...]:
    """Returns the records of all kernels, or of one operation's kernels, in teaching order."""
    if operation not in (None, *LADDER):
        raise ValueError(f"operation {operation!r} is unknown; use one of {', '.join(LADDER)}")
    return tuple(x for name in LADDER if operation in (None, name) for x in LADDER[name].values())


def kernel(name: str) -> Kernel:
    """Returns a kernel's record, by its name in the ladder or as ``script.py:name``.

    Each call runs the script again. Raises ValueError, which lists known names, for unknown names.
    """
    if not isinstance(name, str):
        raise TypeError(f"a kernel's name must be a string, not {name!r}; see cupyfa.kernels()")
    if ".py" in name:
        return _from_script(name)
    for records in LADDER.values():
        if name in records:
            return records[name]
    raise unknown_kernel(name)


def unknown_kernel(name: str, others: Iterable[str] = ()) -> ValueError:
    """Makes the error for an unknown kernel name; ``others`` are further names to suggest."""
    script, is_text, variable = name.partition(".cu")
    if is_text and (not variable or variable.startswith(":")):
        like = f"{script}.py{variable}" if variable else "script.py:name"
        return ValueError(
            f"{script}.cu is a kernel's source; pass its record as {like} (cupyfa new writes one)"
        )
    known = [*(record.name for record in kernels()), *others]
    there_are = f"; known kernels are {', '.join(known)}, and script.py:name"
    return ValueError(f"kernel {name!r} is unknown{nearest(name, known) or there_are}")


record_named = kernel  # alias for modules that use `kernel` as a variable


def tile_remedy(given: Mapping[str, Any], argument: str | None) -> str:
    """Returns a hint for tile sizes that were passed as keyword arguments; "" if there are none.

    ``argument`` is the called function's argument for tile sizes, if it has one.
    """
    names = {name for record in kernels() for name in record.choice.names}
    sizes = ", ".join(f'"{name}": {described(x)}' for name, x in given.items() if name in names)
    if not sizes or argument:
        return sizes and f"pass tile sizes as {argument}={{{sizes}}}"
    return (
        f"tile sizes are arguments of attention, compile, plan and bench, as in tiles={{{sizes}}}"
    )


def operation_of(name: str) -> str:
    """Returns the operation of the kernel with this name; "forward" for "auto"."""
    return "forward" if name == "auto" else record_named(name).operation


def _from_script(name: str) -> Kernel:
    script, _, variable = name.rpartition(":")
    if not script:
        raise ValueError(f"{name!r} does not name a Kernel in the script; write {name}:name")
    if not Path(script).is_file():
        raise ValueError(f"file {script!r} does not exist; pass a script that defines a Kernel")
    found = _variables_of(Path(script).resolve())
    records = {key: value for key, value in found.items() if isinstance(value, Kernel)}
    if variable not in records:
        known = ", ".join(records) or "none"
        raise ValueError(f"{script} defines no Kernel named {variable!r}; its Kernels are {known}")
    record = records[variable]
    _loaded.append((record, f"{Path(script).resolve()}:{variable}"))
    return record


def _variables_of(script: Path) -> dict[str, Any]:
    """Runs a script with its folder on the path and returns its variables.

    Redirects the script's output to stderr, because commands write data to stdout.
    """
    import runpy  # imported here, because few programs load a script
    import traceback

    path = list(sys.path)
    sys.path.insert(0, str(script.parent))
    try:
        with redirect_stdout(sys.stderr):
            return runpy.run_path(str(script))
    except (Exception, SystemExit) as error:
        lines = [
            x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == str(script)
        ]
        place = f"{script}:{lines[-1]}" if lines else str(script)
        what = " ".join(str(error).split())  # joins the lines of the message
        raise ValueError(f"{place}: {type(error).__name__}: {what}; correct the script") from error
    finally:
        sys.path[:] = path


@lru_cache
def unpickled(name: str, index: int | None = None) -> Any:
    """Returns the kernel called ``name``, or its launch ``index``; pickle calls this function."""
    return record_named(name) if index is None else unpickled(name).launches[index]


def _reduced(record: Kernel | Launch) -> tuple[Any, ...]:
    for known, name in (*((x, x.name) for x in kernels()), *_loaded):
        if known is record:
            return unpickled, (name,)
        for index, step in enumerate(known.launches):
            if step is record:
                return unpickled, (name, index)
    what = f"launch {record.entry!r}" if isinstance(record, Launch) else f"kernel {record.name!r}"
    raise PicklingError(
        f"{what} was made in this process, and its functions cannot be pickled; put the Kernel "
        "into a script and load it with cupyfa.kernel('script.py:name')"
    )


copyreg.pickle(Kernel, _reduced)
copyreg.pickle(Launch, _reduced)
