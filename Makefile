# `make book` and `make test` do their own set-up in .venv; nothing but Python 3.11+, pip, venv and make is needed.
# `TORCH=cpu make book` sets up with torch's build for processors.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: book test unit slow chapters rendered outputs sabotage seeds colab gpu pdf site bench lint clean help
.DEFAULT_GOAL := help

help:  ## what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/'

$(READY): requirements.lock pyproject.toml
	@echo "== setting up .venv from requirements.lock"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@bash .ci/install $(BIN)/python
	@touch $(READY)

book: $(READY)  ## execute the chapters whose inputs changed and render _build/html/index.html
	@$(BIN)/python -m moe_book.build

test: unit slow chapters rendered  ## all unit tests, nbval over every chapter, tests of the rendered book

unit: $(READY)  ## the quick unit tests, with shapes checked at run time
	@echo "== unit tests"
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -n auto --dist worksteal -m "not slow"

slow: $(READY)  ## the other unit tests, and that every implementation that is timed takes the same step
	@echo "== slow unit tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit benchmarks/test_train_patch_moe.py -n auto --dist worksteal -m slow

chapters: $(READY)  ## run every chapter and compare its checked cells with the stored outputs
	@echo "== nbval over the chapters"
	@# backwards, since the last chapter takes longest: were it not the first to start, one core would wait for it
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --nbval-lax --nbval-cell-timeout=300 $$(ls -r notebooks/*.ipynb) \
		-n auto --dist loadfile --no-loadscope-reorder

rendered: book  ## tests of the rendered and of the published book
	@echo "== tests of the rendered book"
	@$(BIN)/python -m pytest tests/rendered -n auto --dist worksteal

outputs: $(READY)  ## execute what changed and store its outputs in the tree, for committing; CHAPTER="03 07" for some only
	@$(BIN)/python -m moe_book.build --store $(addprefix --chapter ,$(CHAPTER))

sabotage: $(READY)  ## run the generated mutants that have no outcome that holds, and store what became of them; resumable
	@$(BIN)/python -m moe_book.sabotage run && $(BIN)/python -m moe_book.sabotage score

seeds: $(READY)  ## run chapters at SEEDS, by default 1 31 7919, and name the boxes that fall; CHAPTER="03 07" for some only
	@$(BIN)/python -m moe_book.seeds $(or $(SEEDS),1 31 7919) $(addprefix --chapter ,$(CHAPTER))

colab: $(READY)  ## run the copies for Colab in an environment of Colab's versions; CHAPTER="03 07" for some only
	@bash .ci/colab $(CHAPTER)

gpu: $(READY)  ## run every chapter on a machine with a GPU, those that use it also on its CPU, and record card and times
	@$(BIN)/python -m moe_book.gpu

pdf: book  ## the book as one PDF, _build/moe-theory.pdf
	@$(BIN)/python -m moe_book.pdf

site: $(READY)  ## the publishable tree in _build/site; REPOSITORY=owner/name adds "open in Colab"
	@$(BIN)/python -m moe_book.publish $(if $(REPOSITORY),--repository $(REPOSITORY))

bench: $(READY)  ## measure speed, as ratios within one run, and store it for the page on speed
	@$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-columns=min,median,iqr,rounds

lint: $(READY)  ## ruff and pyright, as pre-commit runs them
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright --pythonpath $(BIN)/python

clean:  ## remove what was built; the virtual environment stays
	rm -rf _build
