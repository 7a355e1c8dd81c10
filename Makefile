# Two commands set up everything: `make demo` and `make test`. Both make the environment once and re-use it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# xdist workers share two cores: one thread each is faster than two that fight.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1
# bf16 on some hosts dies with an illegal instruction above this instruction set.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: demo test nightly interpreted lint format types docs env clean

demo: $(STAMP)
	$(BIN)/factorized demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not nightly" --durations=25

nightly: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m nightly
	$(MAKE) interpreted

# GPU kernels on the CPU: Triton and the NumPy that its interpreter needs, beside the environment.
interpreted: $(STAMP)
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/interpreted triton==3.6.0 numpy==2.3.5
	PYTHONPATH=$(VENV)/interpreted $(BIN)/python -m pytest -k interpreted tests/decay/test_fused.py \
		tests/formats/test_launches.py tests/formats/test_thin.py tests/nn/test_few_rows.py tests/nn/test_one_row.py \
		tests/nn/test_one_token.py tests/integrations/test_decoding_attention.py tests/experiments/models/test_normalized.py

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

# Not --quiet: it would hide warnings from --strict.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "the site is site/index.html"

env: $(STAMP)

# torch goes in first and pinned: a looser requirement with none installed pulls gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "factorized needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,text,vision]'
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
