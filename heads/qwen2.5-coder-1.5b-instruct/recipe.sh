#!/usr/bin/env bash
# How this head was made, out of the 0.5B's. It goes on where it was stopped, by MINUTES too: see ../step.sh.
#   answers.jsonl: what the 0.5B's recipe answered; README.md says why not the 1.5B's own.
set -euo pipefail
. "$(dirname "$0")/../step.sh"

readonly TARGET=${TARGET:-Qwen/Qwen2.5-Coder-1.5B-Instruct} SMALL=${SMALL:-Qwen/Qwen2.5-Coder-0.5B-Instruct}
readonly ANSWERS=${1:?answers.jsonl} OUT=${2:?folder}

mkdir -p "$OUT"
# Every third text of each twelfth of them: what is held out is then what the 0.5B's last stage held out.
awk -v n="$(wc -l < "$ANSWERS")" '{ part = int((12 * NR - 1) / n) } (NR - 1 - int(part * n / 12)) % 3 == 0' \
    "$ANSWERS" > "$OUT/third.jsonl"
step train "$TARGET" "$OUT/third.jsonl" "$OUT/run" --cache-states --held-out 12 --length 768 \
    --from "$(dirname "$0")/../qwen2.5-coder-0.5b-instruct" --from-target "$SMALL" \
    --loss lk --steps 3 --batch-size 4 --epochs 1 --learning-rate 4e-4 --save-every 20 --evaluate-every 1000
specdec export "$OUT/run/head" "$OUT/head" --layout int8
