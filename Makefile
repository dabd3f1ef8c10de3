# make demo: see it work.  make test: every check.  Both set up their own virtual environment first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test format clean

demo: .venv/ready
	$(BIN)/rfdlc demo

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Set up again whenever what is asked for, or the tested versions, change. The stamp is written last.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,tables,dev]"
	touch .venv/ready

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
