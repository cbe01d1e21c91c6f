# Everything runs in .venv, which the first target that needs it creates. `make help` lists the targets.

PYTHON ?= python3
# More options for pip, such as another index: make test PIP_ARGS='--extra-index-url URL'
PIP_ARGS ?=
# Test processes; each imports torch, so more of them need more memory.
WORKERS ?= 2

# Hundreds of Pythons are started, which would each compile torch and kprof anew, and every test file
# of each test process.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
READY := .venv/.ready
# Each process takes whole files, whose tests share what they set up, and helps when it has done.
TOGETHER = -n $(WORKERS) --dist worksteal
SOURCES := kprof tests examples benchmarks

.DEFAULT_GOAL := help
.PHONY: help install demo test slow golden docs hostile chromium browser lint check format gpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The stamp is as old as the last complete installation: an interrupted one is taken up again.
# Python compiles what is imported, once; pip would compile all that is installed, which is far more.
# The pip that comes with Python 3.11 takes longer to choose versions than to get one that does not.
# Of axe's package only its script is used, not what it would bring with it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "kprof needs Python 3.10 or later: make PYTHON=python3.12 ..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
		$(PIP_ARGS) -c constraints.txt -e '.[dev,torch]'
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) \
		--no-deps axe-playwright-python==0.1.8
	@touch $@

install: $(READY)  ## create .venv and install kprof with everything for development

demo: $(READY)  ## profile examples/train_tiny.py and say where the report lies
	$(BIN)/kprof run --force --out demo.kprof examples/train_tiny.py
	@echo
	@echo "The report: $(CURDIR)/demo.kprof/report.html"

test: $(READY)  ## run the tests that need no GPU and no minutes
	$(BIN)/python -m pytest -m "not gpu and not hostile and not slow" \
		$(TOGETHER) $(PYTEST_ARGS)

slow: $(READY)  ## run the slow tests and write for which code they passed (SLOW_ARGS=--if-changed)
	$(BIN)/python benchmarks/slow_tests.py --workers $(WORKERS) $(SLOW_ARGS)

golden: $(READY)  ## write the golden outputs anew; the diff shows what changed for users
	$(BIN)/python benchmarks/golden.py

docs: $(READY)  ## write the tables of docs/ that follow from the code
	$(BIN)/python benchmarks/docs_tables.py

hostile: $(READY)  ## run hostile workloads without and with the recorder (4 minutes; one in six: SAMPLE=6)
	$(BIN)/python -m pytest -m hostile tests/collect/recorder/test_hostile.py $(TOGETHER) $(PYTEST_ARGS)

chromium:  ## install headless Chromium where it is missing and can be
	@command -v chromedriver >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null; } \
		|| { echo "NO REPORT IS OPENED: this needs chromium and chromedriver, and cannot install" \
		"them. On Debian, as root: apt-get install chromium chromium-driver"; exit 2; }

browser: $(READY) chromium  ## open the reports in headless Chromium, part of the slow tests
	KPROF_BROWSER=required $(BIN)/python -m pytest -m browser tests/report $(PYTEST_ARGS)

lint: $(READY)  ## format, lint, types and layers
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test  ## format, lint, types, layers, tests: what every commit passes

format: $(READY)  ## let ruff format and fix what it can
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

gpu: $(READY)  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

clean:  ## remove .venv, caches and the demo's report
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo.kprof
