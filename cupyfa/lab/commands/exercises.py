"""``cupyfa exercise``."""

import json
import locale
import re
import sys
from pathlib import Path
from typing import Any

import click

from cupyfa import cache_folder
from cupyfa.lab.commands import UNSUPPORTED, WRONG, command_options
from cupyfa.lab.exercises.exercise import Exercise, exercise_named, exercises
from cupyfa.lab.exercises.judge import Verdict, judge
from cupyfa.lab.report.tables import render, table_of
from cupyfa.planner.source import ROOT

PROGRESS = Path("exercises.json")  # in the folder where the learner runs the command
WORDS = {
    "right": {
        "en": "Right: all {0} examples. Read on: {1}.",
        "zh": "正确：{0} 个例子全部通过。延伸阅读：{1}。",
    },
    "comma": {"en": ", ", "zh": "、"},
    "next": {"en": "Next: cupyfa exercise start {0}", "zh": "下一题：cupyfa exercise start {0}"},
    "last": {"en": "This was the last exercise.", "zh": "这是最后一道练习。"},
    "wrong": {
        "en": "Wrong: {0} of {1} examples are right.",
        "zh": "不对：{1} 个例子中对了 {0} 个。",
    },
    "uncompiled": {"en": "It does not compile: {0}", "zh": "无法编译：{0}"},
    "outside": {
        "en": "The fault is not in {0} but in cupyfa or its installation: {1}",
        "zh": "错误不在 {0}，而在 cupyfa 或它的安装环境：{1}",
    },
    "cause": {"en": "Cause: {0}", "zh": "原因：{0}"},
    "possible": {"en": "Possible cause: {0}", "zh": "可能的原因：{0}"},
    "hint": {"en": "A hint: cupyfa exercise hint {0}", "zh": "提示：cupyfa exercise hint {0}"},
    "written": {
        "en": "Read {0}/task.md, complete {0}/{1}, then run: cupyfa exercise check {0}",
        "zh": "阅读 {0}/task.md，补全 {0}/{1}，然后运行：cupyfa exercise check {0}",
    },
    "untouched": {
        "en": "{0} is unchanged; complete the file as {1}/task.md describes.",
        "zh": "{0} 还没有改动；请按 {1}/task.md 补全。",
    },
    "states": {"en": "open begun solved", "zh": "未开始 进行中 已完成"},
}
# Symptoms of files that do not compile.
_UNCOMPILED = re.compile(
    r"example '.*?': (?:it does not compile: |(?=(?:Syntax|Indentation|Tab)Error: ))(.*)", re.S
)
# Failures of cupyfa, unless the message names the learner's file.
_OF_CUPYFA = re.compile(
    r"it does not compile: .*\berror:(?! undefined)|No module named 'cupyfa|CompilerNotFound: ",
    re.S,
)
# Lines that name the including file, wherever the error is.
_INCLUDED = re.compile(r"(?:In file included |^ +)from .*$", re.M)


def _usual_language() -> str:
    return "zh" if (locale.getlocale()[0] or "").lower().startswith(("zh", "chinese")) else "en"


language_option = click.option(
    "--language",
    type=click.Choice(["en", "zh"]),
    default=_usual_language,
    show_default="that of the locale",
    help="Language of statements, hints and causes.",
)
name_argument = click.argument("name", metavar="NAME")


@click.group()
def exercise() -> None:
    """Learn by completing kernels, without a GPU.

    Each exercise is a file with a hole and a statement. `check` runs it in the simulator and names
    the cause of many mistakes. Files and progress are kept in the current folder.
    """


@exercise.command("list")
@language_option
@command_options.format_option
def list_exercises(language: str, form: str) -> None:
    """List the exercises and your progress."""
    progress = _read_progress()
    states = WORDS["states"][language].split()
    rows = [
        {
            "exercise": x.name,
            "group": x.group[language],
            "task": x.title[language],
            "state": states[(x.name in progress) + bool(progress.get(x.name, {}).get("solved"))],
        }
        for x in exercises().values()
    ]
    click.echo(table_of(rows, share=False) if form == "table" else render(rows, form))


