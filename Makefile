# On a machine with Python alone: `make demo` installs and runs, `make test` also runs the tests.
PYTHON ?= python3
VENV ?= .venv

export PATH := $(abspath $(VENV))/bin:$(PATH)

.PHONY: demo test

demo: $(VENV)/compiler
	cupyfa check fa2 --samples 8
	python examples/attention.py

test: demo $(VENV)/test
	pytest -n auto -q

# The file that a rule makes says that these extras are installed.
$(VENV)/compiler $(VENV)/test: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	pip install --quiet --disable-pip-version-check -e ".[$(@F)]"
	touch $@
