# Each target sets up what it needs in .venv; Python 3.11 and a package registry are required.
# `make install` only does the setup.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
SOURCE ?= bundled
# mypy and import-linter cannot follow the mapping of folders to packages, so they use these links.
LINKS := $(VENV)/links/attune
INSTALLED := $(VENV)/.installed
MAKEFLAGS += --jobs=2

.PHONY: install demo test lint bench chromium browser screenshot clean

install: $(INSTALLED)

# The pip that comes with Python 3.11 takes twice as long to resolve the dependencies, so it is
# upgraded. torch is installed first and by its exact version: a version range would install the
# registry's newest build, with gigabytes of CUDA libraries. --no-compile: modules are compiled when
# they are first imported, since most never are. That needs a Python that may write bytecode.
unexport PYTHONDONTWRITEBYTECODE
$(INSTALLED): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { echo "Attune needs Python 3.11: install it, or name it with 'make PYTHON=/path/to/python3.11 ...'"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --upgrade pip
	$(VENV)/bin/pip install --quiet --no-compile --constraint constraints.txt torch==2.13.0 setuptools
	$(VENV)/bin/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(VENV)/bin/attune doctor
	$(VENV)/bin/attune demo

# Tests of one group (a cluster, a browser) run one after the other in one process. They take longest
# and so start first.
test: install browser
	$(VENV)/bin/python -m pytest --numprocesses auto --dist loadgroup --no-loadscope-reorder

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	mkdir -p $(LINKS)
	ln -sfn $(addprefix $(CURDIR)/,platform models jobs ui infra) $(LINKS)
	MYPYPATH=$(VENV)/links $(VENV)/bin/mypy --package attune
	PYTHONPATH=$(VENV)/links $(VENV)/bin/lint-imports --no-cache

bench: install
	$(VENV)/bin/python -m attune.jobs.bench --source $(SOURCE) $(if $(PARTS),--parts $(PARTS)) $(if $(RUN),--run $(RUN)) $(if $(BASE),--base $(BASE))

# Tests and screenshots of the page use Chromium: the machine's, or one that is installed here. Its
# package is downloaded in parallel with Python's.
BROWSER := { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null
chromium:
	@$(BROWSER) || ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ] || \
	{ apt-get update -qq && apt-get install -qq -y chromium >/dev/null; } || true

browser: install chromium
	@$(BROWSER) || $(VENV)/bin/playwright install chromium || \
	{ echo "The tests of the page need a browser: install chromium with your package manager"; exit 1; }

screenshot: browser
	$(VENV)/bin/python -m attune.jobs.screenshot $(RUNS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
