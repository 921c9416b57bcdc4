# Development targets. Each sets up .venv first, which is quick when nothing changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Small models on few cores: several threads per process are slower than one. Compiled code is kept, as usual: many tests
# start processes, which would compile the package anew where the environment forbids it.
test test-slow test-long chaos: export OMP_NUM_THREADS = 1
test test-slow test-long chaos: export PYTHONDONTWRITEBYTECODE =

# Slow tests that measure times or load a server need the machine for themselves; of the others three run at once, as two leave a core idle.
ALONE := $(wildcard tests/chaos tests/bench tests/finetuning/test_short_time.py tests/data/test_budget.py \
	tests/data/test_loader_benchmark.py tests/training/test_minutes.py tests/training/test_data_changes.py \
	tests/training/test_small_start.py tests/test_cli.py tests/test_predict.py \
	$(addprefix tests/serving/test_,$(addsuffix .py,batcher bombs crowd front hostile_uploads pool serve siege)))

.PHONY: demo test quick test-slow together test-long chaos lint style types package-types docs clean

demo: $(READY)
	$(BIN)/vitlab demo

# The package's types are checked on one core, beside the tests; those of the tests beside the slow ones.
test: style
	$(MAKE) --jobs=2 package-types quick

quick: $(READY)
	$(BIN)/pytest -m "not slow" -n auto --dist loadfile # a file's runs and servers are made once

test-slow: $(READY)
	$(MAKE) --jobs=2 types together
	$(BIN)/pytest -m "slow and not long" $(ALONE)

together: $(READY)
	$(BIN)/pytest -m "slow and not long" -n 3 --dist worksteal $(addprefix --ignore=,$(ALONE))

# What repeats the claims of other tests at length: before a release.
test-long: $(READY)
	$(BIN)/pytest -m long

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

package-types: $(READY)
	$(BIN)/mypy vitlab

# The documentation as a site, in site/; any warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info
