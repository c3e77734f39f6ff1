# Everything a user does, one word each; `make` alone prints the words.

PYTHON ?= python3
ROOT ?= $(abspath artifacts)
PORT ?= 5000
BIN := .venv/bin

export EXTRA
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1

.PHONY: help setup pipeline plan status verify ui test check fix bench bench-cache bench-train bench-fp8 bench-lossless bench-decode bench-live bench-serving
.DEFAULT_GOAL := help

help: ## print this
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: ## build .venv and the small target, once (EXTRA=cpu|gpu, PYTHON=python3.12)
	@$(PYTHON) -m pipelines.setup

pipeline: setup ## run what has to run: make pipeline ARGS="stage.train.lr=3e-4 drafter=dflash"
	@$(BIN)/python -m pipelines $(ARGS)

plan: setup ## say what would run, step by step, and why
	@$(BIN)/python -m pipelines mode=plan $(ARGS)

verify: setup ## read the target cache again and name what is damaged
	@$(BIN)/python -m pipelines mode=verify $(ARGS)

status: setup ## say what is there and who is working on it
	@$(BIN)/python -m pipelines mode=status $(ARGS)

ui: setup ## open MLflow on http://127.0.0.1:5000 (PORT=..., ROOT=another artifacts folder)
	@mkdir -p $(ROOT)
	$(BIN)/mlflow ui --backend-store-uri sqlite:///$(abspath $(ROOT))/mlflow.db --host 127.0.0.1 --port $(PORT) --workers 1

test: export RAY_AUTH_MODE := disabled
test: setup ## run the tests (ARGS="-k losses", ARGS="-m 'not slow'")
	$(BIN)/python -m pytest -q $(ARGS)

check: setup ## check format, lint, types and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: setup ## format, and mend what ruff can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: setup ## measure the hot paths on this machine
	$(BIN)/python tests/bench.py $(ARGS)

bench-cache: setup ## measure the target cache: bytes a token, MB/s, capture (ARGS="size local s3 capture")
	$(BIN)/python -m tests.bench_cache $(ARGS)

bench-train: setup ## measure the training loss and a step against dense ones (ARGS="--rows 128")
	$(BIN)/python -m tests.bench_train $(ARGS)

bench-fp8: setup ## measure what an fp8 cache costs in accepted length
	$(BIN)/python -m tests.bench_fp8 $(ARGS)

bench-lossless: setup ## show that decoding emits the target's own text (ARGS="toy controls --draws 10000")
	$(BIN)/python -m tests.bench_lossless $(ARGS)

bench-decode: setup ## measure speed-ups, batches and ragged verification (ARGS="ragged")
	$(BIN)/python -m tests.bench_decode $(ARGS)

bench-live: setup ## measure the engine under load beside the replay's prediction
	$(BIN)/python -m tests.bench_live $(ARGS)

bench-serving: setup ## compare acceptance in vLLM with the offline figure
	$(BIN)/python -m tests.bench_serving $(ARGS)
