#!/usr/bin/env bash
# How this head was made. It goes on where it was stopped, by MINUTES too: see ../step.sh.
#   prompts.jsonl: {"prompt": ...} per line; see README.md for what they were.
set -euo pipefail
. "$(dirname "$0")/../step.sh"

readonly TARGET=${TARGET:-Qwen/Qwen2.5-Coder-0.5B-Instruct} PROMPTS=${1:?prompts.jsonl} OUT=${2:?folder}

mkdir -p "$OUT"
step regenerate "$TARGET" "$PROMPTS" "$OUT/answers.jsonl" --max-new-tokens 256 \
    --temperature 0 --temperature 0.7 --temperature 0 --temperature 1

# A third of the texts first, then, from that head on, the others; then all, with more tokens to draft.
split "$OUT/answers.jsonl" "$OUT"
cat "$OUT/first.jsonl" "$OUT/rest.jsonl" > "$OUT/both.jsonl"
step train "$TARGET" "$OUT/first.jsonl" "$OUT/first" --held-out-data "$OUT/held.jsonl" --cache-states \
    --optimizer adamw --intermediate-size 2048 --steps 3 --epochs 5 --learning-rate 1.2e-3 --save-every 50 --evaluate-every 400
step train "$TARGET" "$OUT/rest.jsonl" "$OUT/rest" --held-out-data "$OUT/held.jsonl" --cache-states \
    --optimizer adamw --from "$OUT/first/head" --steps 3 --epochs 2 --learning-rate 8e-4 --save-every 50 --evaluate-every 400
step train "$TARGET" "$OUT/both.jsonl" "$OUT/all" --held-out-data "$OUT/held.jsonl" --cache-states \
    --optimizer adamw --from "$OUT/rest/head" --draft-vocab 12288 --loss lk --steps 3 --length 768 --batch-size 8 --rows-at-once 4 \
    --epochs 1 --learning-rate 2e-4 --save-every 40 --evaluate-every 152
