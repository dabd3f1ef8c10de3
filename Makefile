# make demo: see it work.  make test: every check.  Both set up their own virtual environment first.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# pip would compile 19,000 files in one process, this does it in one per core; a few files of packages are templates.
COMPILE = $(BIN)/python -m compileall -qq -j 0 .venv/lib || true

.PHONY: demo test types tests public-types lock conda gpu-test oldest wheel-test packages audit paper docs browser format clean

demo: .venv/trains
	$(BIN)/rfdlc demo

test: .venv/ready browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory -j2 types tests

types:
	$(BIN)/mypy

# Two processes with a thread each: on two cores that takes half of the time of one process with two threads.
tests:
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs -n 2 --dist loadfile

# What another type checker (pyright) sees of the package from outside: in the programs of the gallery.
public-types: .venv/ready
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet --disable-pip-version-check basedpyright==1.40.2
	build/tools/bin/basedpyright --pythonpath $(BIN)/python

# uv.lock: every package that the extras need, for all platforms and versions of Python; those in constraints.txt as there.
lock:
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet --disable-pip-version-check uv
	build/tools/bin/uv lock $$(grep -v '^#' constraints.txt | sed 's/^/--upgrade-package /')
	build/tools/bin/uv lock --check

# The recipe for conda is parsed and rendered, which needs no channel. `rattler-build build --recipe conda` builds it.
conda:
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet --disable-pip-version-check py-rattler-build
	build/tools/bin/python -c "import rattler_build as r; print(*r.Stage0Recipe.from_file('conda/recipe.yaml').render())"

# Every path of a user on a GPU, a few steps each. Needs an environment whose torch finds one: PYTHON=... make gpu-test
gpu-test:
	OMP_NUM_THREADS=2 PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -v -n 4 -p no:cacheprovider

# The estimators with the oldest scikit-learn that is supported, in an environment of its own.
oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -e ".[train,tables]" pytest \
	    "scikit-learn==1.6.0" "numpy<2" "$$(grep '^torch==' constraints.txt)"
	.venv-oldest/bin/python -m pytest tests/estimators

# The wheel contains the product only: it is small and, installed alone in a new environment, decides a CSV.
wheel-test:
	rm -rf build/wheel && mkdir -p build/wheel
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	test $$(cat build/wheel/rfdlc-*.whl | wc -c) -lt 1000000
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt build/wheel/rfdlc-*.whl
	printf 'cat,dog\n0.9,0.1\n0.3,0.7\n' > build/wheel/scores.csv
	cd build/wheel && venv/bin/rfdlc decide scores.csv --utility one-hot --out actions.csv && cat actions.csv
	test $$(wc -l < build/wheel/actions.csv) -eq 3

# Wheel and sdist as an index would get them, in build/dist, checked by tools of their own environment.
packages:
	rm -rf build/dist && mkdir -p build/dist
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet --disable-pip-version-check build twine check-wheel-contents
	build/tools/bin/python -m build --outdir build/dist .
	build/tools/bin/twine check --strict build/dist/*
	build/tools/bin/check-wheel-contents build/dist/*.whl

# A software bill of materials, licences and known vulnerabilities of the tested versions, by tools in an environment of
# their own; without a network it says that no advisory was read.
audit: .venv/ready
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom pip-licenses pip-audit
	.venv-audit/bin/python benchmarks/audit.py $(BIN)/python

# The study: the page of all tables and every figure, from the committed results.
paper: .venv/ready
	$(BIN)/python -m paper page > docs/evidence.md
	$(BIN)/python -m paper figures docs/figures

# The documentation site in build/site, with the gallery, offline; warnings and links that lead nowhere are errors. What it
# needs is installed by the first call, not by the tests.
docs: .venv/docs
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -q -b html -d build/doctrees docs build/site
	$(BIN)/python docs/links.py build/site
	@echo "Open build/site/index.html"

# The report is tested in a real browser. Where one may be installed (root on Debian) it is; elsewhere, or when that
# fails, those tests are skipped and say how to get one. Never a reason to fail.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	     && echo "Installing Chromium for the tests of the report ..." \
	     && apt-get update -qq >/dev/null 2>&1 \
	     && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver >/dev/null 2>&1; } \
	|| echo "No Chromium: the browser tests of the report are skipped. On Debian: apt-get install chromium chromium-driver"

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Set up again whenever what is asked for, or the tested versions, change. Stamps are written last; the demo needs
# less than the tests, and a machine that only runs it waits less.
.venv/trains: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e ".[train]"
	$(COMPILE)
	touch .venv/trains

.venv/ready: .venv/trains
	$(PIP) -e ".[train,vision,tables,export,serve,log,hub,dev]"
	$(COMPILE)
	touch .venv/ready

.venv/docs: .venv/ready
	$(PIP) -e ".[docs]"
	$(COMPILE)
	touch .venv/docs

clean:
	rm -rf docs/gallery docs/api/generated build .venv .venv-oldest .venv-audit .mypy_cache .pytest_cache .ruff_cache .hypothesis
