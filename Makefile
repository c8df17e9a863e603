# From a machine with Python and make to a trained model: `make train`. All targets: `make help`.

VENV ?= .venv
ACCELERATOR ?= auto
PYTHON ?=
ARGS ?=
WORKDIR ?=
RECIPE ?= configs/number_words.py

# A relative path and `python -m` everywhere: a checkout may lie in a folder with spaces, or move.
IN_VENV = $(VENV)/bin/python

.PHONY: help setup train test parity peers docs crash soak fuzz audit lint format pins clean
.SUFFIXES:

help:
	@echo 'make train    install what is needed, train the translator of number words, show what it can do'
	@echo 'make test     lint and all default tests'
	@echo 'make parity   every family against transformers on torch, in an environment of its own: $(PARITY_VENV)'
	@echo 'make peers    only that environment: benchmarks compare with what is in it (docs/benchmarks.md)'
	@echo 'make docs     docs/ and the docstrings as a site in site/, in an environment of its own: $(DOCS_VENV)'
	@echo 'make crash    kill, stop, starve and damage training runs: nothing may be lost (docs/reliability.md)'
	@echo 'make soak     train, evaluate and save for hours: nothing may grow (docs/reliability.md)'
	@echo 'make fuzz     files, recipes and prompts that nobody wrote: read or refused, and no more (docs/reliability.md)'
	@echo 'make audit    known vulnerabilities of what is installed, in an environment of its own: $(AUDIT_VENV)'
	@echo 'make setup    only install: $(VENV), again only when the requirements change'
	@echo 'make lint     Ruff: rules and format'
	@echo 'make format   Ruff: mend what it can'
	@echo 'make pins     resolve the ranges of pyproject.toml anew into requirements.txt and requirements/'
	@echo 'make clean    remove $(VENV) and caches; never what a run has written'
	@echo
	@echo 'PYTHON=python3.12              which Python makes $(VENV) (3.11 to 3.13)'
	@echo 'ACCELERATOR=auto|cpu|gpu|tpu   what to install for (auto: what the machine has)'
	@echo 'RECIPE=configs/shakespeare.py  what `make train` trains'
	@echo 'WORKDIR=folder                 where it writes'
	@echo 'REPOSITORY=address             where links into the code lead on the site of `make docs`'
	@echo 'KILLS=50                       how often `make crash` kills a run'
	@echo 'HOURS=2                        how long `make soak` trains'
	@echo 'CASES=100000                   how much `make fuzz` tries'
	@echo 'ARGS="--training.steps 100"    more words for train.py, or for pytest in `make test`'

setup:
	@VENV='$(VENV)' ACCELERATOR='$(ACCELERATOR)' PYTHON='$(PYTHON)' scripts/setup

train: setup
	@$(IN_VENV) train.py $(RECIPE) $(if $(WORKDIR),--workdir '$(WORKDIR)') $(ARGS)

test: lint
	@$(IN_VENV) -m pytest -n auto --maxprocesses 4 $(ARGS)

# torch never enters $(VENV). PIP_ARGS: more words for pip, which may say where the CPU build of torch is.
PARITY_VENV ?= .venv-parity
parity: peers
	@'$(PARITY_VENV)/bin/python' -m pytest -m parity -n auto --maxprocesses 4 $(ARGS)

peers:
	@$(MAKE) --no-print-directory setup VENV='$(PARITY_VENV)' ACCELERATOR=cpu
	@$(MAKE) --no-print-directory '$(PARITY_VENV)/parity' PARITY_VENV='$(PARITY_VENV)'

$(PARITY_VENV)/parity: requirements/parity.txt $(PARITY_VENV)/installed
	@'$(PARITY_VENV)/bin/python' -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -c requirements.txt -r requirements/parity.txt
	@touch '$@'

# Broken links and references are errors. Nothing of $(VENV) is needed but its Python: no code is imported.
DOCS_VENV ?= .venv-docs
REPOSITORY ?=
docs: $(DOCS_VENV)/docs
	@NO_MKDOCS_2_WARNING=1 REPOSITORY='$(REPOSITORY)' '$(DOCS_VENV)/bin/python' -m mkdocs build --strict $(ARGS)

$(DOCS_VENV)/docs: requirements/docs.txt | setup
	@rm -rf '$(DOCS_VENV)'
	@$(IN_VENV) -m venv '$(DOCS_VENV)'
	@'$(DOCS_VENV)/bin/python' -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -r requirements/docs.txt
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

# Where the database can't be reached the audit says so, and that is no fault: exit status 77.
AUDIT_VENV ?= .venv-audit
audit: $(AUDIT_VENV)/audit
	@$(IN_VENV) -m reliability.audit --python '$(AUDIT_VENV)/bin/python' || [ $$? -eq 77 ]

$(AUDIT_VENV)/audit: requirements/audit.txt | setup
	@rm -rf '$(AUDIT_VENV)'
	@$(IN_VENV) -m venv '$(AUDIT_VENV)'
	@'$(AUDIT_VENV)/bin/python' -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -r requirements/audit.txt
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
