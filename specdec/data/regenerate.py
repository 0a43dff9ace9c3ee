"""`regenerate`: has the target write the training texts of a head, and resumes interrupted runs.

This module schedules the conversations. `answer_store` writes the file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.data.answer_store import Answers
from specdec.data.batched_generation import BatchedGenerator, Request
from specdec.data.conversations import context_of, encode_prompt
from specdec.data.messages import Message, template_arguments
from specdec.data.resume import LEFT, USELESS, Asked, asked, states_of_prompts
from specdec.data.sequences import SEQUENCES, TOKENIZER, TokenSequence, extend, fingerprint
from specdec.data.skipped import Skipped
from specdec.models.introspection import require_decoder_only
from specdec.models.text_limits import check_tokens, vocab_size

AHEAD = 16  # batches of prompts that are sorted by length together
MOST_TURNS = 1000  # distance between the seeds of two conversations


@dataclass
class ActiveConversation:
    """A conversation in progress, which becomes one line of the output.

    Attributes:
        number: index of its entry among the prompts.
        place: location of the entry.
        pending: user and system messages that are not in `messages` yet, in order.
        extra: further arguments of the chat template, see `Conversation`.
        messages: the conversation so far, with the target's answers.
        finish: "length" if the last answer was cut off, otherwise "stop".
        sequences: token ids that the target read and wrote, see `sequences`.
    """

    number: int
    place: str
    pending: list[Message]
    extra: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    finish: str = "stop"
    sequences: list[TokenSequence] = field(default_factory=list)

    def take_answer(self, request: Request, tokenizer: PreTrainedTokenizerBase) -> None:
        """Append the target's answer to the last message."""
        self.finish = "length" if request.cut else "stop"
        extend(self.sequences, request.prompt, request.answer)
        text = tokenizer.decode(request.answer if request.cut else request.answer[:-1])
        self.messages.append({"role": "assistant", "content": text})

    def next_question(self) -> list[Message] | None:
        """Return the conversation up to the next answer; None if it is finished."""
        while self.pending and self.finish != "length":
            self.messages.append(self.pending.pop(0))
            if self.messages[-1]["role"] == "user":
                return self.messages
        return None


