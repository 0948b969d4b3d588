"""``cupyfa new``."""

import keyword
import re
from importlib.util import find_spec
from pathlib import Path

import click

from cupyfa.lab.commands import command_options
from cupyfa.lab.report.tables import render
from cupyfa.ladder.kernel import Kernel, Launch
from cupyfa.ladder.lookup import kernels, record_named
from cupyfa.planner.evaluate import source_path
from cupyfa.planner.source import KERNELS

TEMPLATES = Path(__file__).with_name("templates")


@click.command()
@click.argument("name")
@click.option(
    "--operation",
    type=click.Choice(["forward", "backward"]),
    help="What the kernel computes.  [default: forward, or what RUNG computes]",
)
@click.option(
    "--from",
    "rung",
    metavar="RUNG",
    type=command_options.KernelName(()),
    help="Copy this rung, a name from `cupyfa list`.",
)
@command_options.format_option
def new(name: str, operation: str | None, rung: str | None, form: str) -> None:
    """Write a kernel to start from, its record and its test.

    The files are NAME.cu, NAME.py and test_NAME.py in the current folder. The kernel is correct but
    simple: one thread per row. NAME.py defines the record NAME and its reference; test_NAME.py
    checks the kernel with pytest. With --from the kernel is a copy of a rung. Existing files are
    never overwritten.
    """
    _require_name(name)
    if rung:
        texts = _copied(name, rung, operation)
    else:
        template = operation or "forward"
        texts = {f"{name}.{x}": _filled(f"{template}.{x}", name) for x in ("cu", "py")}
    tests = f"test_{name}.py"
    texts[tests] = _filled("test.py", name)
    if there := [file for file in texts if Path(file).exists()]:
        raise ValueError(
            f"{', '.join(there)} already exist{'s' * (len(there) == 1)}, so nothing was written; "
            "choose another NAME or another folder"
        )
    for file, text in texts.items():
        with open(file, "x", encoding="utf-8") as opened:
            opened.write(text)
    content = {f"{name}.py": "record", tests: "tests"}
    rows = [{"file": file, "content": content.get(file, "kernel")} for file in texts]
    click.echo(render(rows, form))
    if form == "table":
        script = f"{name}.py:{name}"
        click.echo(f"\ncupyfa run {script}\ncupyfa check {script}\npytest {tests}")


def _copied(name: str, rung: str, operation: str | None) -> dict[str, str]:
    """Returns the text of each new file: a rung's sources and a record derived from the rung's."""
    if ".py" in rung:
        raise ValueError(
            f"{rung!r} is not a rung, and --from copies only rungs; copy the files by hand"
        )
    kernel = record_named(rung)
    if operation not in (None, kernel.operation):
        raise ValueError(
            f"{rung} computes {kernel.operation}, not {operation}; omit the operation or --from"
        )
    paths = _own_paths(kernel)
    files = {
        entry: f"{name}.cu"
        if len(paths) == 1 or entry == rung
        else f"{name}_{entry.removeprefix(f'{rung}_')}.cu"
        for entry in paths
    }
    lines = "".join(f'    "{entry}": "{file}",\n' for entry, file in files.items())
    record = _filled("copied.py", name, rung).replace(f'    "{rung}": "{name}.cu",\n', lines)
    texts = {files[x]: (KERNELS / path).read_text(encoding="utf-8") for x, path in paths.items()}
    return {**texts, f"{name}.py": record}


def _own_paths(kernel: Kernel) -> dict[str, Path]:
    """Maps entry points to the files that no other rung uses, or to all files if there are none."""
    others = {path for other in kernels() if other is not kernel for path in _paths(other).values()}
    paths = _paths(kernel)
    return {entry: path for entry, path in paths.items() if path not in others} or paths


def _paths(kernel: Kernel) -> dict[str, Path]:
    return {x.entry: source_path(kernel, x) for x in kernel.launches if isinstance(x, Launch)}


def _filled(template: str, name: str, rung: str = "") -> str:
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    return text.replace("RUNG", rung).replace("NAME", name)


def _require_name(name: str) -> None:
    """Raises ValueError if the name cannot be used for the kernel and its files."""
    hint = f"; choose another name, for example my_{name}"
    if not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", name):
        raise ValueError(
            f"NAME {name!r} is not a valid identifier in Python and C; use letters, digits and _, "
            "beginning with a letter, for example my_kernel"
        )
    if name in [kernel.name for kernel in kernels()]:
        raise ValueError(
            f"NAME {name!r} is the name of a rung{hint}; to copy that rung, use --from {name}"
        )
    if keyword.iskeyword(name) or name in _taken():
        raise ValueError(f"NAME {name!r} is already used in Python or in {name}.py{hint}")
    found = find_spec(name)
    if found and found.origin and not Path(f"{name}.py").exists():
        raise ValueError(f"NAME {name!r} is the name of a module, which {name}.py would hide{hint}")


def _taken() -> set[str]:
    """Returns the global names that the Python templates use."""
    scripts = (compile(x.read_text(encoding="utf-8"), x, "exec") for x in TEMPLATES.glob("*.py"))
    return {name for script in scripts for name in script.co_names}
