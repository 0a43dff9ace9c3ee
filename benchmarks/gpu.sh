#!/usr/bin/env bash
# On a machine with a GPU: an environment if this one lacks something, benchmarks/gpu, gpu-results.tar.gz.
#   benchmarks/gpu.sh            an index with builds for CUDA may be given: TORCH_INDEX=... benchmarks/gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."

python=python3
if ! "$python" -c "import torch, transformers, accelerate, safetensors, rich, typer, matplotlib; import benchmarks.gpu.run" \
    2>/dev/null; then
    make .venv/.dev
    python=.venv/bin/python
fi
status=0
"$python" -m benchmarks.gpu --out gpu-results "$@" || status=$?
tar czf gpu-results.tar.gz gpu-results
echo "packed: $PWD/gpu-results.tar.gz"
exit "$status"
