"""Source text of launches: typed constants above an unchanged file from kernels/."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from cupyfa.planner import includes
from cupyfa.planner.plan import NO_MODS, PlannedLaunch
from cupyfa.problem.dtypes import E4M3_INPUTS

_PACKAGE = Path(__file__).resolve().parents[1]
# An installed package contains kernels/ and cli.py; in a checkout they lie next to the package.
ROOT = _PACKAGE if (_PACKAGE / "kernels").is_dir() else _PACKAGE.parent
KERNELS = ROOT / "kernels"
INCLUDE = KERNELS / "include"
# Folders whose headers override headers of INCLUDE and KERNELS: RECORDING for recorded launches,
# WITH for lengths, pages, e4m3, modified scores and scales that may be negative. ENDS maps
# constants to folders for launches in which the constant is not 0; their headers say how a block
# ends, or that it keeps a bias or dS.
RECORDING = KERNELS / "timeline"
WITH = KERNELS / "with"
ENDS = {
    "finishes": "finishing",
    "shares_groups": "sharing",
    "splits_keys": "splitting",
    "balances": "balancing",
    "kept_tiles": "keeping",
    "keeps_dS": "keeping_dS",
}
# Headers that the host includes with a problem's expressions (cuda_source.header).
_OF_EXPRESSIONS = ("score_mod", "staged_bias_tile", "dropout")
_copies: dict[Path, Path] = {}  # folders of kernel files, and the folders to read instead
# Matches code in which macros may form names: ## and #include of a macro.
_MADE = r"(?m)##|^[ \t]*#[ \t]*include\s+\w"
_ALIGNED = r"\b(?:alignas|__align__)\s*\((?:[^()]|\([^()]*\))*\)"
# _DECLARED matches a type and the declared names, after array extents and template arguments have
# been removed. _BESIDE matches qualifiers and keywords of built-in types.
_BESIDE = r"(?:(?:const|volatile|typename|unsigned|signed|long|short|int|char|double)[\s*]+)*"
_DECLARED = (
    r"(?!(?:struct|class|union|enum|friend|typedef|template|extern)\b)"
    rf"{_BESIDE}(?:::\s*)?[A-Za-z_]\w*(?:\s*::\s*\w+)*[\s*]+{_BESIDE}"
    r"([A-Za-z_]\w*(?:\s*,[\s*]*[A-Za-z_]\w*)*)"
)


def text(launch: PlannedLaunch) -> str:
    """Returns the exact text that is compiled: includes, types, constants, the .cu file, a digest.

    Declares only constants whose names occur in the file or its headers, so that other constants do
    not cause another compilation. If macros may form names, it declares all constants. The digest
    changes the text, and thereby every cache key, when a header changes.
    """
    above, file, reached = _above_and_file(launch)
    return "\n".join(
        [
            *above,
            f'#line 1 "{shown(launch.path)}"',
            file,
            f"// headers: {includes.digest(reached)}",
            "",
        ]
    )


def inlined(launch: PlannedLaunch) -> str:
    """Returns ``text`` as a single file for readers, with the project's headers inlined."""
    above, file, _ = _above_and_file(launch)

    def title(header: Path) -> str:
        return shown(header.relative_to(KERNELS) if header.is_relative_to(KERNELS) else header)

    files = {"types and constants from the host": "\n".join(above), shown(launch.path): file}
    return includes.inlined(files, include_folders(launch), title)


def _above_and_file(launch: PlannedLaunch) -> tuple[list[str], str, dict[Path, bytes]]:
    """Returns the lines above a launch's file, the file, and all headers that they include."""
    types = launch.dtype, launch.operand, launch.result
    headers = dict.fromkeys(filter(None, (x.header for x in types)))
    header = [*_recording(launch), *(f"#include <{name}>" for name in headers)]
    path = KERNELS / launch.path
    file = _read(path, launch.entry)
    if launch.recording:
        file = _recorded(file, launch.entry, path)
    above = [*header, *([launch.mods] if "#include" in launch.mods else [])]
    reached = includes.reached("\n".join([*above, file]), include_folders(launch))
    words = [_words(file), *(_words(x.decode(errors="replace")) for x in reached.values())]
    named = launch.constants if None in words else frozenset().union(*filter(None, words))
    lines = [
        *header,
        f"using scalar = {launch.dtype.scalar};",
        f"using operand = {launch.operand.scalar};",
        f"using result = {launch.result.scalar};",
        f"using real = {launch.dtype.real};",
        *(_constant(name, value) for name, value in launch.constants.items() if name in named),
        *([launch.mods] if None in words or "Mods" in named else []),
    ]
    return lines, file, reached


