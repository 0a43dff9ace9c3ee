#!/usr/bin/env bash
# How this head was made, nearly (see README.md). It goes on where it was stopped, by MINUTES too: see ../step.sh.
#   texts.jsonl: the target's answers; README.md says of what, and how to make such a file.
set -euo pipefail
. "$(dirname "$0")/../step.sh"

readonly TARGET=${TARGET:-Qwen/Qwen2.5-Coder-0.5B-Instruct} TEXTS=${1:?texts.jsonl} OUT=${2:?folder}

step train "$TARGET" "$TEXTS" "$OUT/run" --held-out 240 --cache-states --draft-vocab 12288 --loss ce+lk --length 1024 \
    --batch-size 16 --steps 5 --epochs 1.6 --learning-rate 1.5e-3 --save-every 200 --evaluate-every 0
specdec export "$OUT/run/head" "$OUT/head" --layout int8
