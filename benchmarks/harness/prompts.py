"""Questions: reading, selecting and encoding them; `Job`: the prompts of one measured call.

Files are JSONL in their published formats: Spec-Bench's and MT-bench's `question_id`, `category` and `turns`; GSM8K's
`question`; HumanEval's and MBPP's `prompt` or `text`, and `task_id`; Alpaca's `instruction` and `input`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.data.conversations import encode_prompt

# Spec-Bench reports MT-bench's eight categories as one of its six groups.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
MIXED = "mixed"
TEXTS = ("question", "prompt", "text")
WARM_UP = "Name three rivers and, for each of them, a town on its banks."


Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Question:
    """A question of one or more user messages (`turns`), which counts for the column `group` of the table."""

    id: str
    group: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """Input of one `generate()` call: a prompt (T,) int64 per row."""

    id: str
    group: str
    prompts: tuple[Tensor, ...]


Grouped = TypeVar("Grouped", Question, Job)


def read(path: Path, coding_apart: bool = False) -> list[Question]:
    """Read all questions in the order of the file.

    Args:
        coding_apart: count MT-bench's coding questions as a separate seventh group.
    """
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            questions.append(_question(entry, f"{path.stem}-{number}", path.stem, coding_apart))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected Spec-Bench's fields question_id, category and turns, or a question, "
                f"prompt, text or instruction; got {error!r}"
            ) from error
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return questions


def _question(entry: dict[str, Any], name: str, group: str, coding_apart: bool) -> Question:
    if "turns" in entry:
        category, turns = entry["category"], tuple(map(str, entry["turns"]))
        of_mt_bench = category in MT_BENCH and not (coding_apart and category == "coding")
        turns[0]  # there is one
        return Question(str(entry["question_id"]), "mt_bench" if of_mt_bench else category, turns)
    if "instruction" in entry:
        text = "\n\n".join(part for part in (entry["instruction"], entry.get("input")) if part)
    else:
        text = entry[next((field for field in TEXTS if field in entry), TEXTS[0])]
    return Question(str(entry.get("task_id", name)), group, (str(text),))


def choose(questions: Sequence[Question], per_group: int) -> list[Question]:
    """Select `per_group` evenly spaced questions of each group, so that all of MT-bench's categories are included."""
    chosen = []
    for members in _by_group(questions):
        count = min(per_group, len(members))
        chosen += [members[i * len(members) // count] for i in range(count)]
    return chosen


def _by_group(questions: Iterable[Grouped]) -> Collection[list[Grouped]]:
    groups: dict[str, list[Grouped]] = {}
    for question in questions:
        groups.setdefault(question.group, []).append(question)
    return groups.values()


def encode(
    question: Question,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
    before: Messages = (),
    **template: Any,
) -> Job:
    """Encode a turn in the tokenizer's chat template, shortened in the middle since instructions are at the ends.

    Args:
        before: the conversation up to this turn.
        template: arguments of the chat template, for example `enable_thinking`.
    """
    turn = len(before) // 2
    name, text = turn_name(question, turn), question.turns[turn]
    while True:
        ids = _encode(before, text, tokenizer, template)
        excess = 0 if max_tokens is None else len(ids) - max_tokens
        if excess <= 0:
            return Job(name, question.group, (ids,))
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        left = len(tokens) - excess
        if left < 1:
            raise ValueError(f"max_prompt_tokens={max_tokens} leaves nothing of question {name}")
        text = tokenizer.decode(tokens[: left - left // 2]) + tokenizer.decode(tokens[len(tokens) - left // 2 :])


def turn_name(question: Question, turn: int) -> str:
    """Job id of a turn, which is counted from 0."""
    return question.id if turn == 0 else f"{question.id} turn {turn + 1}"


def cut_into_jobs(questions: Sequence[Job], batch_size: int) -> list[Job]:
    """Form batches with questions of each group in turn, as on a server. An incomplete batch is left out."""
    if batch_size == 1:
        return list(questions)
    dealt = [q for layer in zip_longest(*_by_group(questions)) for q in layer if q is not None]
    if len(dealt) < batch_size:
        raise ValueError(f"{len(dealt)} prompts do not fill a batch of {batch_size}: raise --per-category")
    batches = [dealt[i : i + batch_size] for i in range(0, len(dealt) - batch_size + 1, batch_size)]
    return [Job("+".join(q.id for q in batch), MIXED, tuple(q.prompts[0] for q in batch)) for batch in batches]


def warm_up(tokenizer: PreTrainedTokenizerBase, batch_size: int) -> Job:
    """Make a warm-up job from a question that is not measured."""
    return Job("warm-up", MIXED, (_encode([], WARM_UP, tokenizer, {}),) * batch_size)


def left_padded(prompts: Sequence[Tensor], pad: int, device: torch.device) -> dict[str, Tensor]:
    """Pad prompts on the left; returns `input_ids` and `attention_mask`, (B, T) int64."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _encode(before: Messages, text: str, tokenizer: PreTrainedTokenizerBase, template: dict[str, Any]) -> Tensor:
    messages = [*before, {"role": "user", "content": text}]
    if tokenizer.chat_template is None:  # a base model reads the turns as one text
        messages = [{"role": "user", "content": "\n\n".join(str(message["content"]) for message in messages)}]
    return torch.tensor(encode_prompt(messages, tokenizer, **template))
