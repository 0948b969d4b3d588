"""Fixtures for tests of the examples."""

import sys
from importlib import import_module

import pytest


@pytest.fixture(scope="module")
def example(request):
    """Imports the module of a test's EXAMPLE with its folder in sys.path."""
    path = request.module.EXAMPLE
    sys.path.insert(0, str(path.parent))
    try:
        return import_module(path.stem)
    finally:
        sys.path.remove(str(path.parent))
