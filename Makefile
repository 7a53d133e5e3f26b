# Every target sets up .venv by itself. PYTHON=... chooses another interpreter.
.PHONY: quickstart test test-all costly nightly mutations keys leaks upstream versions lint docs bench bench-all wheel clean

VENV := .venv
BIN := $(VENV)/bin
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 12))
PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.14; do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && { echo $$p; break; }; done)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.12 or newer is needed: none of python3, python3.12, python3.13, python3.14 is one; install it or say make PYTHON=/its/path." >&2; exit 1; }
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { echo "Python 3.12 or newer is needed: $(PYTHON) is older." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per extra, so that each target installs what it needs and no more.
$(VENV)/installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

quickstart: $(VENV)/installed-examples
	$(BIN)/python examples/quickstart.py

# Compiled sources are kept even where the environment forbids it: collecting takes half the time.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist worksteal \
	--max-worker-restart=2 --durations=10

DOUBLE := JAX_ENABLE_X64=1 $(PYTEST)

# The cheap tests, in single precision, and the cheap examples of public classes and functions.
test: $(VENV)/installed-test
	$(PYTEST) -m "not slow and not nightly and not needs_x64"

# Which tests are not cheap: those that take more than a second where nothing is compiled, on two cores
# that do nothing else. It writes tests/costly.txt, and takes ten minutes.
costly: $(VENV)/installed-test
	rm -rf .jax_cache
	$(PYTEST) --costly 1 -m "not slow and not nightly and not needs_x64"

# All that a merge needs: in double precision what single precision cannot resolve.
test-all: $(VENV)/installed-test
	$(PYTEST) -m "not nightly and not needs_x64"
	$(DOUBLE) -m "needs_x64 and not nightly" $$(grep -rl --include='test_*.py' needs_x64 tests)

# What a release needs and a merge does not; -k goes on after a failure.
nightly: test-all keys mutations leaks versions wheel docs
	$(PYTEST) -m nightly
	$(DOUBLE) -m "x64 and (nightly or not needs_x64)" $$(grep -rl --include='test_*.py' 'mark\.x64' tests)

# Breaks two formulas of each sub-package, one after the other, and says which test notices.
mutations: $(VENV)/installed-test
	$(BIN)/python -m tests.mutations

# The tests at other random keys: the integer of each is shifted by KEYS * 1000.
# Left out are golden values, and tests that reach no key (tests/keys.py): they are as in test-all.
KEYS ?= 1 2 3 4 5 6 7 8
keys: $(VENV)/installed-test
	status=0; for k in $(KEYS); do \
		$(PYTEST) --shift-keys $$k -m "not nightly" tests || status=1; \
	done; exit $$status

# Suites in which a tracer that outlives its trace is an error.
leaks: $(VENV)/installed-test
	JAX_CHECK_TRACER_LEAKS=1 $(BIN)/python -m pytest -q tests/objectives/test_contract.py

# NumPyro's own tests of SVI, guides and MCMC with parts of this package in place of its own. Its
# sources hold them, but what it publishes for installation does not: NUMPYRO is a checkout. K="..."
# chooses tests as pytest's -k does.
UPSTREAM ?= svi autoguide mcmc
upstream: $(VENV)/installed-test
	@test -f "$(NUMPYRO)/test/infer/test_svi.py" || { echo "Say make upstream NUMPYRO=path/to/numpyro, a checkout of NumPyro's sources with test/infer in it; the releases that pip downloads leave that folder out." >&2; exit 1; }
	PYTHONPATH=. JAX_TRACEBACK_FILTERING=off XLA_FLAGS=--xla_force_host_platform_device_count=2 $(BIN)/python -m pytest -q \
		--tb=no -c "$(NUMPYRO)/pyproject.toml" --rootdir "$(NUMPYRO)" -p no:cacheprovider \
		-p tests.upstream.plugin $(if $(K),-k "$(K)") $(UPSTREAM:%="$(NUMPYRO)"/test/infer/test_%.py)

# Contract suites with the lowest versions that pyproject.toml allows, and with the newest.
VERSIONS_TESTS ?= $(wildcard tests/objectives/test_contract.py tests/guides/test_contract.py \
	tests/mcmc/test_contract.py)
LOWEST := import re, tomllib; \
	project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	found = [re.match(r"(\w+)>=([\d.]+)", x) for x in project["dependencies"]]; \
	print(*(f"{x[1]}=={x[2]}" for x in found if x))
versions: $(BIN)/python
	rm -rf build/versions && mkdir -p build/versions
	$(BIN)/python -c '$(LOWEST)' | tr ' ' '\n' > build/versions/lowest.txt
	touch build/versions/newest.txt
	status=0; for end in lowest newest; do \
		python=build/versions/$$end/bin/python; \
		$(BIN)/python -m venv build/versions/$$end && \
		$$python -m pip install --quiet --disable-pip-version-check \
			-c build/versions/$$end.txt -e '.[test]' && \
		$$python -m pip list --disable-pip-version-check | grep -E '^(numpyro|jax|optax|arviz) ' && \
		JAX_COMPILATION_CACHE_DIR=build/versions/$$end/cache \
			$$python -m pytest -q -n 2 --dist loadfile $(VERSIONS_TESTS) || status=1; \
	done; exit $$status

lint: $(VENV)/installed-dev $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# GALLERY=0 checks links, references and pages without running the examples.
GALLERY ?= 1
# Pages of a build that was interrupted may be cut off and yet look new, so the next begins anew.
UNFINISHED := docs/_build/unfinished
docs: $(VENV)/installed-docs $(VENV)/installed-examples
	$(if $(wildcard $(UNFINISHED)),rm -rf docs/_build/html docs/api/*/)
	@mkdir -p docs/_build && touch $(UNFINISHED)
	$(BIN)/sphinx-build -W --keep-going -q -b html $(if $(filter 0,$(GALLERY)),-D plot_gallery=0) \
		docs docs/_build/html
	@rm $(UNFINISHED)

# The page of the peers; bench-all runs the whole of every folder, which takes hours.
bench: $(VENV)/installed-bench
	$(BIN)/python benchmarks/peers/run.py

bench-all: $(VENV)/installed-bench
	for run in benchmarks/*/run.py; do $(BIN)/python $$run || exit 1; done

# The wheel in a fresh environment, away from the sources: a user's script, type-checked and run, and
# tests. WHEEL_TESTS=tests runs all but those that read the sources.
WHEEL_TESTS ?= tests/expfam tests/transforms tests/objectives/test_contract.py
FRESH := build/wheel
SOURCES_READ := $(foreach x,catalogue docs layers,--ignore tests/test_$(x).py)
wheel: $(BIN)/python
	rm -rf $(FRESH) && mkdir -p $(FRESH)/work
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(FRESH) .
	$(BIN)/python -m venv $(FRESH)/venv
	$(FRESH)/venv/bin/python -m pip install --quiet -c constraints.txt \
		"$$(ls $(FRESH)/*.whl)[test]" 'pyright[nodejs]'
	cp -r tests examples benchmarks docs pyproject.toml $(FRESH)/work
	cd $(FRESH)/work && ../venv/bin/pyright -p /dev/null --pythonpath ../venv/bin/python \
		tests/users_script.py
	cd $(FRESH)/work && ../venv/bin/python tests/users_script.py
	cd $(FRESH)/work && ../venv/bin/python -m pytest -q -n 2 --dist loadfile $(SOURCES_READ) \
		$(WHEEL_TESTS)

clean:
	rm -rf build $(VENV) .jax_cache docs/_build docs/gallery docs/api/*/