@contextmanager
def reading(copies: Mapping[Path, Path]) -> Iterator[None]:
    """Makes this process read the kernel files of each folder from a copy of the folder.

    Names of files in plans and messages do not change.
    """
    before = dict(_copies)
    _copies.update(copies)
    try:
        yield
    finally:
        _copies.clear()
        _copies.update(before)


def _to_read(path: Path) -> Path:
    """Returns the path from which a file or folder is read."""
    for folder, copy in _copies.items():
        if path.is_relative_to(folder):
            return copy / path.relative_to(folder)
    return path


def shown(path: Path) -> str:
    """Returns the name of a launch's .cu file in compiler messages."""
    return (path if path.is_absolute() else Path("kernels") / path).as_posix()


def file_of(launch: PlannedLaunch) -> str:
    """Returns the text of a launch's .cu file."""
    return _read(KERNELS / launch.path, launch.entry)


def texts(launch: PlannedLaunch) -> list[str]:
    """Returns the text of a launch's .cu file, and of all headers that it includes."""
    file = file_of(launch)
    reached = includes.reached(file, include_folders(launch))
    return [file, *(x.decode(errors="replace") for x in reached.values())]


def headers(launch: PlannedLaunch) -> set[str]:
    """Returns the names of the headers that a launch's file includes, directly or indirectly."""
    return {path.name for path in includes.reached(file_of(launch), include_folders(launch))}


def files_reached(launch: PlannedLaunch) -> set[Path]:
    """Returns the paths of a launch's .cu file and of all headers that its text includes."""
    return {KERNELS / launch.path, *_above_and_file(launch)[2]}


def reachable(path: Path, *, options: bool) -> set[Path]:
    """Returns the paths of a .cu file and of all headers that any launch of it may include.

    options: whether the file's kernel has options that modify scores.
    """
    path = KERNELS / path
    text = _read(path, path.stem)
    host = "".join(f"#include <attention/{name}.cuh>\n" for name in _OF_EXPRESSIONS)
    found = {path}
    for is_plain in (True, False) if options else (True,):
        above = "" if is_plain else host
        for ends in ([], *([folder] for folder in ENDS.values())):
            found |= {*includes.reached(above + text, _folders(path, ends, is_plain=is_plain))}
    return found


def without_entry(launch: PlannedLaunch) -> ValueError:
    """Makes the error for a file in which the compiler did not find the launch's entry point."""
    return ValueError(
        f"{KERNELS / launch.path} has no kernel {launch.entry}; write there "
        f'extern "C" __global__ void {launch.entry}(...), or set entry= of its Launch'
    )


def _read(path: Path, entry: str) -> str:
    try:
        return _to_read(path).read_text(encoding="utf-8")
    except OSError as error:
        raise type(error)(
            f"{path}, the file of kernel {entry}, cannot be read ({error.strerror}); create this "
            "file, or set folder= of its Kernel or file= of its Launch"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8 ({error}); save it as UTF-8") from None


@lru_cache(maxsize=128)  # exceeds the number of kernel files
def _words(code: str) -> frozenset[str] | None:
    """Returns the words in code, without comments and strings; None if macros may paste names."""
    bare = re.sub(includes.NO_CODE, " ", code)
    return None if re.search(_MADE, bare) else frozenset(re.findall(r"\w+", bare))


def _constant(name: str, value: int | float) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, float):  # hexadecimal literals are exact
        return f"constexpr float {name} = {value.hex()}f;"
    return f"constexpr int {name} = {value};"


def include_folders(launch: PlannedLaunch) -> tuple[Path, ...]:
    """Returns the folders to search for includes: a user's folder, then the project's."""
    ends = [folder for name, folder in ENDS.items() if launch.constants.get(name)]
    is_recorded, is_plain = launch.recording is not None, _is_plain(launch)
    folders = _folders(launch.path, ends, is_recorded=is_recorded, is_plain=is_plain)
    return tuple(map(_to_read, folders))


