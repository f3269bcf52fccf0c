# Everything here sets up what it needs, in .venv (and .venv-jit for the kernel compiler).
PYTHON ?= python3
BIN := .venv/bin
JIT := .venv-jit/bin
# Python compiles what is imported, which is a small part of the files that pip would compile.
PIP_OPTIONS := --quiet --no-compile
# What pyproject.toml has at a path, such as ['project']['name'].
OF_PROJECT = $$($(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))$(1))")
# The pins of an extra. Pip takes them before it looks for what the package itself requires: otherwise it
# also fetches the newest releases of torch and of the CPU driver, and then drops them.
PINS = $(call OF_PROJECT,['project']['optional-dependencies']['$(1)'])
# What tests put on the path by themselves: see pyproject.toml.
APART = $(call OF_PROJECT,['tool']['fusedoptim']['apart'])
# Make an environment with the newest pip. Python would first install the pip that it brings, and compile
# it. Before release 24 pip is slower: it compares each file that an index lists with a thousand tags.
define MAKE_ENVIRONMENT
@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('make needs CPython 3.11: PYTHON=python3.11')"
$(PYTHON) -m venv --without-pip $(1)
$(PYTHON) -m pip --python $(1)/bin/python install $(PIP_OPTIONS) pip
endef
# Tests of what is the same in both environments: the sources' structure, torch, what it does with our
# optimizers, what is made of our operators and how its compiler traces them (TestTracing), what the pool
# records, whatever driver is below it, damaged files, and the GPU compiler. `make test` alone runs them.
ONLY_NEWEST := notebooks references transforms \
	packaging/test_device_kinds.py packaging/test_structure.py packaging/test_wheel.py \
	test_reference.py test_benchmarks.py test_convergence.py test_lion.py test_tolerances.py \
	$(addprefix allocator/,exchange/test_reuse.py monitoring/test_history.py \
	monitoring/test_profiler.py monitoring/test_scopes.py monitoring/test_snapshot.py \
	monitoring/test_timeline.py options/test_budget.py options/test_idle.py \
	options/test_reserve.py pool/test_blocks.py pool/test_faults.py pool/test_model.py \
	pool/test_recovery.py pool/test_rules.py) \
	$(addprefix fusedoptim/,distributed nn offload runtime aot/test_damage.py doctor/test_documents.py \
	kernels/test_validation.py ops/test_example.py ops/test_torchvision.py step/test_interrupts.py \
	step/test_modes.py test_migration.py test_torch_private.py test_training.py)

.PHONY: demo convergence test test-packages test-transforms test-jit coverage check docs kernels \
        kernels-verify kernels-validate bench notebooks lab clean

demo: .venv/installed  ## train on real data with torch's SGD and with FusedSGD
	$(BIN)/python examples/digits.py

convergence: .venv/installed  ## train with our optimizers and torch's, and draw the curves
	$(BIN)/python examples/convergence.py

# Two parts, so that CI can run one beside the other.
test: test-packages test-transforms

test-packages: .venv/installed
	$(BIN)/python -m pytest --ignore=tests/transforms

test-transforms: .venv/installed
	$(BIN)/python -m pytest tests/transforms

# Torch has a thread for each core in `make test`, and one here: the other way to launch kernels.
test-jit: .venv-jit/installed  ## the tests of what runs on the pinned numba-dpex packages
	OMP_NUM_THREADS=1 $(JIT)/python -m pytest $(ONLY_NEWEST:%=--ignore=tests/%) -k 'not TestTracing'

# Reports also after a failure. Each process that the tests start writes a file, which `combine` deletes.
coverage: .venv/installed  ## the lines and branches that tests run: a table, and pages in out/coverage/html
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest; failed=$$?; \
	$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage html --quiet && \
	$(BIN)/python -m coverage report && exit $$failed

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m fusedoptim.kernels check
	$(BIN)/python -m benchmarks.traffic check
	$(BIN)/python -m benchmarks.picture check
	$(BIN)/python -m tools.reference check
	$(BIN)/python -m notebooks check

docs: .venv/installed  ## build docs/reference/ from the docstrings
	$(BIN)/python -m tools.reference build

kernels: .venv-jit/installed  ## compile fusedoptim/kernels/ to fusedoptim/spirv/
	$(JIT)/python -m fusedoptim.kernels build
	$(JIT)/python -m benchmarks.traffic build

kernels-verify: .venv-jit/installed  ## compile again and compare byte for byte
	$(JIT)/python -m fusedoptim.kernels verify
	$(JIT)/python -m benchmarks.traffic verify

kernels-validate: .venv/installed  ## spirv-val and ocloc (apt install spirv-tools intel-opencl-icd)
	$(BIN)/python -m fusedoptim.kernels validate

bench: .venv/installed
	$(BIN)/python -m benchmarks

notebooks: .venv/installed  ## execute the notebooks with small parameters, to out/notebooks/
	$(BIN)/python -m notebooks run --jobs 2

lab: .venv/installed-lab  ## open the notebooks in JupyterLab
	cd notebooks && ../$(BIN)/jupyter lab quickstart.ipynb

clean:
	rm -rf .venv .venv-jit build dist out *.egg-info

.venv/installed: pyproject.toml
	$(call MAKE_ENVIRONMENT,.venv)
	$(BIN)/pip install $(PIP_OPTIONS) $(call PINS,test) --editable '.[dev]'
	$(BIN)/pip install $(PIP_OPTIONS) --no-deps --upgrade --target .venv/apart $(APART)
	touch $@

.venv/installed-lab: .venv/installed
	$(BIN)/pip install $(PIP_OPTIONS) --editable '.[dev,lab]'
	touch $@

.venv-jit/installed: pyproject.toml
	$(call MAKE_ENVIRONMENT,.venv-jit)
	$(JIT)/pip install $(PIP_OPTIONS) $(call PINS,jit) $(call PINS,test) --editable '.[jit,test]'
	# It warns when it is compiled, which fails the test that imports it first.
	$(JIT)/python -m compileall -q .venv-jit/lib/python*/site-packages/dpcpp_llvm_spirv
	touch $@
