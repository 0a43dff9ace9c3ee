#!/usr/bin/env bash
# On a machine with a GPU, from nothing to packed results: environment, benchmarks/gpu.py, gpu-results.tar.gz.
#   benchmarks/gpu.sh            an index with builds for CUDA may be given: TORCH_INDEX=... benchmarks/gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."

make .venv/.dev
status=0
.venv/bin/python -m benchmarks.gpu --out gpu-results "$@" || status=$?
tar czf gpu-results.tar.gz gpu-results
echo "packed: $PWD/gpu-results.tar.gz"
exit "$status"
