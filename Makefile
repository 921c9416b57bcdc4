# Development targets. Each sets up .venv first, which is quick when nothing changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Small models on few cores: several threads per process are slower than one.
test test-slow chaos: export OMP_NUM_THREADS = 1

# Slow tests that compare no times: two at once. The others need the machine for themselves.
TIMELESS := $(wildcard tests/test_docs.py tests/test_tutorial.py tests/test_site.py tests/test_examples.py tests/test_export.py \
	tests/test_demo.py tests/test_report.py tests/weights tests/evaluation tests/studies tests/models tests/kernels tests/analysis tests/plots \
	tests/training/test_parallel.py tests/training/test_recipes.py tests/training/test_resume.py)

.PHONY: demo test quick test-slow chaos lint style types docs clean

demo: $(READY)
	$(BIN)/vitlab demo

# Types are checked on one core for a minute, beside the tests.
test: style
	$(MAKE) --jobs=2 types quick

quick: $(READY)
	$(BIN)/pytest -m "not slow" -n auto --dist loadfile # a file's runs and servers are made once

test-slow: $(READY)
	$(BIN)/pytest -m slow -n 2 --dist worksteal $(TIMELESS)
	$(BIN)/pytest -m slow $(addprefix --ignore=,$(TIMELESS))

# Faults, fuzzing and load against runs and servers, for an hour at most; writes docs/reliability.md.
chaos: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[chaos]"
	cd tests && ../$(BIN)/python -m chaos

lint: style types

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# The documentation as a site, in site/; any warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info
