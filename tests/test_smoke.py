"""The smoke grid on the GPU: lengths x head dimensions x masks x shared keys, in every dtype."""

import pytest
from problems import DTYPES, FORWARD, SMOKE, inputs_of, name, planned

from cupyfa import tolerance
from cupyfa.backends.guard import run_guarded
from cupyfa.operations import OPERATIONS

GROUPS: dict = {}
for _sizes in SMOKE:
    GROUPS.setdefault((_sizes["M"], _sizes["N"], _sizes["d"]), []).append(_sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_every_rung_on_the_smoke_grid(cuda, group, dtype):
    wrong = []
    for sizes in GROUPS[group]:
        expected = {}
        for kernel in FORWARD.values():
            if dtype not in kernel.dtypes:
                continue
            plan = planned(kernel, cuda, sizes, dtype)
            inputs = inputs_of(plan)
            if kernel.rounding not in expected:
                expected[kernel.rounding] = OPERATIONS["forward"].expected(
                    inputs, plan.problem, kernel.rounding
                )
            results = run_guarded(cuda, plan, inputs, {})
            wrong += [
                f"{kernel.name} on {plan.problem}: {verdict}"
                for verdict in tolerance.compare(results, expected[kernel.rounding])
                if not verdict.passed
            ]
    assert not wrong, "\n".join(wrong)


def test_the_grid_has_180_cases():
    assert len(SMOKE) == 180
    assert len({name(sizes) for sizes in SMOKE}) == 180
