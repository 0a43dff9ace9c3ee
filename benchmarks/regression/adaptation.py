"""Measure what a head gains by learning from the answers that it has just drafted.

    python -m benchmarks.regression.adaptation --target PATH --head PATH --prompts questions.jsonl --answers out.jsonl

The questions of a group come one after the other. A chain is drafted after every position of an answer by teacher
forcing, then the head learns from this answer: its states, and the target's distribution at each of its tokens. Groups
start with the head as it is. At T = 1 the length is computed from the acceptance probabilities of the chain's tokens.
Answers are kept in --answers. They are the target's greedy ones, or drawn with --temperature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.harness.options import Bench, Options
from benchmarks.harness.script import Dtype, MaxPromptTokens, Threads, bad_input_ends
from benchmarks.harness.table import number, table
from benchmarks.regression.teacher_forcing import answers_of_jobs
from specdec.data.packed_dataset import collate
from specdec.heads.eagle3.checkpoint import load
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.kinds import copy_of
from specdec.training.evaluate import drafted_logits
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.teacher.base import LocalTeacher
from specdec.training.teacher.target_logits import TargetLogits

STEPS = 3  # drafted tokens that are learned
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Learning:
    """Settings with which a head learns from an answer.

    Attributes:
        rate: learning rate of AdamW.
        parts: beginnings of the names of the weights that are learned; "" for all.
        updates: updates per answer.
    """

    rate: float
    parts: tuple[str, ...] = ("",)
    updates: int = 1


OUTPUT = "norm", "lm_head"
METHODS: dict[str, Learning | None] = {
    "no learning": None,
    **{f"output norm and LM head, {rate:g}": Learning(rate, OUTPUT) for rate in (3e-5, 1e-4, 3e-4)},
    **{f"all weights, {rate:g}": Learning(rate) for rate in (1e-5, 3e-5, 1e-4)},
    "all weights, 3e-5, 4 updates an answer": Learning(3e-5, updates=4),
}


@dataclass(frozen=True)
class Answer:
    """A text that the target wrote.

    Attributes:
        batch: the text as a training row: ids, learn, documents, states and over_all.
        prompt: number of tokens of the prompt.
    """

    batch: dict[str, Tensor]
    prompt: int

    @property
    def text(self) -> Tensor:
        """(T,) int64."""
        return self.batch["ids"]


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the target.")],
    head: Annotated[str, typer.Option(help="Path or hub id of its EAGLE-3 head.")],
    prompts: Annotated[Path, typer.Option(help="File of questions (JSONL).", exists=True, dir_okay=False)],
    answers: Annotated[Path, typer.Option(help="File to keep the target's answers (JSONL).", dir_okay=False)],
    groups: Annotated[str, typer.Option(help="Groups of questions.")] = "translation,summarization,rag,coding",
    per_category: Annotated[int, typer.Option(min=2, help="Questions per group.")] = 20,
    methods: Annotated[str, typer.Option(help="Methods that contain this text, and no learning.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 192,
    max_prompt_tokens: MaxPromptTokens = None,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    draft_length: Annotated[int, typer.Option(min=1, help="Draft tokens per chain.")] = 5,
    dtype: Dtype = "float32",
    threads: Threads = None,
) -> None:
    options = Options(
        target,
        prompts,
        per_category=per_category,
        coding_apart=True,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=dtype,
        threads=threads,
    )
    bench = Bench(options)
    jobs = [job for job in bench.jobs if job.group in groups.split(",")]
    with bad_input_ends():
        for group in groups.split(","):
            if [job.group for job in jobs].count(group) < 2:
                raise ValueError(f"no two questions of the group {group} in {prompts}: choose others by --groups")
    written = answers_of_jobs(bench, jobs, f"eagle3:{head}", answers)
    first = load(head).float()
    session = Session(LocalTeacher.of(bench.target, first), first, draft_length)
    texts = {
        group: session.read([(job.prompts[0], written[job.id]) for job in jobs if job.group == group])
        for group in groups.split(",")
    }
    rows = []
    for name, learning in METHODS.items():
        if learning is None or methods in name:
            cells, seconds = [], 0.0
            for group in texts.values():
                lengths, taken = session.run(group, learning)
                cells.append(
                    " | ".join(f"{number(first_half)}, {number(last)}" for first_half, last in lengths.T.tolist())
                )
                seconds += taken
            rows.append([name, *cells, number(seconds) if learning else "-"])
    tokens = [sum(len(answer.text) - answer.prompt for answer in group) for group in texts.values()]
    named = [f"{group}, {count} tokens" for group, count in zip(texts, tokens, strict=True)]
    print("T = 0: first half of the questions, last half | T = 1: the same\n")
    print(table(["learning", *named, "s of learning"], rows))


class Session:
    """A target, and a head that learns from its answers.

    Args:
        teacher: the target.
        head: the head, in float32.
        steps: draft tokens per chain.
    """

    def __init__(self, teacher: LocalTeacher, head: Eagle3Head, steps: int):
        self.teacher, self.head, self.steps = teacher, head, steps
        self.embedding = teacher.embedding.float()
        restricted = teacher.logits.restricted(head.draft_to_target)
        self.logits = TargetLogits(restricted.weight.float(), restricted.bias, restricted.scale, restricted.cap)

    @torch.no_grad()
    def read(self, texts: Sequence[tuple[Tensor, list[int]]]) -> list[Answer]:
        """Compute the target's states of texts, each given as its prompt and the answer."""
        whole = [torch.cat([prompt, prompt.new_tensor(answer)]) for prompt, answer in texts]
        states = dict(self.teacher.read(whole))
        return [self._answer(ids, len(texts[i][0]), states[i]) for i, ids in enumerate(whole)]

    def _answer(self, ids: Tensor, prompt: int, states: Tensor) -> Answer:
        learn = torch.arange(len(ids)) >= prompt
        over_all = self.teacher.logits.over_all(states[None], learn[None])[0]
        documents = torch.zeros_like(ids)
        batch = {"ids": ids, "learn": learn, "documents": documents, "states": states.float(), "over_all": over_all}
        return Answer(batch, prompt)

    def run(self, answers: Sequence[Answer], learning: Learning | None) -> tuple[Tensor, float]:
        """Mean tokens per round in each half of the answers, (2 halves, 2 temperatures), and seconds of learning."""
        head: Any = copy_of(self.head, torch.float32)
        learner = None if learning is None else Learner(head, learning, self)
        lengths, seconds = [], 0.0
        for answer in answers:
            lengths.append(self.length(head, answer))
            if learner is not None:
                start = perf_counter()
                learner.learn(answer)
                seconds += perf_counter() - start
        half = len(lengths) // 2
        return torch.stack([torch.stack(part).nanmean(0) for part in (lengths[:half], lengths[half:])]), seconds

    @torch.no_grad()
    def length(self, head: Eagle3Head, answer: Answer) -> Tensor:
        """Mean tokens per round of chains after every position of an answer, (2,): at T = 0 and at T = 1."""
        text, first = answer.text, answer.prompt - 1
        last = len(text) - 1 - self.steps
        if last <= first:
            return torch.full((2,), torch.nan)
        H = self.logits.weight.shape[1]
        states, final = answer.batch["states"].split([answer.batch["states"].shape[1] - H, H], 1)
        p = (self.logits(final) - answer.batch["over_all"][:, :1]).exp()
        chances = torch.zeros(2, self.steps, last - first)
        target = self.teacher.model()
        for step, logits in enumerate(drafted_logits(head, target, text, states[None], self.steps, first)):
            q = logits[first:last].softmax(-1)
            chances[0, step] = head.draft_to_target[q.argmax(-1)] == text[first + 2 + step : last + 2 + step]
            chances[1, step] = torch.minimum(p[first + 1 + step : last + 1 + step], q).sum(-1)
        return 1 + chances.cumprod(1).sum((1, 2)) / (last - first)


class Learner:
    """Trains a head on one answer after the other.

    Args:
        head: the head, which is changed.
        learning: the method.
        session: gives the target's embedding and logits.
    """

    def __init__(self, head: Eagle3Head, learning: Learning, session: Session):
        self._updates = learning.updates
        head.requires_grad_(False)
        self._weights = list(_chosen(head, learning.parts))
        for weight in self._weights:
            weight.requires_grad_(True)
        self._objective = Eagle3Objective(head, session.embedding, session.logits, steps=STEPS)
        self._optimizer = torch.optim.AdamW(self._weights, lr=learning.rate, betas=(0.9, 0.95), weight_decay=0.0)

    def learn(self, answer: Answer) -> None:
        for _ in range(self._updates):
            self._optimizer.zero_grad()
            self._objective(**collate([answer.batch]))["loss"].backward()
            nn.utils.clip_grad_norm_(self._weights, 1.0)
            self._optimizer.step()


def _chosen(head: Eagle3Head, parts: Sequence[str]) -> Iterator[nn.Parameter]:
    for name, weight in head.named_parameters():
        if name.startswith(tuple(parts)):
            yield weight


if __name__ == "__main__":
    app()
