# `make` lists the targets. Each first installs what it needs into .venv.
# Another Python than python3: PYTHON=python3.12 make test (it makes .venv;
# to change it later, `make clean` first)

PYTHON ?= python3
PY := .venv/bin/python
# pip would compile all that it installs, of which most is never imported. What
# is, Python compiles once by itself, where it may write.
INSTALL = $(PY) -m pip install --quiet -c constraints.txt \
	$(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
STAMP := .venv/.installed
NOTEBOOK := notebooks/annotated_transformer.ipynb

.DEFAULT_GOAL := help
.PHONY: help install notebook test bench claims run html sync check-sync tables format clean

help:  ## list these targets
	@echo "The annotated Transformer. Choose a target:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## install what is needed into .venv, and nothing more

notebook: $(STAMP)  ## run the book and write its notebook, with outputs
	$(PY) tools/notebook.py execute
	$(PY) tools/notebook.py pictures

# tests/test_notebook.py runs the notebook, beside the others. With little
# memory: make test PROCESSES=2
PROCESSES ?= 4
test: $(STAMP)  ## check the style, run the notebook and every test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest --numprocesses=$(PROCESSES) --dist=loadfile --no-loadscope-reorder

bench: $(STAMP)  ## measure speed against the peers; options: make bench ARGS="--quick"
	$(INSTALL) -r tests/peers.txt
	$(PY) benchmarks/run.py $(ARGS)

claims: $(STAMP)  ## examine the paper's claims in their long form, into results/
	$(PY) annotated_transformer.py claims --full --out results/claims.json \
	    --commit="$$(commit=$$(git rev-parse --short HEAD 2>/dev/null) && \
	    echo "$$commit$$(git diff --quiet HEAD -- . ':!results' || \
	    echo -dirty)" || echo unknown)" $(ARGS)

run: $(STAMP)  ## run the book as a script; options: make run ARGS="--help"
	$(PY) annotated_transformer.py $(ARGS)

html: $(STAMP) $(NOTEBOOK)  ## write build/annotated_transformer.html, one page to read
	$(PY) tools/notebook.py check
	$(PY) tools/page.py build/annotated_transformer.html

sync: $(STAMP)  ## copy the source into the notebook, without running it
	$(PY) tools/notebook.py sync

check-sync: $(STAMP)  ## fail if the notebook and the source differ
	$(PY) tools/notebook.py check

tables: $(STAMP)  ## write the tables of results into README and book
	$(PY) tools/results.py tables

format: $(STAMP)  ## lay out the Python files as the tests expect
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove .venv, build and caches; what is in runs stays
	rm -rf .venv build .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamp is written last: a broken installation is taken up again, and
# nothing is installed until requirements or constraints change. An existing
# .venv is kept if it works and its Python is new enough (pip, which some
# leave out, is added); for another one, `make clean` first.
WORKS = $(PY) -c 'import sys; assert sys.version_info >= (3, 10); import pip' 2>/dev/null
$(STAMP): requirements.txt constraints.txt
	@$(WORKS) || ! [ -x $(PY) ] || $(PY) -m ensurepip >/dev/null 2>&1 || true
	@python=$(PY); $(WORKS) || python="$(PYTHON)"; \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "This project needs Python 3.10 or newer; $$python:" \
	    "$$("$$python" --version 2>/dev/null || echo not found). Name a newer one, for example:" \
	    "PYTHON=python3.12 make notebook" >&2; exit 1; }
	@$(WORKS) || "$(PYTHON)" -m venv --clear .venv
	@echo "Installing into .venv: a minute or more, once ..."
	@$(INSTALL) -r requirements.txt
	@touch $@

# Only where the notebook is missing; `make notebook` renews it.
$(NOTEBOOK): | $(STAMP)
	$(PY) tools/notebook.py execute
