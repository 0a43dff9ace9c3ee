"""Prompts and a target's answers, in compressed shards that are never rewritten.

    python shards.py left TARGET OUT [MORE]      prompts that no shard of TARGET answers, for `specdec regenerate`
    python shards.py pack TARGET LEFT ANSWERS    put answers into the next shard, as far as none holds them
    python shards.py texts TARGET OUT            prompts with their answers, for `specdec train`
    python shards.py count TARGET                what the shards hold, by kind

A prompt's id is a digest of its messages. `prompts/` holds the prompts, a folder beside it per target its answers: the
last part of TARGET's name is the folder's. MORE is a file of prompts that are no part of `prompts/`: answered ones are
added to it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Entry = dict[str, Any]


def identity(messages: list[dict[str, str]]) -> str:
    """Of a prompt: a digest of its roles and contents."""
    said = json.dumps([[message["role"], message["content"]] for message in messages], ensure_ascii=False)
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def entries(folder: Path) -> Iterator[Entry]:
    """Of all shards of a folder, in order."""
    for shard in sorted(folder.glob("*.jsonl.xz")):
        with lzma.open(shard, "rt", encoding="utf-8") as file:
            yield from map(json.loads, file)


def add(folder: Path, found: Iterable[Entry]) -> Path | None:
    """Write a folder's next shard; None if there is nothing to write."""
    lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in found]
    if not lines:
        return None
    folder.mkdir(exist_ok=True)
    shard = folder / f"{len(list(folder.glob('*.jsonl.xz'))):03}.jsonl.xz"
    partial = shard.with_suffix(".part")
    with lzma.open(partial, "wt", encoding="utf-8", preset=9 | lzma.PRESET_EXTREME) as file:
        file.writelines(lines)
    partial.rename(shard)
    return shard


def folder_of(target: str) -> Path:
    return HERE / Path(target).name.lower()


def left(target: str, out: Path, more: Path | None = None) -> int:
    """Write the prompts that are still to be answered, those of `prompts/` before MORE's; how many."""
    answered = {entry["id"] for entry in entries(folder_of(target))}
    asked = list(entries(HERE / "prompts"))
    if more is not None:
        open_file = gzip.open if more.suffix == ".gz" else open
        with open_file(more, "rt", encoding="utf-8") as file:
            asked += map(_prompt, file)
    unanswered = {entry["id"]: entry for entry in asked if entry["id"] not in answered}
    with out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in unanswered.values())
    return len(unanswered)


def _prompt(line: str) -> Entry:
    """An entry of `prompts/` for a line {"prompt": ..., "source": ...}."""
    given = json.loads(line)
    messages = [{"role": "user", "content": given["prompt"]}]
    return {"id": identity(messages), "kind": given["source"], "sources": ["instructions"], "messages": messages}


def pack(target: str, asked: Path, answers: Path) -> Path | None:
    """Add what `specdec regenerate TARGET ASKED ANSWERS` has written so far."""
    done = {entry["id"] for entry in entries(folder_of(target))}
    known = {entry["id"] for entry in entries(HERE / "prompts")}
    prompts = [json.loads(line) for line in asked.read_text(encoding="utf-8").splitlines()]
    fresh, unknown = [], []
    for line in answers.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # being written
        answered = json.loads(line)
        prompt = prompts[answered["id"]]
        if prompt["id"] in done:
            continue
        said = [message["content"] for message in answered["messages"] if message["role"] == "assistant"]
        kept = {name: answered[name] for name in ("temperature", "max_new_tokens", "finish")}
        fresh.append({"id": prompt["id"], **kept, "answers": said})
        if prompt["id"] not in known:
            unknown.append(prompt)
    add(HERE / "prompts", unknown)
    return add(folder_of(target), fresh)


def texts(target: str) -> Iterator[Entry]:
    """Conversations up to their last answer, as `specdec train` reads them."""
    prompts = {entry["id"]: entry for entry in entries(HERE / "prompts")}
    for entry in entries(folder_of(target)):
        prompt, messages = prompts[entry["id"]], []
        answers = iter(entry["answers"])
        for message in prompt["messages"]:
            messages.append(message)
            if message["role"] == "user":
                answer = next(answers, None)
                if answer is None:  # an earlier one was cut off
                    messages.pop()
                    break
                messages.append({"role": "assistant", "content": answer})
        yield {"id": entry["id"], "kind": prompt["kind"], "finish": entry["finish"], "messages": messages}


def main(command: str = "", *arguments: str) -> None:
    if command == "left" and len(arguments) in (2, 3):
        target, out, *more = arguments
        print(f"{left(target, Path(out), *map(Path, more))} prompts to answer in {out}")
    elif command == "pack" and len(arguments) == 3:
        print(pack(arguments[0], Path(arguments[1]), Path(arguments[2])) or "nothing new")
    elif command == "texts" and len(arguments) == 2:
        with open(arguments[1], "w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in texts(arguments[0]))
    elif command == "count" and len(arguments) == 1:
        print(dict(Counter(entry["kind"] for entry in texts(arguments[0]))))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
