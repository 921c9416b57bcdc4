# Everything a fresh clone needs: `make demo` and `make test` set up .venv themselves and are quick when nothing changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Small models on few cores: threads that wait for each other cost more than they bring.
test test-slow: export OMP_NUM_THREADS = 1

.PHONY: demo test test-slow lint clean

demo: $(READY)
	$(BIN)/vitlab demo

test: lint
	$(BIN)/pytest -m "not slow"

test-slow: $(READY)
	$(BIN)/pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
