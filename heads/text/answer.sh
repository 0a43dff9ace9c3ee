#!/usr/bin/env bash
# Have a target answer the prompts that it has not answered yet: answer.sh MODEL [MINUTES [MORE_PROMPTS.jsonl.gz]].
# Every MINUTES (30) what was answered becomes a shard beside this file, to be committed. Stopped in any way, the same
# command goes on; so it does in a fresh checkout, where the shards say what is done.
set -euo pipefail
readonly HERE=$(dirname "$(realpath "$0")") MODEL=${1:?model} MINUTES=${2:-30} MORE=${3:-}
readonly WORK=${WORK:-$HOME/.cache/specdec/text/$(basename "$MODEL")}

mkdir -p "$WORK"
pack() { python "$HERE/shards.py" pack "$MODEL" "$WORK/left.jsonl" "$WORK/answers.jsonl"; }
[ ! -e "$WORK/answers.jsonl" ] || pack
[ -e "$WORK/left.jsonl" ] || python "$HERE/shards.py" left "$MODEL" "$WORK/left.jsonl" ${MORE:+"$MORE"}
until said=$(nice -n 19 python -m specdec regenerate "$MODEL" "$WORK/left.jsonl" "$WORK/answers.jsonl" --batch-size 64 \
    --max-new-tokens 256 --max-prompt-tokens 1600 --temperature 0 --temperature 0.7 --temperature 0 --temperature 1 \
    --max-minutes "$MINUTES"); pack; [[ $said != *"the same command goes on"* ]]; do :; done
rm -r "$WORK"
