#!/bin/sh
# Install Lightning and Hugging Face's Trainer (some GB with PyTorch) into build/frameworks/libraries, and see whether they
# can keep their checkpoints on a mount; arguments go to `python -m benchmarks.frameworks`.
#
#   sh benchmarks/frameworks/run.sh
#   sh benchmarks/frameworks/run.sh --framework lightning --front native
#
# TORCH_INDEX=URL takes PyTorch from there (https://download.pytorch.org/whl/cpu has builds without CUDA).
set -eu
cd "$(dirname "$0")/../.."

if [ "$(id -u)" = 0 ]; then as_root=; else as_root="sudo -E"; fi

TIERFS_INSTALL_EXTRAS=test sh deploy/install.sh

libraries=build/frameworks/libraries
stamp="1 ${TORCH_INDEX:-}"
if [ "$stamp" != "$(cat "$libraries/stamp" 2>/dev/null)" ]; then
    echo "frameworks: PyTorch, Lightning and transformers into $libraries" >&2
    rm -rf "$libraries"
    .venv/bin/python -m venv "$libraries"
    pip() { "$libraries/bin/python" -m pip --disable-pip-version-check --no-input "$@" >&2; }
    if [ -n "${TORCH_INDEX:-}" ]; then
        pip install --quiet --index-url "$TORCH_INDEX" torch
    fi
    pip install --quiet torch numpy lightning transformers accelerate
    echo "$stamp" >"$libraries/stamp"
fi

exec $as_root .venv/bin/python -m benchmarks.frameworks --interpreter "$PWD/$libraries/bin/python" "$@"
