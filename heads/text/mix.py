"""Choose texts to train on: so many tokens of each kind, and some of each to evaluate on.

    python mix.py TARGET OUT KIND=TOKENS... [--more ANSWERS.jsonl.gz] [--longest 768] [--held-out 10]

Writes OUT/learn.jsonl and OUT/held.jsonl, for `specdec train`: what TARGET's shards hold of each kind, in an order that
is drawn once for all. ANSWERS, as `specdec regenerate` or others wrote them, are the kind "answers". Texts of more
than --longest tokens are left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections import defaultdict
from pathlib import Path

from shards import Entry, texts
from transformers import AutoTokenizer

from examples.demo.loading import locate
from specdec.data.conversations import Encoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder, hub id or one of the demo's models")
    parser.add_argument("out", type=Path)
    parser.add_argument("kinds", nargs="+", metavar="KIND=TOKENS")
    parser.add_argument("--more", type=Path)
    parser.add_argument("--longest", type=int, default=768)
    parser.add_argument("--held-out", type=int, default=10)
    given = parser.parse_args()
    wanted = {kind: int(tokens) for kind, _, tokens in (each.partition("=") for each in given.kinds)}

    path = locate(given.target)
    encode = Encoder(AutoTokenizer.from_pretrained(path))
    there: dict[str, list[Entry]] = defaultdict(list)
    for entry in texts(path):
        there[entry["kind"]].append(entry)
    if given.more is not None:
        with gzip.open(given.more, "rt", encoding="utf-8") as file:
            there["answers"] = [json.loads(line) for line in file]
    missing = sorted(set(wanted) - set(there))
    if missing:
        parser.error(f"no texts of {', '.join(missing)}: there are {', '.join(sorted(there))}")

    draws = random.Random(0)
    learnt: list[Entry] = []
    held_out: list[Entry] = []
    for kind, most in wanted.items():
        draws.shuffle(there[kind])
        tokens = held = 0
        for entry in there[kind]:
            sizes = [len(text.ids) for text in encode(entry)]
            if not sizes or max(sizes) > given.longest:
                continue
            if held < given.held_out:
                held_out.append(entry)
                held += 1
                continue
            learnt.append(entry)
            tokens += sum(sizes)
            if tokens > most:
                break
        print(f"{kind}: {tokens} tokens")
    draws.shuffle(learnt)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, found in (("learn", learnt), ("held", held_out)):
        with (given.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in found)


if __name__ == "__main__":
    main()
