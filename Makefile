# Two commands do everything on a machine with Python and g++:
#   make demo   create a virtual environment, install fxwrap into it, run the quickstart
#   make test   the same set-up with the test tools, then ruff, mypy and the test-suite
#   make round-trips   random programs through FX graphs and torch's transforms (ROUND_TRIPS_ARGS="--programs 2000")
#   make form-round-trips   the models through the functional form, with every plan (FORM_ROUND_TRIPS_ARGS="--models t5")
#   make fuzz   random graphs, options and emitters beside eager until interrupted (FUZZ_ARGS="--graphs 2000")
#
# make test TORCH=2.15.0                        another release of torch with its Triton, in .venv-torch2.15.0 (no mypy)
# make test PYTHON=python3.12 VENV=.venv312     another interpreter, in an environment of its own
# make test PYTEST_ARGS="-x tests/test_layers.py"     part of the suite

PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(TORCH:%=-torch%)
PYTEST_ARGS ?= -n 2 --dist worksteal

BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# By its variable: these constraints replace those of the machine's pip configuration, which may exclude a release.
INSTALL := PIP_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install --quiet
REQUIREMENTS := pyproject.toml constraints.txt

# Without bytecode on disk, each of the processes that tests start compiles all of fxwrap again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test fuzz round-trips form-round-trips distributed distributed-fuzz shared-folder clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/quickstart.py

test: $(VENV)/.installed-test
	$(BIN)/ruff check --no-cache .
	$(if $(TORCH),,$(BIN)/mypy)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

distributed: $(VENV)/.installed-test
	$(BIN)/python -m tests.distributed.test_training

round-trips: $(VENV)/.installed-test
	$(BIN)/python -m tests.round_trips $(ROUND_TRIPS_ARGS)

form-round-trips: $(VENV)/.installed-test
	$(BIN)/python -m tests.form_round_trips $(FORM_ROUND_TRIPS_ARGS)

distributed-fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.distributed.random_runs $(DISTRIBUTED_FUZZ_ARGS)

shared-folder: $(VENV)/.installed-test
	$(BIN)/python -m tests.compile_cache.shared_folder $(SHARED_FOLDER_ARGS)

# An installation is done when its stamp is newer than what it was made from, so that a second run costs nothing.
$(VENV)/.installed-demo: $(REQUIREMENTS)
	@command -v g++ >/dev/null || { echo "fxwrap builds C++: install g++ first (Debian: apt-get install g++)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed -E 's/^torch==.*/torch==$(TORCH)/; /^(triton|setuptools)==/d' constraints.txt >$(CONSTRAINTS))
	$(INSTALL) torch
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed-demo
	$(INSTALL) --editable ".[test,dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
