"""Judges a solution of an exercise and, if it is wrong, identifies the mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from cupyfa.lab.exercises.attempt import Outcome, run_solutions, without_numbers
from cupyfa.lab.exercises.exercise import Example, Exercise, Mistake

_ALIKE = 1e-4  # tolerance, since results of the same mistake differ only by rounding
# What a wrong NaN may come from if no known mistake has the same results.
NAN = Mistake(
    (),
    {
        "en": "The result has NaN: look for -infinity minus -infinity, 0 / 0, an exponential that "
        "overflows, or an element that is never written.",
        "zh": "结果里有 NaN：检查是否有负无穷减负无穷、0 / 0、溢出的指数，或从未写入的元素。",
    },
)
_SIMILAR = 0.6  # minimum similarity between the faulty lines of solutions with the same mistake
# A known mistake, its outcomes, and whether each equals the outcome of a learner's solution.
_Candidate = tuple[Mistake, Sequence[Outcome], list[bool]]


@dataclass(frozen=True)
class Verdict:
    """The judge's findings.

    ``right`` is the number of examples with right results, out of ``examples``. ``symptom``
    describes, in English, the first example with wrong results. ``mistake`` is the known mistake
    that produces the same results, if any. Unless ``is_sure`` it does so only where the solution is
    wrong, and not in other examples, so that it may be another mistake.
    """

    right: int
    examples: int
    symptom: str = ""
    mistake: Mistake | None = None
    is_sure: bool = True

    @property
    def is_right(self) -> bool:
        """Whether the results of all examples are right."""
        return self.right == self.examples


def judge(exercise: Exercise, text: str) -> Verdict:
    """Runs a solution on all examples and, if it is wrong, looks for a known mistake.

    A right kernel runs again with another order of threads, since some races need it.
    """
    examples = exercise.examples()
    schedules = (None, 0) if exercise.is_kernel else (None,)
    for schedule in schedules:
        (outcomes,) = run_solutions(exercise, [text], schedule)
        symptoms = [_symptom(x, example) for x, example in zip(outcomes, examples)]
        if any(symptoms):
            break
    right = symptoms.count("")
    if right == len(examples):
        return Verdict(right, right)
    first = next(number for number, symptom in enumerate(symptoms) if symptom)
    symptom = f"example '{examples[first].name}': {symptoms[first]}"
    of_mistakes = run_mistakes(exercise)
    mistake = find_mistake(exercise, outcomes, of_mistakes)
    if mistake is not None:
        known = of_mistakes[exercise.mistakes.index(mistake)]
        is_sure = all(map(_is_alike, known, outcomes))
        return Verdict(right, len(examples), symptom, mistake, is_sure)
    is_nan = _is_nan(outcomes[first], examples[first])
    return Verdict(right, len(examples), symptom, NAN if is_nan else None)


def _is_nan(outcome: Outcome, example: Example) -> bool:
    """Whether an outcome has NaN where none is expected."""
    return any(
        np.isnan(array).any() and not np.isnan(example.expected[name]).any()
        for name, array in outcome.arrays.items()
    )


def run_mistakes(exercise: Exercise) -> list[list[Outcome]]:
    """Runs the wrong solution of each known mistake and returns their outcomes."""
    return run_solutions(exercise, [exercise.wrong_solution(x) for x in exercise.mistakes])


def find_mistake(
    exercise: Exercise, outcomes: Sequence[Outcome], of_mistakes: Sequence[Sequence[Outcome]]
) -> Mistake | None:
    """Returns the known mistake with the same outcomes as a wrong solution, or None.

    If no mistake has the same outcomes in all examples, mistakes with the same outcomes in all
    examples that the solution gets wrong count: the solution may guard against the mistake in other
    examples.

    Several mistakes, such as missing barriers, may cause the same message. The lines to which the
    messages refer then decide: returns the mistake with the most similar lines, or None if no
    mistake's lines are similar.
    """
    candidates = [
        (mistake, known, [*map(_is_alike, known, outcomes)])
        for mistake, known in zip(exercise.mistakes, of_mistakes)
        if len(known) == len(outcomes)
    ]
    alike = [x for x in candidates if all(x[2])] or _alike_where_wrong(
        candidates, [bool(_symptom(*x)) for x in zip(outcomes, exercise.examples())]
    )
    if len(alike) < 2:
        return alike[0][0] if alike else None
    mistake, known, _ = max(alike, key=lambda x: _similarity(x[1], outcomes))
    return mistake if _similarity(known, outcomes) > _SIMILAR else None


def _alike_where_wrong(
    candidates: Sequence[_Candidate], is_wrong: Sequence[bool]
) -> list[_Candidate]:
    """Returns the candidates that equal the attempt where it fails, and most often elsewhere."""
    found = [x for x in candidates if any(is_wrong) and all(np.greater_equal(x[2], is_wrong))]
    most = max((sum(x[2]) for x in found), default=0)
    return [x for x in found if sum(x[2]) == most]


def _similarity(known: Sequence[Outcome], outcomes: Sequence[Outcome]) -> float:
    """Returns the similarity, from 0 to 1, of the lines at which two solutions failed."""
    first, second = ("\n".join(line for x in y for line in x.lines) for y in (known, outcomes))
    if not first or not second:
        return 0.0
    return SequenceMatcher(None, first, second, autojunk=False).ratio()


def _is_alike(known: Outcome, outcome: Outcome) -> bool:
    if outcome.is_too_slow:  # not evidence of a mistake: the machine may be slow
        return False
    if known.failure or outcome.failure:
        return without_numbers(known.failure) == without_numbers(outcome.failure)
    return all(
        known.arrays[name].shape == array.shape
        and np.allclose(known.arrays[name], array, rtol=_ALIKE, atol=_ALIKE, equal_nan=True)
        for name, array in outcome.arrays.items()
    )


def _symptom(outcome: Outcome, example: Example) -> str:
    """Describes what is wrong with an outcome; returns "" if the outcome is right."""
    if outcome.failure:
        return f"{outcome.failure}{f' ({outcome.place})' if outcome.place else ''}"
    symptoms = (
        _difference(name, outcome.arrays[name], np.asarray(expected), example.tolerance)
        for name, expected in example.expected.items()
    )
    return next(filter(None, symptoms), "")


def _difference(name: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> str:
    """Describes an array's first wrong element and its wrong rows; returns "" if all are right."""
    if found.shape != expected.shape:
        return f"{name} has shape {found.shape}, not {expected.shape}"
    finite = expected[np.isfinite(expected)]
    largest = float(np.max(np.abs(finite), initial=0.0))
    with np.errstate(invalid="ignore"):
        is_right = (found == expected) | (np.abs(found - expected) <= tolerance * max(largest, 1.0))
    is_right |= np.isnan(found) & np.isnan(expected)
    if is_right.all():
        return ""
    wrong = np.argwhere(~is_right)
    index = tuple(map(int, wrong[0]))
    place = f"{name}[{', '.join(map(str, index))}]" if index else name
    said = f"{place} is {_told_apart(found[index], expected[index])}"
    if found.ndim == 0:
        return said
    return f"{said}; {len(wrong)} of {found.size} elements are wrong{_where(wrong, found)}"


def _told_apart(found: float, expected: float) -> str:
    """Writes two different numbers with as many digits as it takes to see the difference."""
    for digits in (6, 9):
        if f"{found:.{digits}g}" != f"{expected:.{digits}g}":
            break
    return f"{found:.{digits}g}, not {expected:.{digits}g}"


def _where(wrong: np.ndarray, found: np.ndarray) -> str:
    """Describes which rows contain wrong elements, unless all elements are wrong."""
    if len(wrong) == found.size:
        return ""
    axis = max(found.ndim - 2, 0)
    rows = np.unique(wrong[:, axis])
    if len(rows) == found.shape[axis]:
        return ""
    if len(rows) > 1 and len(rows) == rows[-1] - rows[0] + 1:
        return f", all in rows {rows[0]} to {rows[-1]}"
    return f", in {len(rows)} of {found.shape[axis]} rows, the first is row {rows[0]}"