@exercise.command()
@name_argument
@language_option
def start(name: str, language: str) -> None:
    """Write the files of exercise NAME to a folder of the same name.

    Existing files are not overwritten.
    """
    chosen = exercise_named(name)
    folder = Path(name)
    if folder.exists():
        raise ValueError(f"the folder {name} already exists; delete the folder to start over")
    folder.mkdir()
    (folder / "task.md").write_text(chosen.statement(language), encoding="utf-8")
    (folder / chosen.file).write_text(chosen.to_complete(), encoding="utf-8")
    _note_progress(name)
    click.echo(chosen.statement(language))
    click.echo(_say("written", language, name, chosen.file))


@exercise.command("check")
@name_argument
@language_option
def check_solution(name: str, language: str) -> None:
    """Run your solution of an exercise, and explain its mistakes.

    The exit code is 1 if the solution is wrong.
    """
    chosen = exercise_named(name)
    file = Path(name, chosen.file)
    if not file.exists() and Path(chosen.file).exists():
        raise ValueError(f"{chosen.file} is in this folder; run the command in the folder above")
    if not file.exists():
        raise ValueError(f"{file} is missing; create the file with: cupyfa exercise start {name}")
    text = file.read_text(encoding="utf-8")
    if text == chosen.to_complete():
        raise ValueError(_say("untouched", language, file, name))
    verdict = judge(chosen, text)
    if _fails_outside(chosen.file, verdict.symptom):
        click.echo(_say("outside", language, file, verdict.symptom), err=True)
        sys.exit(UNSUPPORTED)
    tries = _read_progress().get(name, {}).get("tries", 0)
    _note_progress(name, tries=tries + 1, **({"solved": True} if verdict.is_right else {}))
    if verdict.is_right:
        _praise(chosen, verdict, language)
    else:
        _explain(chosen, verdict, language)
        sys.exit(WRONG)


def _fails_outside(file: str, symptom: str) -> bool:
    """Returns whether cupyfa's files or installation, not the solution, caused a failure."""
    from cupyfa.runtime.simulator.machine import ENTRY

    said = _INCLUDED.sub("", symptom)
    return file not in said and ENTRY not in said and bool(_OF_CUPYFA.search(said))


def _praise(chosen: Exercise, verdict: Verdict, language: str) -> None:
    pages = [_page_in(language, page) for page in chosen.pages]
    click.echo(_say("right", language, verdict.right, WORDS["comma"][language].join(pages)))
    names = [*exercises()]
    following = names[names.index(chosen.name) + 1 :]
    click.echo(_say("next", language, following[0]) if following else WORDS["last"][language])


def _page_in(language: str, page: str) -> str:
    """Returns the translation of a documentation page, or the page itself if there is none."""
    translated = page.replace("docs/", f"docs/{language}/", 1)
    return translated if (ROOT / translated).is_file() else page


def _explain(chosen: Exercise, verdict: Verdict, language: str) -> None:
    if uncompiled := _UNCOMPILED.match(verdict.symptom):
        click.echo(_say("uncompiled", language, uncompiled[1].rstrip()))
    else:
        click.echo(_say("wrong", language, verdict.right, verdict.examples))
        click.echo(f"  {verdict.symptom}")
    if verdict.mistake:
        word = "cause" if verdict.is_sure else "possible"
        click.echo(_say(word, language, verdict.mistake.cause[language]))
    click.echo(_say("hint", language, chosen.name))


@exercise.command()
@name_argument
@language_option
def hint(name: str, language: str) -> None:
    """Print the next of three hints."""
    hints = exercise_named(name).hints[language]
    seen = min(_read_progress().get(name, {}).get("hints", 0) + 1, len(hints))
    _note_progress(name, hints=seen)
    for number, text in enumerate(hints[:seen], 1):
        click.echo(f"{number}/{len(hints)}  {text}")


@exercise.command()
@name_argument
def solution(name: str) -> None:
    """Print a solution."""
    click.echo(exercise_named(name).solution(), nl=False)


def _say(what: str, language: str, *values: object) -> str:
    return WORDS[what][language].format(*values)


def _read_progress() -> dict[str, dict[str, Any]]:
    """Reads the learner's progress; a damaged file counts as no progress."""
    try:
        found = json.loads(PROGRESS.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: x for name, x in found.items() if isinstance(x, dict)}


def _note_progress(name: str, **changes: Any) -> None:
    progress = _read_progress()
    progress[name] = {**progress.get(name, {}), **changes}
    content = json.dumps(progress, indent=1) + "\n"
    cache_folder.write_whole(PROGRESS, content.encode())
