"""Tokens per second of the batches in which a target writes the training texts of a head."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from transformers import PreTrainedModel

from benchmarks.gpu.calls import timed, warned
from benchmarks.gpu.setting import HALF, Row, Setting
from specdec.data.batched_generation import BatchedGenerator, Request

PROMPT = 64  # tokens
ANSWER = (64, 192)  # tokens, least and most
ANSWERS = 2  # for each row of the batch


def regeneration(setting: Setting) -> Iterator[Row]:
    """Measure the batches of `specdec data regenerate`: answers of several lengths, two for each row."""
    target = setting.model(HALF)
    end = target.config.vocab_size // 2
    target.generation_config.eos_token_id = end
    for rows in (2, 4) if setting.small else (256, 64, 512):
        with warned() as texts:
            row = answered(setting, target, rows, end)
        yield {"model": HALF, **row, **({"warned": texts} if texts else {})}


def answered(setting: Setting, target: PreTrainedModel, rows: int, end: int) -> Row:
    """Answer requests in a batch. The model counts up to `end`, so a prompt decides how long its answer is."""
    random = Random(0)
    low, high = (4, 12) if setting.small else ANSWER
    lengths = [random.randint(low, high) for _ in range(ANSWERS * rows)]
    prompts = [[*(random.randrange(1, end) for _ in range(PROMPT - 1)), end - length] for length in lengths]
    generator = BatchedGenerator(target, rows, high)
    warm_up = iter([Request(prompts[0])])
    list(generator.run(lambda: next(warm_up, None)))
    waiting = iter([Request(prompt, owner=length) for prompt, length in zip(prompts, lengths, strict=True)])
    done: list[Request] = []
    seconds = timed(setting, lambda: done.extend(generator.run(lambda: next(waiting, None))))
    wanted = [list(range(end - request.owner + 1, end + 1)) for request in done]
    right = sum(request.answer == text for request, text in zip(done, wanted, strict=True)) / len(lengths)
    tokens = sum(lengths)
    row: Row = {"rows": rows, "answers": len(done), "tokens": tokens, "s": seconds}
    return row | {"tokens/s": tokens / seconds, "right": right}
