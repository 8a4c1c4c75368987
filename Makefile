# `make train` and `make test` need Python 3.11 - 3.13 and nothing else; see README.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# Without what it asks for: tensorflow-text would bring a second TensorFlow into tensorflow/.
KERAS_HUB := keras-hub==0.32.0 kagglehub kagglesdk tokenizers sentencepiece huggingface_hub regex
# Likewise: what TFX's Trainer reads and transforms with asks for TensorFlow 2.21.
TRANSFORM := tensorflow-transform==1.21.0 tfx-bsl==1.21.0 tf_keras==2.20.1 pydot dill
PYTEST := $(BIN)/python -m pytest

.PHONY: train test test-medium test-ci test-core test-slow test-parity test-all durations exhaustive fuzz audit peer-tests test-matrix lint types format \
	docs pictures release clean

# `make train ENGINE=jax` trains the same on the JAX engine, in a workdir of its own.
train: $(VENV)/.$(if $(filter jax,$(ENGINE)),jax,cpu)
	$(BIN)/tftpu train digits_resnet $(if $(ENGINE),--config.cluster.engine=$(ENGINE) \
		--workdir=runs/digits_resnet-$(ENGINE))

# Two processes, for two cores; a file's tests stay together, files in the order of tests/conftest.py.
# A process that a hanging test ended is not replaced: the others would wait for it without end.
TWO := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
test: $(VENV)/.dev lint
	$(PYTEST) $(TWO)

# Those of `make test`, and the tests of one to four seconds.
MEDIUM := -m 'not exhaustive and not slow and not parity' $(TWO)
test-medium: $(VENV)/.dev lint
	$(PYTEST) $(MEDIUM)

test-ci: docs test-medium test-core test-parity

# What `make exhaustive` repeats for other cases is left out.
test-all: docs test-medium test-slow test-parity

# By three processes, as slow tests often wait for others.
SLOW := -m 'slow and not exhaustive' $(TWO:2=3)

# Equal numbers on one device and many, resuming, data, locks, damaged files: nothing else would notice.
CORE := $(addprefix tests/,blocks/test_running.py checkpoint/test_faults.py compatibility/test_fits.py engines/jax/placement \
	engines/jax/processes engines/jax/test_engine.py engines/tensorflow/step/test_normalization.py \
	engines/tensorflow/test_hosts.py engines/test_restore.py fuzz input_pipelines/reading \
	runtime/test_kill.py storage training/test_faults.py training/test_outages.py training/test_resume.py)
test-core: $(VENV)/.dev
	$(PYTEST) $(SLOW) $(CORE)

# In two parts, as a process that has traced hundreds of models holds several GB.
TRACED := $(addprefix tests/,blocks compatibility engines inference kernels models preflight training)
test-slow: $(VENV)/.dev
	$(PYTEST) $(SLOW) $(TRACED)
	$(PYTEST) $(SLOW) $(TRACED:%=--ignore=%)

# The zoo against implementations of others, and on JAX; torch alone is 200 MB or more.
test-parity: $(VENV)/.parity
	$(PYTEST) -m parity $(TWO)

# The seconds of every test file, by which tests/conftest.py orders them: runs all of `test-all`.
durations: $(VENV)/.parity
	-$(PYTEST) $(MEDIUM) --junitxml=build/fast.xml
	-$(PYTEST) $(SLOW) $(TRACED) --junitxml=build/slow1.xml
	-$(PYTEST) $(SLOW) $(TRACED:%=--ignore=%) --junitxml=build/slow2.xml
	-$(PYTEST) -m parity $(TWO) --junitxml=build/parity.xml
	$(BIN)/python -m tests.support.repository.durations $(addprefix build/,fast.xml slow1.xml slow2.xml parity.xml)

# Keras's own tests through `Trainer`: KERAS_TESTS is a checkout of Keras at the installed version's tag.
peer-tests: $(VENV)/.dev
	$(BIN)/python -m tests.peer.run $(KERAS_TESTS)
	$(BIN)/python -m tests.peer.run $(KERAS_TESTS) --backend=jax
	$(BIN)/python -m tests.peer.run $(KERAS_TESTS) --backend=jax --devices=4
	$(BIN)/python -m tests.peer.run $(KERAS_TESTS) --devices=4

# The packages that are installed, against the public database of vulnerabilities: over the network.
audit: $(VENV)/.dev
	$(BIN)/pip install -q pip-audit
	$(BIN)/pip-audit --local --skip-editable

# What repeats the slow tests for other models, options and slices; all pages of the documentation.
exhaustive: $(VENV)/.dev
	$(PYTEST) -m exhaustive $(TWO) $(TRACED)
	$(PYTEST) -m exhaustive $(TWO) $(TRACED:%=--ignore=%)

# Damaged and drawn inputs, FUZZ_SECONDS for each test, an hour in all; `make test` tries a few of them.
FUZZ_SECONDS ?= 130
fuzz: $(VENV)/.dev
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(PYTEST) tests/fuzz -m 'not exhaustive' --timeout=$$(($(FUZZ_SECONDS) + 300)) -v

# On the TensorFlow that Keras was last tried with on TPUs, on the one that TPUs have, on the newest.
MATRIX := 2.19.1 2.20.0 2.21.0
test-matrix: $(MATRIX:%=.venv-%/.dev)
	for version in $(MATRIX); do .venv-$$version/bin/python -m pytest $(TWO) \
		-m 'not slow and not exhaustive and not compiles and not parity' || exit; done

# TensorFlow 2.19 holds protobuf below what newer metadata needs.
.venv-%/.dev: setup.py
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install -q -e '.[gcp,matrix]' tensorflow-cpu==$* \
		$(if $(filter 2.19.%,$*),'tensorflow-metadata<1.18')
	.venv-$*/bin/pip install -q --no-deps $(KERAS_HUB)
	touch $@

lint: $(VENV)/.dev types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation in `site/`, built without a network; a broken link or reference is an error.
docs: $(if $(wildcard $(VENV)/.dev),$(VENV)/.dev,$(VENV)/.docs)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The pictures of README and of the documentation, made anew: trains, and runs the TPU compiler.
pictures: $(VENV)/.dev
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/plots.py

# Wheel and sdist of the next version, tried on every Python of this machine: see .ci/release.py.
release:
	$(PYTHON) .ci/release.py $(VERSION)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The stamps say which extra is installed; a change of setup.py installs anew.
$(VENV)/.cpu: setup.py | $(BIN)/python
	$(BIN)/pip install -q -e '.[cpu]'
	touch $@

$(VENV)/.jax: $(VENV)/.cpu
	$(BIN)/pip install -q -e '.[jax]'
	touch $@

$(VENV)/.dev: setup.py | $(BIN)/python
	$(BIN)/pip install -q -e '.[cpu,dev]'
	$(BIN)/pip install -q --no-deps $(KERAS_HUB) $(TRANSFORM)
	touch $@ $(VENV)/.cpu

# Where there is no `.dev`, which holds this as well.
$(VENV)/.docs: setup.py | $(BIN)/python
	$(BIN)/pip install -q -e '.[docs]'
	touch $@

$(VENV)/.parity: $(VENV)/.dev
	$(BIN)/pip install -q -e '.[parity]'
	touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "tftpu needs Python 3.11, 3.12 or 3.13: install one, or name" \
		"it: make PYTHON=/path/to/python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info
