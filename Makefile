# From a machine with Python and make to a trained model: `make train`. All targets: `make help`.

VENV ?= .venv
ACCELERATOR ?= auto
PYTHON ?=
ARGS ?=
WORKDIR ?=
RECIPE ?= configs/number_words.py

# A relative path and `python -m` everywhere: a checkout may lie in a folder with spaces, or move.
IN_VENV = $(VENV)/bin/python
PIP_INSTALL = $(IN_VENV) -m pip install --disable-pip-version-check --quiet

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
	@echo 'make pins     resolve the ranges of pyproject.toml anew into requirements*.txt'
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

# One line that says what the environment must be; $(VENV)/installed holds the line of what it is. The file is removed
# before an installation and written after it, so that an interrupted one is done again.
setup:
	@set -eu; \
	case '$(ACCELERATOR)' in \
	  auto|cpu|gpu|tpu) ;; \
	  *) echo "error: ACCELERATOR must be auto, cpu, gpu or tpu, got '$(ACCELERATOR)'." >&2; exit 2 ;; \
	esac; \
	suitable='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; \
	python='$(PYTHON)'; \
	if [ -n "$$python" ]; then \
	  "$$python" -c "$$suitable" 2>/dev/null || { \
	    echo "error: PYTHON=$$python is not a Python 3.11, 3.12 or 3.13 that runs: $$("$$python" --version 2>&1 | head -n 1)" >&2; \
	    exit 2; }; \
	elif [ -x '$(IN_VENV)' ] && '$(IN_VENV)' -c "$$suitable" 2>/dev/null; then \
	  python='$(IN_VENV)'; \
	else \
	  for name in python3 python3.13 python3.12 python3.11 python \
	      "$$HOME"/.pyenv/versions/3.13.*/bin/python "$$HOME"/.pyenv/versions/3.12.*/bin/python \
	      "$$HOME"/.pyenv/versions/3.11.*/bin/python; do \
	    if "$$name" -c "$$suitable" 2>/dev/null; then python=$$name; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo 'error: no Python 3.11, 3.12 or 3.13 found. Install one, or name it: make PYTHON=/path/to/python3.12' >&2; \
	    exit 1; \
	  fi; \
	fi; \
	accelerator='$(ACCELERATOR)'; \
	[ "$$accelerator" != auto ] || accelerator=$$("$$python" -I transformer/cli/devices.py --present); \
	case $$accelerator in cpu) file=requirements.txt ;; *) file=requirements-$$accelerator.txt ;; esac; \
	kind="python $$("$$python" -c 'import sys; print(sys.version.split()[0])'), $$accelerator"; \
	wanted="$$kind, requirements $$(cat requirements.txt "$$file" | cksum)"; \
	[ "$$(cat '$(VENV)/installed' 2>/dev/null)" != "$$wanted" ] || exit 0; \
	if [ "$$(cat '$(VENV)/kind' 2>/dev/null)" != "$$kind" ] || ! '$(IN_VENV)' -c '' 2>/dev/null; then \
	  base=$$("$$python" -c 'import os, sys; print(os.path.realpath(sys.executable))'); \
	  "$$base" -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "error: $$base cannot make environments: its modules venv and ensurepip are missing." \
	      "On Debian and Ubuntu: sudo apt install python3-venv (or the python3.X-venv of that Python)." >&2; \
	    exit 1; }; \
	  if [ -e '$(VENV)/kind' ]; then rm -rf '$(VENV)'; fi; \
	  if [ -e '$(VENV)' ]; then \
	    echo "error: $(VENV) was not made by this Makefile, which would have to empty it." \
	      "Remove it, or name another place: make VENV=.venv-zoo" >&2; \
	    exit 1; \
	  fi; \
	  echo "making $(VENV) ($$kind)"; \
	  mkdir -p '$(VENV)'; echo unfinished > '$(VENV)/kind'; \
	  "$$base" -m venv '$(VENV)'; \
	  echo "$$kind" > '$(VENV)/kind'; \
	fi; \
	rm -f '$(VENV)/installed'; \
	echo "installing $$file into $(VENV): some minutes the first time"; \
	$(PIP_INSTALL) -r "$$file"; \
	$(IN_VENV) -m transformer.cli.devices || :; \
	echo "$$wanted" > '$(VENV)/installed'

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

