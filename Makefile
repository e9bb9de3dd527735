# ForgeRay. `make` alone lists the targets.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.forge-ray-env

# What of pyproject's extras is installed: cpu or gpu (not both), kubernetes, smollm2, deepspeed, lora, dev (which has these two).
EXTRAS ?= cpu,smollm2,dev
# Where torch comes from: empty = PyPI alone; `cpu` = PyTorch's CPU index; a directory of wheels; or an index URL.
TORCH ?=
# Interpreter for the environment: empty = the first python3 that is new enough.
PYTHON ?=
# More arguments: `make demo ARGS="train.steps=2"`, `make test ARGS="-k proxy"`.
ARGS ?=

export EXTRAS TORCH PYTHON

.PHONY: help env demo test test-harness lint format docs bench bench-seeds bench-proxy bench-soak bench-failures bench-trajectories bench-tree bench-ingest bench-async bench-sync clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | while IFS=$$'\t' read -r name text; do printf '  make %-19s %s\n' "$$name" "$$text"; done

env: $(STAMP) ## Create .venv with the pinned versions (TORCH=cpu for the small torch)

# Other extras than those that are installed, asked for by name, make the environment anew; `make demo` takes what is there.
ifneq ($(origin EXTRAS),file)
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(EXTRAS))
.PHONY: $(STAMP)
endif
endif

$(STAMP): pyproject.toml cluster/constraints.txt cluster/overrides.txt cluster/setup.sh
	@bash cluster/setup.sh "$(VENV)"
	@echo "$(EXTRAS)" > "$@"

demo: env ## Train the tiny policy of examples/quickstart and write its report
	@exec $(BIN)/forge-ray train examples/quickstart/run.yaml name=demo-$$(date +%Y%m%d-%H%M%S) $(ARGS)

test: env ## Unit, integration and fault tests; harness tests where the programs are installed
	@exec bash tests/all.sh $(BIN)/python $(ARGS)

test-harness: env ## Install all real harness programs (needs npm and Rust 1.96; ZeroClaw is compiled once, 20 minutes) and run their tests
	@$(BIN)/python -m forge_ray.harnesses.install all examples/pi/harness.py:Pi
	@exec $(BIN)/python -m pytest tests/harness $(ARGS)

lint: env ## ruff, pyright and the import rules of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: env ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: env ## Write the generated pages of docs/ anew
	$(BIN)/python -m forge_ray.cli.docs

bench: bench-proxy bench-soak bench-seeds bench-async bench-sync bench-trajectories bench-ingest bench-tree bench-failures ## All below: about 50 minutes

bench-seeds: env ## The three learning seeds: about 20 minutes
	@exec $(BIN)/python -m benchmarks.seeds $(ARGS)

bench-proxy: env ## What recording costs, against vLLM's app without it and LiteLLM: about 12 minutes
	@exec $(BIN)/python -m benchmarks.proxy $(ARGS)

bench-async: env ## What asynchrony gains by staleness bound, on a virtual clock: half a minute
	@exec $(BIN)/python -m benchmarks.async $(ARGS)

bench-sync: env ## What a weight update costs, by way and under requests: about 3 minutes
	@exec $(BIN)/python -m benchmarks.sync $(ARGS)

bench-soak: env ## 10,000 calls through the proxy, with clients that leave and weight updates: about 5 minutes
	@exec $(BIN)/python -m benchmarks.soak $(ARGS)

bench-trajectories: env ## From recorded calls to samples and tries: speed, size, memory; half a minute
	@exec $(BIN)/python -m benchmarks.trajectories $(ARGS)

bench-ingest: env ## Rollouts into the store and out again, as a Ray Dataset too: two minutes
	@exec $(BIN)/python -m benchmarks.ingest $(ARGS)

bench-tree: env ## Training call by call, on chains and on tries: time, memory, gradients; about 6 minutes
	@exec $(BIN)/python -m benchmarks.tree $(ARGS)

bench-failures: env ## What each failure policy costs in rollouts that are not trained: seconds
	@exec $(BIN)/python -m benchmarks.failures $(ARGS)

clean: ## Remove the environment, installed tools and caches; runs are kept
	rm -rf $(VENV) .tools build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
