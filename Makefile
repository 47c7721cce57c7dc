# Short names for the scripts; each of them also runs without make.

PYTHON = .venv/bin/python
CMAKE = PATH=$(CURDIR)/.venv/bin:$$PATH cmake
SECONDS = 60
FUZZERS =
COMPARE =
TRAINING =
FRAMEWORKS =
STRIKES = 200
SEED =
SANITIZE = address;undefined

.PHONY: help install demo test lint format native fuzz test-native-sanitized quick-bench compare training frameworks faults kills clean

help:
	@echo "make install      system packages, .venv, .venv/bin/tierfs"
	@echo "make demo         a mount with sample data, measured (SOURCE=s3://... for a bucket)"
	@echo "make test         all tests, SeaweedFS as the S3 server included"
	@echo "make lint         ruff, mypy, import contracts, format of the C sources"
	@echo "make format       formats the C sources"
	@echo "make native       builds the native parts into tierfs_native/, warnings are errors"
	@echo "make fuzz         each parser of the front with libFuzzer for a minute (SECONDS=600), clang is installed"
	@echo "make test-native-sanitized  the tests that mount, the front built with sanitizers"
	@echo "make quick-bench  ratios to a plain directory and to the store's raw rate"
	@echo "make compare      tierfs and its peers, side by side, 30 minutes (COMPARE=--quick: 5)"
	@echo "make faults       kills, outages, power cuts at a mount (STRIKES=200 SEED=7), everything checked after each"
	@echo "make kills        the engine killed 100 times under load (KILLS=100), back within 5 s each time: a quiet machine"
	@echo "make training     data loaders, model files and DLIO on a mount and on a directory"
	@echo "make frameworks   Lightning and Hugging Face's Trainer with checkpoints on a mount (installs some GB)"

install:
	sh deploy/install.sh

demo:
	sh deploy/demo.sh

test:
	sh tests/run.sh

lint:
	TIERFS_INSTALL_EXTRAS=test sh deploy/install.sh
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports
	find tierfs_native -name '*.[ch]' -exec .venv/bin/clang-format --dry-run --Werror {} +

format:
	TIERFS_INSTALL_EXTRAS=test sh deploy/install.sh
	find tierfs_native -name '*.[ch]' -exec .venv/bin/clang-format -i {} +

native:
	$(CMAKE) -S tierfs_native -B build/native -DTIERFS_WERROR=ON -DTIERFS_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
		-DPython_EXECUTABLE=$(abspath $(PYTHON))
	$(CMAKE) --build build/native --parallel 2
	$(CMAKE) --install build/native --prefix .

# Prints seed and coverage; inputs that crash are kept in build/fuzz/crashes and named. FUZZERS="fuzz_relay fuzz_small"
fuzz:
	TIERFS_INSTALL_EXTRAS=test sh deploy/install.sh
	PYTHON=$(abspath $(PYTHON)) sh tierfs_native/fuzz/run.sh $(SECONDS) $(FUZZERS)

# The front with sanitizers under the tests that mount. SANITIZE=thread finds races instead. TESTS="-k rename"
test-native-sanitized:
	$(CMAKE) -S tierfs_native -B build/sanitized -DTIERFS_WERROR=ON -DCMAKE_BUILD_TYPE=Debug \
		-DTIERFS_SANITIZE="$(SANITIZE)" -DPython_EXECUTABLE=$(abspath $(PYTHON))
	$(CMAKE) --build build/sanitized --parallel 2 --target tierfs-front
	TIERFS_NEED_NATIVE=1 TIERFS_FRONT_PATH=$(CURDIR)/build/sanitized/tierfs-front UBSAN_OPTIONS=print_stacktrace=1 \
		setarch --addr-no-randomize $(abspath $(PYTHON)) -m pytest -p no:cacheprovider --front native \
		tests/mount tests/native/test_front_*.py tests/native/test_passthrough*.py tests/native/test_ranges.py $(TESTS)

quick-bench: install
	$(PYTHON) -m benchmarks.quick

compare:
	sh benchmarks/compare/run.sh $(COMPARE)

training:
	sh benchmarks/training/run.sh $(TRAINING)

frameworks:
	sh benchmarks/frameworks/run.sh $(FRAMEWORKS)

# Prints its seed; an episode that fails is kept and named.
faults:
	TIERFS_INSTALL_EXTRAS=test sh deploy/install.sh
	PYTHONDONTWRITEBYTECODE=1 $(PYTHON) -m tests.support.campaign.run --strikes $(STRIKES) $(if $(SEED),--seed $(SEED))

KILLS = 100

kills:
	TIERFS_INSTALL_EXTRAS=test sh deploy/install.sh
	TIERFS_ENGINE_KILLS=$(KILLS) $(PYTHON) -m pytest tests/native/test_front_life.py -k again_and_again -s -q

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f tierfs_native/tierfs-front tierfs_native/_batch.*.so tierfs_native/_transfer.*.so tierfs_native/_why_missing.txt
