# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all fuzz simulate soak check format docs clean

# The stamp is newer than what it was made from, so an edited pin installs again.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .[dev,docs,mpi,tensorflow,ray,search,tensorboard]
	touch $@

demo: $(VENV)/.installed
	$(BIN)/paceline demo

# Of thousands of tests of real processes one in a run may meet a race: up to three get a second
# try, and what they failed of is shown (docs/decisions/0170). Two tests run at a time: most wait for
# processes that they have started. Those that look at what the machine does run alone, after them.
PYTEST := $(BIN)/python -m pytest --reruns 1 --max-suite-reruns 3 --rerun-show-tracebacks
TWO := -n 2 --dist worksteal

test: $(VENV)/.installed-dev
	$(PYTEST) $(TWO) -m "not slow and not quiet"
	$(PYTEST) -m "quiet and not slow"

# The quick tests and the slow ones: over an hour on two cores, so before a release.
test-all: $(VENV)/.installed-dev
	$(PYTEST) $(TWO) -m "not quiet"
	$(PYTEST) -m quiet

# Property tests with examples drawn at random; a failing one is printed as code for a named test.
fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile fuzz

# Jobs on a virtual clock with everything going wrong, from a random seed on; a failing one is shrunk
# and shown. `make simulate SEEDS=0:1000` draws the same schedules every time.
SEEDS ?= 20000
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
