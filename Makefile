# Two commands: `make report` and `make test`. They wrap what you would type yourself.
#
#   PYTHON=python3.12   the Python (3.11 or newer) that makes .venv
#   VENV=system         use the running Python as it is: nothing is made, nothing is installed
#   PIP_ARGS='...'      passed on to pip, for example to choose a build of torch
#   WORKERS=4           how many processes share the tests (pytest-xdist)

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
CELL_SECONDS ?= 300
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help report test lab lint clean force
.NOTPARALLEL:

say = @printf '\n== %s\n'

# "$@" holds pytest's options for WORKERS processes, if xdist is there. Threads that wait then sleep:
# where there are more of them than cores, those that spin keep others from working.
shared = set --; $(RUN) -c 'import xdist' 2>/dev/null && set -- -n $(WORKERS) --dist worksteal; \
  OMP_WAIT_POLICY=passive

ifeq ($(VENV),system)

READY :=
# The checkout comes first on the path: it stands in for `pip install -e .`.
RUN := PYTHONPATH="$$PWD$${PYTHONPATH:+:$$PYTHONPATH}" "$(PYTHON)"

else

ifneq ($(words $(VENV)),1)
$(error VENV is "$(VENV)": it wants one folder name without spaces, or "system")
endif
READY := $(VENV)/.installed
# The environment's bin comes first on the path, where torch looks for ninja.
RUN := PATH="$$(cd "$(VENV)/bin" && pwd):$$PATH" "$(VENV)/bin/python"

# The stamp holds the checkout's place: a checkout that was moved installs again.
export CHECKOUT := $(CURDIR)
ifneq ($(shell cat "$(VENV)/.installed" 2>/dev/null),$(CURDIR))
$(READY): force
endif

endif

help:  ## this list
	@grep -hE '^[a-z]+:.*  ## ' Makefile | sed -E 's/^([a-z]+):.*  ## /  make \1\t/' | expand -t 18
	@printf '\nOptions: PYTHON=python3.12   VENV=system   PIP_ARGS=...   (see the top of the Makefile)\n'

report: $(READY)  ## execute every notebook and write reports/index.html
	@$(RUN) -m workbook report

test: $(READY)  ## pytest, then pytest --nbmake notebooks/
	@$(RUN) -c 'import pytest' 2>/dev/null || { \
	  echo 'make test needs pytest, which $(if $(filter system,$(VENV)),$(PYTHON),$(VENV)) lacks:' \
	       'install it there with pip install "pytest<10"' >&2; exit 2; }
	$(say) 'pytest'
	@$(shared) $(RUN) -m pytest "$$@"
	$(say) 'pytest --nbmake notebooks/'
	@if $(RUN) -c 'import nbmake, ipykernel' 2>/dev/null; then \
	  $(shared) $(RUN) -m pytest "$$@" --nbmake --nbmake-timeout=$(CELL_SECONDS) -v notebooks/; \
	elif [ '$(VENV)' = system ]; then \
	  echo 'NOT RUN: the notebooks, for $(PYTHON) has no nbmake or no ipykernel and VENV=system' \
	       'installs nothing. Tested above: everything else.'; \
	else \
	  echo '$(VENV) lost nbmake or ipykernel: make clean, then make test' >&2; exit 2; \
	fi

lab: $(READY)  ## open the notebooks in JupyterLab
	@$(RUN) -m jupyterlab notebooks/

lint: $(READY)  ## ruff over the code and the notebooks
	@$(RUN) -m ruff check .

clean:  ## remove what make made (data/ and .runs/ stay)
	rm -rf .venv reports build workbook.egg-info .pytest_cache .ruff_cache .hypothesis
	find workbook tests notebooks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	find notebooks -name .ipynb_checkpoints -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is written last, so an installation that was cut short is taken up again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys' 2>/dev/null || { \
	  echo 'There is no Python named "$(PYTHON)": install Python 3.11 or newer,' \
	       'or name one: make PYTHON=python3.12' >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python 3.11 or newer is needed, "$(PYTHON)" is' \
	       "$$("$(PYTHON)" -c 'import sys; print(sys.version.split()[0])'):" \
	       'name another: make PYTHON=python3.12' >&2; exit 2; }
	$(say) 'Making $(VENV) and installing the pinned packages (once; a few minutes at most)'
	@"$(PYTHON)" -m venv "$(VENV)" || { rm -rf "$(VENV)"; \
	  echo '"$(PYTHON) -m venv" failed: on Debian and Ubuntu, apt install python3-venv' >&2; exit 2; }
	@"$(VENV)/bin/python" -m pip install --disable-pip-version-check $(PIP_ARGS) \
	  -c constraints.txt -e '.[test]'
	@printf '%s\n' "$$CHECKOUT" > "$@"

force:
