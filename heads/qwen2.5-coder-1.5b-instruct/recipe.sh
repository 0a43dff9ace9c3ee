#!/usr/bin/env bash
# How this head was made, but out of the 0.5B's first head. It goes on where it was stopped, by MINUTES too: see ../step.sh.
#   answers.jsonl: what the 0.5B's recipe wrote; README.md says why not the 1.5B's own.
set -euo pipefail
. "$(dirname "$0")/../step.sh"

readonly TARGET=${TARGET:-Qwen/Qwen2.5-Coder-1.5B-Instruct} SMALL=${SMALL:-Qwen/Qwen2.5-Coder-0.5B-Instruct}
readonly ANSWERS=${1:?answers.jsonl} OUT=${2:?folder}

mkdir -p "$OUT/run" "$OUT/second"
split "$ANSWERS" "$OUT"
options=(--optimizer adamw --held-out-data "$OUT/held.jsonl" --cache-states --length 768 --loss lk --steps 3 --batch-size 4 --epochs 1
    --save-every 20 --evaluate-every 1000)
step train "$TARGET" "$OUT/first.jsonl" "$OUT/run" "${options[@]}" --learning-rate 4e-4 \
    --from "$(dirname "$0")/../qwen2.5-coder-0.5b-instruct-2" --from-target "$SMALL"
# Once more, more slowly, on the same states.
ln -sfn ../run/states "$OUT/second/states"
step train "$TARGET" "$OUT/first.jsonl" "$OUT/second" "${options[@]}" --learning-rate 1e-4 --seed 1 --from "$OUT/run/head"
specdec export "$OUT/second/head" "$OUT/head" --layout int8
