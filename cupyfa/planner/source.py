"""Finds kernels/, and writes a launch's source text: typed constants above an unchanged file."""

import re
from functools import lru_cache
from pathlib import Path

from cupyfa.planner import includes
from cupyfa.planner.plan import PlannedLaunch

_PACKAGE = Path(__file__).resolve().parents[1]
# kernels/ and cli.py lie in the package when installed, next to it in a checkout.
ROOT = _PACKAGE if (_PACKAGE / "kernels").is_dir() else _PACKAGE.parent
KERNELS = ROOT / "kernels"
INCLUDE = KERNELS / "include"
# Comments, strings and characters, whichever begins first.
_NO_CODE = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL)
# Where macros may make names: by ##, and in the name of an include.
_MADE = re.compile(r"##|^[ \t]*#[ \t]*include\s+\w", re.MULTILINE)


def text(launch: PlannedLaunch) -> str:
    """The exact text that is compiled: header, types, constants, the .cu file, a digest.

    Only constants that the file or its headers name are declared, so that a launch is compiled once
    for all others; all of them where macros may make names. The digest changes the text, and every
    cache key, when a header changes.
    """
    headers = dict.fromkeys(filter(None, (launch.dtype.header, launch.operand.header)))
    header = [f"#include <{name}>" for name in headers]
    path = KERNELS / launch.path
    name = launch.path if launch.path.is_absolute() else Path("kernels") / launch.path
    file = _read(path, launch.entry)
    above = [*header, *([launch.mods] if "#include" in launch.mods else [])]
    reached = includes.reached("\n".join([*above, file]), include_folders(launch))
    words = [_words(file), *(_words(x.decode(errors="replace")) for x in reached.values())]
    named = launch.constants if None in words else frozenset().union(*filter(None, words))
    return "\n".join(
        [
            *header,
            f"using scalar = {launch.dtype.scalar};",
            f"using operand = {launch.operand.scalar};",
            f"using result = {launch.result.scalar};",
            f"using real = {launch.dtype.real};",
            *(_constant(name, value) for name, value in launch.constants.items() if name in named),
            *([launch.mods] if None in words or "Mods" in named else []),
            f'#line 1 "{name.as_posix()}"',
            file,
            f"// headers: {includes.digest(reached)}",
            "",
        ]
    )


def headers(launch: PlannedLaunch) -> set[str]:
    """The names of the headers that a launch's file includes, directly or not."""
    file = _read(KERNELS / launch.path, launch.entry)
    return {path.name for path in includes.reached(file, include_folders(launch))}


def without_entry(launch: PlannedLaunch) -> ValueError:
    """The error for a file in which the compiler did not find the launch's entry point."""
    return ValueError(
        f"{KERNELS / launch.path} has no kernel {launch.entry}; write there "
        f'extern "C" __global__ void {launch.entry}(...), or give its Launch another entry'
    )


def _read(path: Path, entry: str) -> str:
    """The text of a kernel's file. Raises OSError or ValueError that say whose file it is."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise type(error)(
            f"{path}, the file of kernel {entry}, cannot be read ({error.strerror}); put it there, "
            "or say where it is: folder= in its Kernel, file= in its Launch"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error}); save it as that") from None


@lru_cache(maxsize=128)  # more than all files of the project
def _words(code: str) -> frozenset[str] | None:
    """The words of a text without comments and strings; None if macros may make others."""
    bare = _NO_CODE.sub(" ", code)
    return None if _MADE.search(bare) else frozenset(re.findall(r"\w+", bare))


def _constant(name: str, value: int | float) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, float):  # in hexadecimal, which is exact
        return f"constexpr float {name} = {value.hex()}f;"
    return f"constexpr int {name} = {value};"


def include_folders(launch: PlannedLaunch) -> tuple[Path, ...]:
    """Where a launch's includes are looked for: next to a user's own file, then the project's."""
    own = (launch.path.parent,) if launch.path.is_absolute() else ()
    return (*own, INCLUDE, KERNELS)
