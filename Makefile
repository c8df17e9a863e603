# `make train` installs everything and trains a model; it needs only Python and make. `make help` lists all targets.

VENV ?= .venv
ACCELERATOR ?= auto
PYTHON ?=
ARGS ?=
WORKDIR ?=
RECIPE ?= configs/number_words.py

# Use a relative path and `python -m` everywhere: the path of the checkout may contain spaces, and may change.
IN_VENV = $(VENV)/bin/python

.PHONY: help setup train test parity peers docs crash soak fuzz mutants flaky audit lint format pins clean
.SUFFIXES:

help:
	@echo 'Targets:'
	@echo 'make train    install the requirements, train a model that translates number words, and report its accuracy'
	@echo 'make test     run lint and the default tests'
	@echo 'make parity   compare every model family with transformers on PyTorch, in a separate environment: $(PARITY_VENV)'
	@echo 'make peers    only create that environment; some benchmarks need it (docs/benchmarks.md)'
	@echo 'make docs     build the documentation site in site/, in a separate environment: $(DOCS_VENV)'
	@echo 'make crash    kill, stop and damage training runs, fill their disk, and check that no progress is lost (docs/reliability.md)'
	@echo 'make soak     train for hours, and check that memory and other resources do not grow (docs/reliability.md)'
	@echo 'make fuzz     load random files, recipes and prompts: each must load or give a clear error (docs/reliability.md)'
	@echo 'make mutants  change single places of the code, and check that a test fails each time (docs/reliability.md)'
	@echo 'make flaky    run the changed and the slowest tests five times in random order on a busy machine (CONTRIBUTING.md)'
	@echo 'make audit    check the installed packages for known vulnerabilities, in a separate environment: $(AUDIT_VENV)'
	@echo 'make setup    only install the requirements into $(VENV); does nothing if they have not changed'
	@echo 'make lint     check the code with Ruff: rules and format'
	@echo 'make format   format the code with Ruff and apply its automatic fixes'
	@echo 'make pins     resolve the version ranges of pyproject.toml again, and write requirements.txt and requirements/'
	@echo 'make clean    remove $(VENV), build outputs and caches; keep all runs'
	@echo
	@echo 'Variables:'
	@echo 'PYTHON=python3.13              Python that creates $(VENV) (3.11 to 3.14)'
	@echo 'ACCELERATOR=auto|cpu|gpu|tpu   hardware to install for (auto: detect it)'
	@echo 'RECIPE=configs/shakespeare.py  recipe for `make train`'
	@echo 'WORKDIR=folder                 output directory of `make train`'
	@echo 'REPOSITORY=address             repository that the site of `make docs` links to'
	@echo 'KILLS=50                       number of kills in `make crash`'
	@echo 'HOURS=2                        duration of `make soak`'
	@echo 'CASES=100000                   number of cases in `make fuzz`'
	@echo 'MUTANTS=200                   number of changes in `make mutants`'
	@echo 'SINCE=HEAD~1                  revision that `make flaky` compares with'
	@echo 'ARGS="--training.steps 100"    additional arguments for train.py, or for pytest in `make test`'

setup:
	@VENV='$(VENV)' ACCELERATOR='$(ACCELERATOR)' PYTHON='$(PYTHON)' scripts/setup

train: setup
	@$(IN_VENV) train.py $(RECIPE) $(if $(WORKDIR),--workdir '$(WORKDIR)') $(ARGS)

test: lint
	@$(IN_VENV) -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

# PyTorch is never installed into $(VENV). PIP_ARGS: additional pip options, such as the index of the CPU build of PyTorch.
# pip installs PyTorch, because only pip reads the configuration that may name this index.
PARITY_VENV ?= .venv-parity
PARITY_PYTHON ?= $(PYTHON)
parity: peers
	@'$(PARITY_VENV)/bin/python' -m pytest -m parity -n auto --maxprocesses 4 --dist worksteal $(ARGS)

peers:
	@$(MAKE) --no-print-directory setup VENV='$(PARITY_VENV)' ACCELERATOR=cpu PYTHON='$(PARITY_PYTHON)'
	@$(MAKE) --no-print-directory '$(PARITY_VENV)/parity' PARITY_VENV='$(PARITY_VENV)'

$(PARITY_VENV)/parity: requirements/parity.txt $(PARITY_VENV)/installed
	@UV= PIP_ARGS='$(PIP_ARGS)' scripts/install '$(PARITY_VENV)/bin/python' -c requirements.txt "$$(grep '^torch==' requirements/parity.txt)"
	@PIP_ARGS='$(PIP_ARGS)' scripts/install '$(PARITY_VENV)/bin/python' -c requirements.txt -r requirements/parity.txt
	@touch '$@'

# Broken links and references are errors. The build needs only the Python of $(VENV), because it imports no code.
DOCS_VENV ?= .venv-docs
REPOSITORY ?=
docs: $(DOCS_VENV)/docs
	@NO_MKDOCS_2_WARNING=1 REPOSITORY='$(REPOSITORY)' '$(DOCS_VENV)/bin/python' -m mkdocs build --strict $(ARGS)

$(DOCS_VENV)/docs: requirements/docs.txt | setup
	@rm -rf '$(DOCS_VENV)'
	@$(IN_VENV) -m venv '$(DOCS_VENV)'
	@PIP_ARGS='$(PIP_ARGS)' scripts/install '$(DOCS_VENV)/bin/python' -r requirements/docs.txt
	@touch '$@'

KILLS ?= 50
crash: setup
	@$(IN_VENV) -m reliability.crash --kills $(KILLS) $(ARGS)

HOURS ?= 2
soak: setup
	@$(IN_VENV) -m reliability.soak --hours $(HOURS) $(ARGS)

CASES ?= 100000
fuzz: setup
	@$(IN_VENV) -m reliability.fuzz --cases $(CASES) $(ARGS)

MUTANTS ?= 200
mutants: setup
	@$(IN_VENV) -m reliability.mutants --count $(MUTANTS) $(ARGS)

SINCE ?= HEAD~1
flaky: setup
	@$(IN_VENV) -m reliability.flaky --since '$(SINCE)' $(ARGS)

# If the vulnerability database can't be reached, the audit prints a message and exits with status 77, which is no failure.
AUDIT_VENV ?= .venv-audit
audit: $(AUDIT_VENV)/audit
	@$(IN_VENV) -m reliability.audit --python '$(AUDIT_VENV)/bin/python' || [ $$? -eq 77 ]

$(AUDIT_VENV)/audit: requirements/audit.txt | setup
	@rm -rf '$(AUDIT_VENV)'
	@$(IN_VENV) -m venv '$(AUDIT_VENV)'
	@PIP_ARGS='$(PIP_ARGS)' scripts/install '$(AUDIT_VENV)/bin/python' -r requirements/audit.txt
	@touch '$@'

lint: setup
	@$(IN_VENV) -m ruff check .
	@$(IN_VENV) -m ruff format --check .

format: setup
	@$(IN_VENV) -m ruff check --fix .
	@$(IN_VENV) -m ruff format .

pins: setup
	@VENV='$(VENV)' scripts/pins

clean:
	rm -rf '$(VENV)' .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +
