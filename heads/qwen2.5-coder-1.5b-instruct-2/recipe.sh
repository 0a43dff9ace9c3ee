#!/usr/bin/env bash
# How this head was made, out of the 0.5B's, nearly (see README.md). It goes on where it was stopped, by MINUTES too: see
# ../step.sh.
#   texts.jsonl: README.md says of what, and why not the 1.5B's own answers.
set -euo pipefail
. "$(dirname "$0")/../step.sh"

readonly TARGET=${TARGET:-Qwen/Qwen2.5-Coder-1.5B-Instruct} SMALL=${SMALL:-Qwen/Qwen2.5-Coder-0.5B-Instruct}
readonly TEXTS=${1:?texts.jsonl} OUT=${2:?folder}

step train "$TARGET" "$TEXTS" "$OUT/run" --held-out 70 --cache-states --loss ce+lk --length 1024 --batch-size 6 --steps 4 \
    --epochs 2 --learning-rate 3.5e-4 --save-every 40 --evaluate-every 0 \
    --from "$(dirname "$0")/../qwen2.5-coder-0.5b-instruct-2" --from-target "$SMALL"
specdec export "$OUT/run/head" "$OUT/head" --layout int8
