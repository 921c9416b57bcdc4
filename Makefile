# Everything a fresh clone needs: `make demo` and `make test` set up .venv themselves and are quick when nothing changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Small models on few cores: threads that wait for each other cost more than they bring.
test test-slow chaos: export OMP_NUM_THREADS = 1

.PHONY: demo test test-slow chaos lint docs clean

demo: $(READY)
	$(BIN)/vitlab demo

test: lint
	$(BIN)/pytest -m "not slow" -n auto --maxprocesses 4 --dist worksteal

test-slow: $(READY)
	$(BIN)/pytest -m slow

# Everything that should not break a run or a server, for an hour at most; writes docs/reliability.md.
chaos: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[chaos]"
	cd tests && ../$(BIN)/python -m chaos

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
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
