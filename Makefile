# Two commands do everything on a machine with Python and g++:
#   make demo   create a virtual environment, install fxwrap into it, run the quickstart
#   make test   the same set-up with the test tools, then ruff, mypy and the test-suite
#   make long-test   the test-suite with all cases, examples and steps, of which make test runs a sample: half an hour
#   make round-trips   random programs through FX graphs and torch's transforms (ROUND_TRIPS_ARGS="--programs 2000")
#   make form-round-trips   the models through the functional form, with every plan (FORM_ROUND_TRIPS_ARGS="--models t5")
#   make distributed   training on 2 and 4 ranks beside eager, then 500 random programs on 2 (DISTRIBUTED_FUZZ_ARGS="50 7")
#   make fuzz   random graphs, options and emitters beside eager until interrupted (FUZZ_ARGS="--graphs 2000")
#   make sanitize-kernels   the GPU tests of kernels under NVIDIA's compute-sanitizer (SANITIZE_KERNELS_ARGS="--tools racecheck")
#   make docs   the documentation site in build/site, without warnings and without the network; make linkcheck asks external links
#   make wheels   a wheel in dist/ with the native libraries of each release in TORCHES, each in an environment of its own
#   make wheels WHEEL_ENVIRONMENTS="/a /b"   the same for the torch of these environments
#
# make test TORCH=2.15.0                        another release of torch with its Triton, in .venv-torch2.15.0 (no mypy)
# make test PYTHON=python3.12 VENV=.venv312     another interpreter, in an environment of its own
# make test PYTEST_ARGS="-x tests/test_layers.py"     part of the suite

PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(TORCH:%=-torch%)
PYTEST_ARGS ?= -n 2 --dist worksteal
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
WHEEL_ENVIRONMENTS ?= $(TORCHES:%=$(CURDIR)/.venv-torch%)

BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# By its variable: these constraints replace those of the machine's pip configuration, which may exclude a release.
# Bytecode is written when a module is first imported: pip would compile three times as much, on one core.
INSTALL := PIP_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install --quiet --no-compile
REQUIREMENTS := pyproject.toml constraints.txt

# Without bytecode on disk, each of the processes that tests start compiles all of fxwrap again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test types suite docs linkcheck long-test fuzz round-trips form-round-trips distributed shared-folder sanitize sanitize-kernels other-releases wheels clean
.DELETE_ON_ERROR:

demo: $(VENV)/.built
	$(BIN)/python examples/quickstart.py

# The native libraries compile while pip downloads and unpacks the test tools.
test: $(VENV)/.installed-demo
	$(MAKE) --jobs=2 $(VENV)/.built $(VENV)/.installed-test
	$(BIN)/ruff check --no-cache .
	$(MAKE) --jobs=2 $(if $(TORCH),,types) suite

# mypy runs on one core, beside the suite's first tests.
types:
	$(BIN)/mypy

suite:
	$(BIN)/python -m pytest $(PYTEST_ARGS)

long-test: $(VENV)/.installed-test
	FXWRAP_LONG_TESTS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -q -n -W --keep-going -b html docs build/site
	@echo "the site is build/site/index.html"

linkcheck: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -q -b linkcheck docs build/linkcheck

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

distributed: $(VENV)/.installed-test
	$(BIN)/python -m tests.distributed.test_training
	$(BIN)/python -m tests.distributed.random_runs $(DISTRIBUTED_FUZZ_ARGS)

round-trips: $(VENV)/.installed-test
	$(BIN)/python -m tests.round_trips $(ROUND_TRIPS_ARGS)

form-round-trips: $(VENV)/.installed-test
	$(BIN)/python -m tests.form_round_trips $(FORM_ROUND_TRIPS_ARGS)

sanitize: $(VENV)/.installed-test
	$(BIN)/python -m tests.artifact.sanitize $(SANITIZE_ARGS)

sanitize-kernels: $(VENV)/.installed-test
	$(BIN)/python -m tests.sanitize_kernels $(SANITIZE_KERNELS_ARGS)

# PYTHONS are the interpreters of environments with other releases of torch.
other-releases: $(VENV)/.installed-test
	rm -rf build/other-releases && mkdir -p build/other-releases
	$(BIN)/python -m tests.artifact.other_releases save build/other-releases
	for python in $(PYTHONS); do $$python -m tests.artifact.other_releases check build/other-releases || exit 1; done

shared-folder: $(VENV)/.installed-test
	$(BIN)/python -m tests.compile_cache.shared_folder $(SHARED_FOLDER_ARGS)

# One environment after another: each compiles on all cores. hatch_build.py puts the libraries into the wheel.
wheels: $(VENV)/.installed-test
	rm -rf build/native
	$(if $(filter $(CURDIR)/.venv-torch%,$(WHEEL_ENVIRONMENTS)),\
	  for torch in $(TORCHES); do \
	  $(MAKE) TORCH=$$torch VENV=.venv-torch$$torch .venv-torch$$torch/.installed-demo || exit 1; done)
	for folder in $(WHEEL_ENVIRONMENTS); do \
	  PYTHONPATH=$(CURDIR) $$folder/bin/python -m fxwrap build --package build/native || exit 1; done
	FXWRAP_WHEEL_LIBRARIES=build/native $(BIN)/python -m hatchling build -t wheel -d dist

# An installation is done when its stamp is newer than what it was made from, so that a second run costs nothing.
$(VENV)/.installed-demo: $(REQUIREMENTS)
	@command -v g++ >/dev/null || { echo "fxwrap builds C++: install g++ first (Debian: apt-get install g++)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed -E 's/^torch==.*/torch==$(TORCH)/; /^(triton|setuptools)==/d' constraints.txt >$(CONSTRAINTS))
	$(INSTALL) torch numpy  # without NumPy, torch warns whenever it is imported
	$(INSTALL) --editable .
	touch $@

$(VENV)/.built: $(VENV)/.installed-demo
	$(BIN)/python -m fxwrap build
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed-demo
	$(INSTALL) --editable ".[test,dev]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-demo
	$(INSTALL) --editable ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
