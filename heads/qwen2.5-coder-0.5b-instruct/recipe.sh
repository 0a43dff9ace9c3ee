#!/usr/bin/env bash
# How this head was made. Each command goes on where it was stopped, and may be given --max-minutes.
#   prompts.jsonl: {"prompt": ...} per line; see README.md for what they were.
set -euo pipefail

readonly TARGET=${TARGET:-Qwen/Qwen2.5-Coder-0.5B-Instruct} PROMPTS=${1:?prompts.jsonl} OUT=${2:?folder}

mkdir -p "$OUT"
specdec regenerate "$TARGET" "$PROMPTS" "$OUT/answers.jsonl" --max-new-tokens 256 \
    --temperature 0 --temperature 0.7 --temperature 0 --temperature 1
specdec train "$TARGET" "$OUT/answers.jsonl" "$OUT" --cache-states \
    --max-texts 1940 --held-out 8 --intermediate-size 2048 --steps 3 --epochs 5 --learning-rate 1.2e-3 \
    --save-every 50 --evaluate-every 400
