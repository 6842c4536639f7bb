# Thin on purpose: the work is in scripts/ and in the `flexkv` command.
.PHONY: setup demo test test-cluster test-vllm worlds bench lint docs

setup:  ## .venv with everything; `make setup TORCH=2.9.1 PYTHON=python3.12` for others
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/setup.sh

demo: setup  ## a real model, three ways: no cache, host memory, SSD after SIGKILL
	@.venv/bin/flexkv demo $(ARGS)

test: setup  ## the whole suite; `make test ARGS="-k index"`
	@scripts/test.sh $(ARGS)

test-cluster: setup  ## several nodes on a real Redis; `make test-cluster ARGS="-k two_nodes"`
	@scripts/test-cluster.sh $(ARGS)

test-vllm:  ## stock vLLM on CPUs, in an environment of its own (3.5 GB); `make test-vllm VLLM_VERSION=0.30.0`
	@VLLM_VERSION="$(VLLM_VERSION)" scripts/test-vllm.sh $(ARGS)

worlds: setup  ## whole managers in virtual time, one for each seed; `make worlds N=100000 SEED=0`
	@.venv/bin/python -W ignore -m flexkv.testing.worlds --worlds $(or $(N),2000) --first $(or $(SEED),0)

bench: setup  ## index, copy, disk and end to end; `make bench DIR=/mnt/nvme`
	@scripts/bench.sh $(DIR)

lint: setup  ## ruff and mypy
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy \
		&& .venv/bin/mypy plugins/flexkv-simulated/flexkv_simulated

docs: setup  ## run what README and docs/ show
	@.venv/bin/python -m pytest -q tests/test_docs.py
