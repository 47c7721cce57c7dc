#!/bin/sh
# Install what is missing, and run the training loads on a mount and on a directory; arguments go to
# `python -m benchmarks.training`.
#
#   sh benchmarks/training/run.sh
#   sh benchmarks/training/run.sh --rounds 1 --size 0.1 --loads files,models
#
# PyTorch, TensorFlow and the others (some GB) go into an environment of their own, build/training/libraries.
# TORCH_INDEX=URL takes PyTorch from there (https://download.pytorch.org/whl/cpu has builds without CUDA). The report is
# printed, and written to build/training/ as report.txt, report.html and report.json.
set -eu
cd "$(dirname "$0")/../.."

say() { echo "training: $*" >&2; }

if [ "$(id -u)" = 0 ]; then as_root=; else as_root="sudo -E"; fi

# The store is SeaweedFS, which comes with the extra of the tests.
TIERFS_INSTALL_EXTRAS=report,test sh deploy/install.sh

libraries=build/training/libraries
stamp="1 ${TORCH_INDEX:-}"
if [ "$stamp" != "$(cat "$libraries/stamp" 2>/dev/null)" ]; then
    say "PyTorch, TensorFlow and the others into $libraries"
    rm -rf "$libraries"
    .venv/bin/python -m venv "$libraries"
    pip() { "$libraries/bin/python" -m pip --disable-pip-version-check --no-input "$@" >&2; }
    if [ -n "${TORCH_INDEX:-}" ]; then
        pip install --quiet --index-url "$TORCH_INDEX" torch
    fi
    pip install --quiet torch numpy webdataset safetensors datasets faiss-cpu
    # DLIO names DALI, torchvision and torchaudio among its requirements and imports none of them here. With --no-deps
    # they stay away; what it does import follows.
    pip install --quiet tensorflow-cpu
    pip install --quiet --no-deps dlio-benchmark==2.0.0
    pip install --quiet pillow h5py mpi4py mpich omegaconf psutil pydftracer==1.0.2 hydra-core
    echo "$stamp" >"$libraries/stamp"
fi

mkdir -p build/training
status=0
$as_root .venv/bin/python -m benchmarks.training --interpreter "$PWD/$libraries/bin/python" \
    --json build/training/report.json --html build/training/report.html "$@" >build/training/report.txt || status=$?
cat build/training/report.txt
[ "$status" -ne 0 ] || say "build/training/report.html has plots"
exit "$status"
