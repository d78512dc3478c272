# Each target sets up what it needs; a machine needs only Python 3.10 or later with its venv module, and make.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip install --disable-pip-version-check -q -c requirements/lock.txt
RUN = $(VENV)/bin/python
PYTEST_ARGS ?= -n 2 --dist loadfile

.PHONY: gpu demo test check assets bench bench-step clean
.DELETE_ON_ERROR:

demo: assets ## fine-tune SmolLM2-135M twice and compare: table and plot in output/demo
	$(RUN) -m benchmarks.demo

test: $(VENV)/.test ## the test suite (those marked `assets` run once `make assets` has been called)
	$(RUN) -m pytest $(PYTEST_ARGS)

check: $(VENV)/.test ## lint
	$(VENV)/bin/ruff check hf_memopt tests benchmarks examples tools

assets: $(VENV)/.demo ## fetch the demo's model and texts into .demo: pinned, hash-checked, once
	$(RUN) -m tools.demo_assets

bench: assets $(VENV)/.test ## the quality figures: hours; stop it at any moment and call it again
	OMP_NUM_THREADS=1 $(RUN) -m benchmarks.quality --plan adamw_torch taco_adamw --dtype float32 bfloat16
	$(RUN) -m benchmarks.tables

bench-step: $(VENV)/.test ## time and memory of one optimizer step, ours and others'; stop and call again as you like
	$(PIP) --no-deps -r requirements/peers.txt
	$(RUN) -m benchmarks.optimizer_step --all

gpu: ## correctness, speed, memory and a fine-tune on a CUDA machine, with the torch and triton that are installed there
	$(PYTHON) -m benchmarks.gpu

clean:
	rm -rf $(VENV) output build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python requirements/demo.txt requirements/lock.txt pyproject.toml
	@echo "installing the demo's packages into $(VENV)"
	$(PIP) -r requirements/demo.txt -e .
	@touch $@

$(VENV)/.test: $(VENV)/.demo requirements/test.txt
	@echo "installing the tests' packages into $(VENV)"
	$(PIP) -r requirements/test.txt -e .
	@touch $@
