"""What tests of examples share."""

import sys
from importlib import import_module

import pytest


@pytest.fixture(scope="module")
def example(request):
    """The module of a test's EXAMPLE, which finds other examples as if it were run."""
    path = request.module.EXAMPLE
    sys.path.insert(0, str(path.parent))
    try:
        return import_module(path.stem)
    finally:
        sys.path.remove(str(path.parent))