$(PARITY_VENV)/parity: requirements-parity.txt $(PARITY_VENV)/installed
	@'$(PARITY_VENV)/bin/python' -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -c requirements.txt -r requirements-parity.txt
	@touch '$@'

# Broken links and references are errors. Nothing of $(VENV) is needed but its Python: no code is imported.
DOCS_VENV ?= .venv-docs
REPOSITORY ?=
docs: $(DOCS_VENV)/docs
	@NO_MKDOCS_2_WARNING=1 REPOSITORY='$(REPOSITORY)' '$(DOCS_VENV)/bin/python' -m mkdocs build --strict $(ARGS)

$(DOCS_VENV)/docs: requirements-docs.txt | setup
	@rm -rf '$(DOCS_VENV)'
	@$(IN_VENV) -m venv '$(DOCS_VENV)'
	@'$(DOCS_VENV)/bin/python' -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -r requirements-docs.txt
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

$(AUDIT_VENV)/audit: requirements-audit.txt | setup
	@rm -rf '$(AUDIT_VENV)'
	@$(IN_VENV) -m venv '$(AUDIT_VENV)'
	@'$(AUDIT_VENV)/bin/python' -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -r requirements-audit.txt
	@touch '$@'

lint: setup
	@$(IN_VENV) -m ruff check .
	@$(IN_VENV) -m ruff format --check .

format: setup
	@$(IN_VENV) -m ruff check --fix .
	@$(IN_VENV) -m ruff format .

# The newest of everything that works on the oldest Python, then what an accelerator adds to that on Linux, and what is
# newer for Python 3.12 and later: into a file of its own, as uv keeps the versions that it finds where it writes.
COMPILE = $(IN_VENV) -m uv pip compile --quiet --no-annotate --no-header --python-version
LINUX = --python-platform x86_64-manylinux_2_31
pins: setup
	@$(PIP_INSTALL) uv
	@set -eu; \
	trap 'rm -f .pins-*.tmp' EXIT; \
	echo 'scipy<1.18' > .pins-limits.tmp; echo 'contourpy<1.4' >> .pins-limits.tmp; \
	$(COMPILE) 3.11 --universal --fork-strategy fewest pyproject.toml --extra test -c .pins-limits.tmp \
	  --no-emit-package httpx2-jsfetch -o .pins-all.tmp > /dev/null; \
	sed 's/ ;.*//' .pins-all.tmp > .pins-base.tmp; \
	jax=$$(sed -n 's/^jax==\([0-9.]*\).*/\1/p' .pins-all.tmp); \
	for accelerator in tpu gpu; do \
	  case $$accelerator in tpu) extra=tpu ;; gpu) extra=cuda12 ;; esac; \
	  echo "jax[$$extra]==$$jax" > .pins-in.tmp; \
	  $(COMPILE) 3.11 $(LINUX) .pins-in.tmp -c .pins-all.tmp -o .pins-out.tmp > /dev/null; \
	  { sed -n '/^#/p' requirements-$$accelerator.txt; echo '-r requirements.txt'; cat .pins-in.tmp; \
	    grep -vxFf .pins-base.tmp .pins-out.tmp; } > .pins-new.tmp; \
	  mv .pins-new.tmp requirements-$$accelerator.txt; \
	done; \
	$(COMPILE) 3.12 $(LINUX) pyproject.toml --extra test -o .pins-newest.tmp > /dev/null; \
	{ sed -n '/^#/p' requirements-newest.txt; grep -vxFf .pins-base.tmp .pins-newest.tmp; } > .pins-new.tmp; \
	mv .pins-new.tmp requirements-newest.txt; \
	{ sed -n '/^#/p' requirements.txt; cat .pins-all.tmp; } > .pins-new.tmp; \
	mv .pins-new.tmp requirements.txt

clean:
	rm -rf '$(VENV)' .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +
