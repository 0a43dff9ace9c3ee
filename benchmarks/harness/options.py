"""`Options`: settings of a measurement; `Bench`: the models, tokenizer and jobs that they define."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.harness.prompts import Job, Messages, Question, choose, cut_into_jobs, encode, read, turn_name, warm_up
from benchmarks.harness.script import load, prepare
from specdec.models.introspection import end_tokens


@dataclass(frozen=True)
class Options:
    """Settings of `compare.py`'s command line that define the measurements."""

    target: str
    prompts: Path
    draft: str | None = None
    per_category: int = 2
    coding_apart: bool = False
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 64
    full_length: bool = False
    temperature: float = 0.0
    batch_size: int = 1
    seed: int = 0
    threads: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    lookup_tokens: int = 10
    ngram_size: int = 3
    draft_lengths: tuple[int, ...] = (2, 4)
    draft_vocab: int = 32768
    proposers: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()  # in addition to the default
    all_turns: bool = False
    thinking: bool | None = None  # `enable_thinking` of the chat template; None: not passed

    @property
    def fingerprinted(self) -> dict[str, Any]:
        """Settings that a measurement depends on, in addition to its method's name.

        Prompts, methods and repeats are not among them, so that they can be added later.
        """
        names = (
            "target draft coding_apart max_prompt_tokens max_new_tokens full_length temperature batch_size seed "
            "threads dtype device ngram_size"
        ).split()
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        settings["prompts"] = hashlib.sha256(self.prompts.read_bytes()).hexdigest()[:16]
        if self.thinking is not None:
            settings["thinking"] = self.thinking
        if self.batch_size > 1:  # which prompts share a batch depends on it
            settings["per_category"] = self.per_category
        return settings

    @property
    def generate_arguments(self) -> dict[str, Any]:
        """Arguments of `generate()`. Sampling ignores top-k, top-p and penalties of the model's generation config."""
        arguments: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "repetition_penalty": 1.0}
        if self.full_length:
            arguments["min_new_tokens"] = self.max_new_tokens
        if self.temperature == 0:
            return arguments | {"do_sample": False}
        return arguments | {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class Bench:
    """Models, tokenizer and jobs, loaded on first use, so that unused models take no memory."""

    options: Options

    def __post_init__(self) -> None:
        prepare(self.options.threads)

    @cached_property
    def target(self) -> PreTrainedModel:
        return load(self.options.target, self.options.dtype, self.options.device)

    @cached_property
    def draft(self) -> PreTrainedModel:
        if self.options.draft is None:
            raise ValueError("this method needs a draft model: pass --draft")
        return load(self.options.draft, self.options.dtype, self.options.device)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.options.target)

    @cached_property
    def questions(self) -> list[Question]:
        options = self.options
        return choose(read(options.prompts, options.coding_apart), options.per_category)

    @cached_property
    def jobs(self) -> list[Job]:
        """Jobs of the first turns."""
        return cut_into_jobs([self._job(question) for question in self.questions], self.options.batch_size)

    def next_turns(self, answers: Mapping[str, Sequence[int]], turn: int) -> list[Job]:
        """Return the jobs of a further turn, for all questions that have it.

        Args:
            answers: tokens of plain decoding's answers to the earlier turns, by job id.
            turn: index of the turn, from 0.
        """
        jobs = []
        for question in self.questions:
            if len(question.turns) <= turn:
                continue
            before: list[dict[str, str]] = []
            for i in range(turn):
                answer = self.tokenizer.decode(answers[turn_name(question, i)], skip_special_tokens=True)
                before += [{"role": "user", "content": question.turns[i]}, {"role": "assistant", "content": answer}]
            jobs.append(self._job(question, before))
        return jobs

    def _job(self, question: Question, before: Messages = ()) -> Job:
        template = {} if self.options.thinking is None else {"enable_thinking": self.options.thinking}
        return encode(question, self.tokenizer, self.options.max_prompt_tokens, before, **template)

    @cached_property
    def warm_up(self) -> Job:
        return warm_up(self.tokenizer, self.options.batch_size)

    @property
    def end_tokens(self) -> set[int]:
        return end_tokens(self.target)

    @property
    def text_ends(self) -> set[int]:
        """Tokens that end a text; none if all texts have the full length."""
        return set() if self.options.full_length else self.end_tokens

    @property
    def pad_token(self) -> int:
        """Padding token after finished rows and before short prompts. Its value does not affect results."""
        config = self.target.generation_config
        given = config.pad_token_id if config is not None else None
        return int(given) if isinstance(given, int) else min(self.end_tokens, default=0)
