# Short names for the scripts; each of them also runs without make.

PYTHON = .venv/bin/python

.PHONY: help install demo test lint quick-bench clean

help:
	@echo "make install      system packages, .venv, .venv/bin/tierfs"
	@echo "make demo         a mount with sample data, measured (SOURCE=s3://... for a bucket)"
	@echo "make test         all tests, SeaweedFS as the S3 server included"
	@echo "make lint         ruff, mypy, import contracts"
	@echo "make quick-bench  ratios to a plain directory and to the store's raw rate"

install:
	sh deploy/install.sh

demo:
	sh deploy/demo.sh

test:
	sh tests/run.sh

lint:
	TIERFS_INSTALL_EXTRAS=test sh deploy/install.sh
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy tierfs
	.venv/bin/lint-imports

quick-bench: install
	$(PYTHON) -m benchmarks.quick

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
