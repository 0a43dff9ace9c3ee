#!/usr/bin/env bash
# Have a target answer the prompts that it has not answered yet: answer.sh MODEL [MINUTES [MORE_PROMPTS.jsonl.gz]].
# Every MINUTES (30) what was answered becomes a shard beside this file, to be committed. Stopped in any way, the same
# command goes on; so it does in a fresh checkout, where the shards say what is done. MODEL is a folder, a hub id or one
# of the demo's models, which is fetched.
set -euo pipefail
readonly HERE=$(dirname "$(realpath "$0")") MINUTES=${2:-30} MORE=${3:-}
export PYTHONPATH=${PYTHONPATH:-$HERE/../..}

target=$(python -c 'import sys; from examples.demo.loading import locate; print(locate(sys.argv[1]))' "${1:?model}")
work=${WORK:-$HOME/.cache/specdec/text/$(basename "$target")}
pack() { python "$HERE/shards.py" pack "$target" "$work/left.jsonl" "$work/answers.jsonl"; }

mkdir -p "$work"
[ ! -e "$work/answers.jsonl" ] || pack
[ -e "$work/left.jsonl" ] || python "$HERE/shards.py" left "$target" "$work/left.jsonl" ${MORE:+"$MORE"}
said="run the same command again to resume"
while [[ $said == *"run the same command again to resume"* ]]; do
    said=$(nice -n 19 python -m specdec regenerate "$target" "$work/left.jsonl" "$work/answers.jsonl" --batch-size 64 \
        --max-prompt-tokens 1600 --temperature 0 --temperature 0.7 --temperature 0 --temperature 1 --max-minutes "$MINUTES")
    pack
done
rm -r "$work"
