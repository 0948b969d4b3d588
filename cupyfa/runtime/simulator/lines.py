"""Looks up source lines of addresses in the debug information of a shared object.

Uses addr2line (binutils) if it is installed, else pyelftools from the extra ``compiler``.
"""

from __future__ import annotations

import importlib.util
import posixpath
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REMEDY = "source lines need addr2line; install binutils, or pip install pyelftools"


def can_read() -> bool:
    """Returns whether addr2line or pyelftools is installed."""
    return bool(shutil.which("addr2line") or importlib.util.find_spec("elftools"))


def frames(path: Path, addresses: Sequence[int]) -> list[str]:
    """Returns the ``file:line`` of each address, and of the inlined calls around the address."""
    if tool := shutil.which("addr2line"):
        command = [tool, "-i", "-e", str(path), *map(hex, addresses)]
        done = subprocess.run(command, capture_output=True, check=False)
        told = re.sub(r" \(.*\)$", "", done.stdout.decode(errors="replace"), flags=re.MULTILINE)
        return [
            x for x in told.splitlines() if not x.startswith("?") and x[-2:] not in (":0", ":?")
        ]
    if not can_read():
        return []
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        debug = ELFFile(file).get_dwarf_info()
        return [frame for address in addresses for frame in _frames(debug, address)]


def _frames(debug: Any, address: int) -> list[str]:
    for unit in debug.iter_CUs():
        state = _row(debug, unit, address)
        if state is None:
            continue
        names = _file_names(debug, unit)
        inlined = [
            (call["DW_AT_call_file"].value, call["DW_AT_call_line"].value)
            for call in (die.attributes for die in unit.iter_DIEs() if die.tag == _INLINED)
            if _contains(debug, unit, call, address)
        ]
        # Debug information lists the outermost of nested calls first.
        return [
            f"{names[file]}:{line}" for file, line in [(state.file, state.line), *inlined[::-1]]
        ]
    return []


_INLINED = "DW_TAG_inlined_subroutine"


def _row(debug: Any, unit: Any, address: int) -> Any:
    """Returns the row of a unit's line table that contains an address, or None."""
    before = None
    for entry in debug.line_program_for_CU(unit).get_entries():
        row = entry.state
        if row is None:
            continue
        if before is not None and before.address <= address < row.address:
            return before
        before = None if row.end_sequence else row
    return None


def _contains(debug: Any, unit: Any, attributes: Any, address: int) -> bool:
    """Returns whether the debug entry with these attributes contains an address."""
    if "DW_AT_ranges" in attributes:
        offset = attributes["DW_AT_ranges"].value
        ranges = debug.range_lists().get_range_list_at_offset(offset, unit)
        base = unit.get_top_DIE().attributes["DW_AT_low_pc"].value
        return any(x.begin_offset <= address - base < x.end_offset for x in ranges)
    if "DW_AT_low_pc" not in attributes:
        return False
    low, high = attributes["DW_AT_low_pc"].value, attributes["DW_AT_high_pc"]
    return low <= address < (high.value if high.form == "DW_FORM_addr" else low + high.value)


def _file_names(debug: Any, unit: Any) -> dict[int, str]:
    header = debug.line_program_for_CU(unit).header
    home = unit.get_top_DIE().attributes["DW_AT_comp_dir"].value
    folders = [home, *header["include_directory"]]
    return {
        number: posixpath.join(*(x.decode() for x in (home, folders[file.dir_index], file.name)))
        for number, file in enumerate(header["file_entry"], 1)
    }