def _folders(
    path: Path, ends: Sequence[str], *, is_recorded: bool = False, is_plain: bool
) -> tuple[Path, ...]:
    own = (path.parent,) if path.is_absolute() and not path.is_relative_to(KERNELS) else ()
    own_first = (folder / end for folder in (*own, KERNELS) for end in ends)
    recording = (RECORDING,) if is_recorded else ()
    extended = () if is_plain else (WITH,)
    return (*own_first, *own, *recording, *extended, INCLUDE, KERNELS)


def _is_plain(launch: PlannedLaunch) -> bool:
    """Returns whether a launch can be compiled without the headers in WITH.

    This requires scores q·k times a positive scale, and arrays that are neither e4m3 nor paged.
    """
    of = launch.constants.get
    is_e4m3 = launch.dtype == E4M3_INPUTS or of("has_e4m3")
    is_stored_alike = not (of("page_size") or is_e4m3)
    return launch.mods == NO_MODS and is_stored_alike and bool(of("positive_scale", True))


def _recording(launch: PlannedLaunch) -> list[str]:
    """Returns the lines above a recorded launch's file.

    The lines also redefine __syncthreads, to record how long warps wait.
    """
    if launch.recording is None:
        return []
    numbers = {
        "timeline_first": launch.recording.first,
        "timeline_blocks": launch.recording.blocks,
        "timeline_warps": launch.warps,
        "timeline_capacity": launch.recording.capacity,
    }
    return [
        *(f"constexpr unsigned {name} = {value};" for name, value in numbers.items()),
        _constant("timeline_detailed", launch.recording.detailed),
        "#include <timeline.cuh>",
        "#define __syncthreads() (timeline::begin_block_wait(), (__syncthreads)(), "
        "timeline::end_block_wait())",
    ]


def _recorded(file: str, entry: str, path: Path) -> str:
    """Inserts recording calls into a kernel's file and appends a table of its struct Shared."""
    code = _bare(file)
    ends = (_closing(code, x.end() - 1) + 1 for x in re.finditer(rf"\b{entry}\s*\(", code))
    bodies = [x.end() for x in (re.compile(r"\s*\{").match(code, end) for end in ends) if x]
    if not bodies:
        raise ValueError(
            f"{path} does not define the body of {entry}, where recording begins and ends; move "
            f"the body of {entry} into this file"
        )
    for at in reversed(bodies):
        file = f"{file[:at]} timeline::Block timeline_block;{file[at:]}"
    values = (
        f"sizeof(Shared::{x}), alignof(decltype(Shared::{x})), "
        f"timeline::Member<decltype(Shared::{x})>::bytes, "
        f"timeline::Member<decltype(Shared::{x})>::full"
        for x in members(file)
    )
    listed = ",\n    ".join(values) or "0"
    return f'{file}\nextern "C" {{\n__device__ int timeline_members[] = {{\n    {listed}}};\n}}'


def members(file: str) -> list[str]:
    """Returns the member names of a file's struct Shared.

    Returns an empty list if a declaration cannot be parsed, because its size determines offsets.
    """
    code = _bare(file)
    heads = [*re.finditer(r"^struct[ \t]+Shared\b(?!\s*;)\s*(\{?)", code, re.MULTILINE)]
    if len(heads) != 1 or not heads[0][1] or not _is_global(code[: heads[0].start()]):
        return []
    body = code[heads[0].end() : code.find("}", heads[0].end())]
    *declarations, rest = body.split(";")
    found = [_declared(x) for x in declarations]
    if rest.strip() or re.search("[{#]", body) or None in found:
        return []
    return [name for names in found for name in names or ()]


def _bare(code: str) -> str:
    return re.sub(includes.NO_CODE, lambda x: " " * len(x[0]), code)


def _is_global(above: str) -> bool:
    """Returns whether the code after ``above`` is at global scope and not a template."""
    is_template = re.search(r"\btemplate\b[^;{}]*$", above)
    return above.count("{") == above.count("}") and not is_template


def _declared(declaration: str) -> list[str] | None:
    if re.match(r"\s*(?:static|using|static_assert)\b", declaration):
        return []
    for brackets in (r"\[[^][]*\]", "<[^<>]*>", _ALIGNED, "=[^,]*"):
        before = None
        while before != declaration:
            before, declaration = declaration, re.sub(brackets, " ", declaration)
    names = re.fullmatch(_DECLARED, declaration.strip())
    return re.findall(r"\w+", names[1]) if names else None


def _closing(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return len(text)
