"""`Answering`: rows that take the next prompt as soon as their answer has ended."""

from collections import deque

import pytest
import torch

from specdec.capability import Capability
from specdec.data.answering import Answering, Request
from tests import tiny

LENGTHS = (9, 1, 14, 5, 3, 7)


def requests(temperature: float = 0.0) -> list[Request]:
    prompts = [tiny.prompts(n, seed=n)["input_ids"][0].tolist() for n in LENGTHS]
    return [Request(prompt, temperature, seed) for seed, prompt in enumerate(prompts)]


def answers(model, asked: list[Request], rows: int, longest: int = 9) -> list[list[int]]:
    queue = deque(asked)
    done = list(Answering(model, rows, longest).run(lambda: queue.popleft() if queue else None))
    assert sorted(map(id, done)) == sorted(map(id, asked))
    return [request.answer for request in asked]


def plain(model, request: Request, longest: int = 9) -> list[int]:
    prompt = torch.tensor([request.prompt])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": longest, "do_sample": False}
    return model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_every_answer_is_what_the_target_writes_alone(models, name, rows, monkeypatch):
    model = models(name)
    alone = [plain(model, request) for request in requests()]
    ends = [alone[0][1], alone[3][4]]  # rows end at all times
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    alone = [plain(model, request) for request in requests()]
    assert len(set(map(len, alone))) > 1

    asked = requests()
    assert answers(model, asked, rows) == alone
    assert [request.cut for request in asked] == [answer[-1] not in ends for answer in alone]


def test_draws_are_a_conversation_s_own(llama):
    """The same at any number of rows, and other ones for other seeds."""
    first = answers(llama, requests(1.0), 1)
    assert answers(llama, requests(1.0), 3) == first
    again = requests(1.0)
    for request in again:
        request.seed += 10
    assert answers(llama, again, 3) != first


def test_logits_go_through_the_target_s_own_processors(llama, monkeypatch):
    monkeypatch.setattr(llama.generation_config, "repetition_penalty", 5.0)
    alone = [plain(llama, request) for request in requests()]
    assert answers(llama, requests(), 3) == alone
    monkeypatch.setattr(llama.generation_config, "top_k", 1)
    assert answers(llama, requests(0.7), 3) == alone


def test_requests_may_follow_from_answers(llama):
    queue, seen = deque(requests()[:2]), []
    for request in Answering(llama, 2, 3).run(lambda: queue.popleft() if queue else None):
        seen.append(request)
        if len(seen) < 6:
            queue.append(Request(request.prompt + request.answer))
    assert len(seen) == 7
    assert all(request.answer == plain(llama, request, 3) for request in seen)


def test_targets_with_another_cache_answer_one_by_one(monkeypatch, llama):
    monkeypatch.setattr("specdec.data.answering.capability", lambda model: Capability(None, "a recurrent state"))
    alone = [plain(llama, request) for request in requests()]
    assert answers(llama, requests(), 4) == alone
