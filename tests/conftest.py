"""Fixtures: every test of a kernel runs on every backend; those of the GPU skip without one."""

import pytest

from cupyfa import DeviceError
from cupyfa.backends.select import backend_named


@pytest.fixture(scope="session")
def cuda():
    """The CUDA backend; skips with the reason where there is no device."""
    try:
        return backend_named("cuda")
    except DeviceError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session", params=["simulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """Each backend in turn."""
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    return backend_named(request.param)
