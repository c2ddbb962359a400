# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow simulate soak check format docs clean

# The stamp is newer than what it was made from, so an edited pin installs again.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .[dev,docs,mpi,tensorflow,ray,tensorboard]
	touch $@

demo: $(VENV)/.installed
	$(BIN)/paceline demo

# Of thousands of tests of real processes one in a run may meet a race: up to three get a second
# try, and what they failed of is shown (docs/decisions/0170).
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow" --reruns 1 --max-suite-reruns 3 --rerun-show-tracebacks

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow

# Jobs on a virtual clock with everything going wrong; a failing seed is shrunk and shown.
SEEDS ?= 0:20000
simulate: $(VENV)/.installed-dev
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

# Real processes, killed and paused again and again; about ten minutes an architecture.
soak: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/soak.py --faults 50

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site, in site/; a link that leads nowhere is an error.
docs: $(VENV)/.installed-dev
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