def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | Path | Any,
    out: Path,
    *,
    temperatures: Sequence[float] = (0.0,),
    batch_size: int = 8,
    max_new_tokens: int = 256,
    max_prompt_tokens: int = 1024,
    limit: int | None = None,
    switches: dict[str, Any] | None = None,
    seed: int = 0,
    share: tuple[int, int] = (0, 1),
    agree: Callable[[bool], bool] = lambda yes: yes,
    progress: Callable[[int, int, int], Any] = lambda done, total, tokens: None,
    go_on: Callable[[], bool] = lambda: True,
) -> int:
    """Let the target answer prompts, replacing answers that the conversations already have.

    Memory holds only a few batches of prompts. Prompts that cannot be answered are left out with a warning.

    Args:
        target: model that answers.
        tokenizer: tokenizer of the target.
        prompts: any input of `read_entries`, with `{"prompt": ...}` or conversations as entries. It is read twice.
        out: JSONL file to write. Conversations finished in an earlier run with the same target and prompts are kept.
        temperatures: assigned to the conversations in turn. Other settings come from the target's generation config.
        batch_size: conversations answered at a time. Once a sixteenth of them is finished, others of similar length
            take their rows.
        max_new_tokens: maximum tokens of an answer.
        max_prompt_tokens: longer conversations are left out, as are those that leave no space for an answer.
        limit: use only the first `limit` conversations.
        switches: arguments of the chat template, for example `{"enable_thinking": False}`. An entry's own
            `chat_template_kwargs` take precedence.
        seed: random seed. Each conversation has its own generator, independent of the rest of the batch.
        share: index of this process and number of processes. Each answers its part of the prompts, and a run may
            resume with another number of processes.
        agree: waits for the other processes, and returns whether all of them passed True.
        progress: called with the finished conversations, all conversations and the tokens written in this run, each
            counted for this process.
        go_on: called before each conversation and each token. If it returns False, unfinished conversations are
            discarded. Once begun, at least one answer is written before this ends the run.

    Returns:
        Number of tokens written.

    Raises:
        ValueError: `out` is not an output of this run; or none of the prompts can be answered.

    Example:
        ```python
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        regenerate(model, tokenizer, "prompts.jsonl", Path("answers.jsonl"))
        ```
    """
    if not temperatures or min(temperatures) < 0:
        raise ValueError(f"temperatures must be at least 0, got {list(temperatures)}")
    require_decoder_only(target.config, name := str(target.config._name_or_path))
    room = context_of(target.config) - max_new_tokens
    if room < 1:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves no space for a prompt in the {room + max_new_tokens} tokens that "
            "the target reads: use a smaller value"
        )
    max_prompt_tokens = min(max_prompt_tokens, room)
    given = prompts if isinstance(prompts, (str, Path)) or hasattr(prompts, "__len__") else list(prompts)  # read twice
    mine, processes = share
    answers = Answers(out, share)

    def askable(left_out: Skipped) -> Iterator[Asked]:
        return islice(_askable(asked(given, switches or {}, left_out), tokenizer, left_out), limit)

    useless = Skipped("prompts")
    done = states_of_prompts(answers, askable(useless), name, temperatures, max_new_tokens)
    (useless.check_and_warn if mine == 0 else useless.check)(len(done) - done.count(USELESS))
    agree(True)  # no process writes before all have read and checked the files
    if mine == 0:
        answers.repair()
    agree(True)
    own, vocabulary = range(mine, len(done), processes), fingerprint(tokenizer)
    answers.own_path.touch()
    useful = len(own) - done[mine::processes].count(USELESS)
    handled, tokens, left_out = len(own) - done[mine::processes].count(LEFT), 0, Skipped("conversations")
    early = Skipped("conversations", "end before a question that cannot follow the target's answer")
    progress(handled, len(own), tokens)
    again = askable(Skipped("prompts"))  # which were reported above
    mine_left = (prompt for prompt in again if prompt.number in own and done[prompt.number] == LEFT)
    conversations = (ActiveConversation(c.number, c.place, c.messages, c.extra) for c in mine_left)
    waiting = _sorted_by_length(conversations, AHEAD * batch_size)
    further: deque[Request] = deque()  # next turns of conversations that have begun

    def request(c: ActiveConversation) -> Request | None:
        try:
            prompt = _next_prompt(c, tokenizer, max_prompt_tokens, vocab_size(target))
        except ValueError as error:
            (early if c.messages else left_out).add(c.place, error)
            return None
        temperature = temperatures[c.number % len(temperatures)]
        own_seed = (seed + c.number) * MOST_TURNS + len(c.messages)
        return None if prompt is None else Request(prompt, temperature, own_seed, c)

    written = 0

    def proceeds() -> bool:
        return written == 0 or go_on()

    def take() -> Request | None:
        nonlocal handled
        if further:
            return further.popleft()
        while proceeds() and (c := next(waiting, None)) is not None:
            if (first := request(c)) is not None:
                return first
            handled += 1
        return None

    for answered in BatchedGenerator(target, batch_size, max_new_tokens, tokenizer, proceeds).run(take):
        c = answered.owner
        c.take_answer(answered, tokenizer)
        tokens += len(answered.answer)
        if (after := request(c)) is not None:
            further.append(after)
            continue
        line = {"id": c.number, "target": name, "temperature": answered.temperature, "finish": c.finish}
        line |= {"max_new_tokens": max_new_tokens, "messages": c.messages, TOKENIZER: vocabulary}
        answers.append(line | {SEQUENCES: c.sequences} | c.extra)
        handled, written = handled + 1, written + 1
        progress(handled, len(own), tokens)
        if not go_on():
            break
    progress(handled, len(own), tokens)
    if agree(left_out.count == useful):
        left_out.check(0)
    left_out.warn(useful - left_out.count)
    early.warn(useful - left_out.count - early.count)
    if agree(handled == len(own)) and mine == 0:
        answers.join()
    return tokens


def _askable(prompts: Iterator[Asked], tokenizer: PreTrainedTokenizerBase, left_out: Skipped) -> Iterator[Asked]:
    """Yield the prompts that a target with this tokenizer can answer."""
    for prompt in prompts:
        if not prompt.messages:
            left_out.add(prompt.place, "it asks nothing before its first tool call")
            continue
        if tokenizer.chat_template is None and len(prompt.messages) > 1:
            why = "it has several messages, but the tokenizer has no chat template: only single messages can be used"
            left_out.add(prompt.place, why)
            continue
        yield prompt


def _sorted_by_length(conversations: Iterator[ActiveConversation], window: int) -> Iterator[ActiveConversation]:
    """Sort windows of conversations by length, up and down in turn: attention runs over the longest row of a batch."""
    up = True
    while some := list(islice(conversations, window)):
        yield from sorted(some, key=lambda c: sum(len(message["content"]) for message in c.pending), reverse=not up)
        up = not up


def _next_prompt(
    conversation: ActiveConversation, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int, size: int
) -> list[int] | None:
    """Return the tokens up to the next answer; None if the conversation is finished.

    If the conversation cannot continue, reset it to its state after the last answer, and raise ValueError.
    """
    messages = conversation.next_question()
    if messages is None:
        return None
    try:
        prompt = encode_prompt(messages, tokenizer, **template_arguments(conversation.extra))
        if not prompt:
            raise ValueError("the tokenizer returns no tokens for it")
        if len(prompt) > max_prompt_tokens:
            raise ValueError(f"its prompt is longer than {max_prompt_tokens} tokens")
        check_tokens(prompt, size)
    except ValueError:
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        conversation.pending.clear()
        raise
    return prompt
