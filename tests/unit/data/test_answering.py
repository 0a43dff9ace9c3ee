"""`BatchedGenerator`: rows that take the next prompt as soon as their answer has ended."""

from collections import deque
from contextlib import nullcontext

import pytest
import torch
from transformers import WatermarkingConfig

from specdec.data import batched_generation
from specdec.data.batched_generation import BatchedGenerator, Request
from specdec.models.capability import Capability
from tests.support import tiny

LENGTHS = (9, 1, 14, 5, 3, 7)


def requests(temperature: float = 0.0) -> list[Request]:
    prompts = [tiny.prompts(n, seed=n)["input_ids"][0].tolist() for n in LENGTHS]
    return [Request(prompt, temperature, seed) for seed, prompt in enumerate(prompts)]


def answers(model, asked: list[Request], rows: int, longest: int = 9) -> list[list[int]]:
    queue = deque(asked)
    done = list(BatchedGenerator(model, rows, longest).run(lambda: queue.popleft() if queue else None))
    assert sorted(map(id, done)) == sorted(map(id, asked))
    return [request.answer for request in asked]


def plain(model, request: Request, longest: int = 9, **more) -> list[int]:
    prompt = torch.tensor([request.prompt])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": longest, "do_sample": False} | more
    text = model.generate(prompt, **options)
    return getattr(text, "sequences", text)[0, prompt.shape[1] :].tolist()


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


def test_draws_after_processors_are_a_conversation_s_own(llama, monkeypatch):
    """In batches of several temperatures, too. Texts of several lengths go through the repetition penalty together."""
    monkeypatch.setattr(llama.generation_config, "top_k", 5)
    monkeypatch.setattr(llama.generation_config, "repetition_penalty", 2.0)

    def asked():
        made = requests(0.8)
        for request in made[::2]:
            request.temperature = 0.0
        return made

    alone = answers(llama, asked(), 1)
    assert answers(llama, asked(), 4) == alone
    assert alone[::2] == [plain(llama, request) for request in asked()[::2]]
    monkeypatch.setattr(llama.generation_config, "repetition_penalty", 1.0)
    assert answers(llama, asked(), 4) != alone


def test_tokens_of_equal_settings_are_chosen_together(llama, monkeypatch):
    monkeypatch.setattr(llama.generation_config, "repetition_penalty", 2.0)
    calls = []

    def counting(requests, logits):
        calls.append(len(requests))
        return chosen(requests, logits)

    chosen = batched_generation._chosen
    monkeypatch.setattr(batched_generation, "_chosen", counting)
    expected = answers(llama, requests(), 6)
    assert calls == [6] * 9  # the first tokens, too: their prompts were read in one pass
    monkeypatch.setattr(batched_generation, "READ_AT_ONCE", 1)
    assert answers(llama, requests(), 6) == expected
    assert calls[9:] == [1] * 6 + [6] * 8


def test_drawn_tokens_have_the_distribution_of_their_scores():
    p = torch.tensor([[0.5, 0.0, 0.3, 0.2, 0.0]])
    drawn = [Request([0], 1.0) for _ in range(8000)]
    for seed, request in enumerate(drawn):
        request.random.seed(seed)
    tokens = torch.tensor(batched_generation._chosen(drawn, p.log().expand(len(drawn), -1)))
    shares = tokens.bincount(minlength=5) / len(drawn)
    assert (shares - p[0]).abs().max() < 4 * (0.25 / len(drawn)) ** 0.5
    assert shares[1] == shares[4] == 0


def test_logits_go_through_the_target_s_own_processors(llama, monkeypatch):
    monkeypatch.setattr(llama.generation_config, "repetition_penalty", 5.0)
    alone = [plain(llama, request) for request in requests()]
    assert answers(llama, requests(), 3) == alone
    monkeypatch.setattr(llama.generation_config, "top_k", 1)
    assert answers(llama, requests(0.7), 3) == alone


END = 5
# Of a generation config; and how the answers are announced that a batch cannot write.
FIELDS = [
    ({"forced_bos_token_id": 7}, None),
    ({"forced_eos_token_id": END}, None),
    ({"suppress_tokens": [*range(10, 40)]}, None),
    ({"begin_suppress_tokens": [*range(10, 40)]}, None),
    ({"repetition_penalty": 5.0}, None),
    ({"encoder_repetition_penalty": 5.0}, None),
    ({"no_repeat_ngram_size": 2}, None),
    ({"encoder_no_repeat_ngram_size": 1}, None),
    ({"bad_words_ids": [[token] for token in range(10, 40)]}, None),
    ({"min_new_tokens": 6}, None),
    ({"min_length": 12}, None),
    ({"exponential_decay_length_penalty": (2, 3.0)}, None),
    ({"sequence_bias": [[[token], 9.0] for token in range(10, 14)]}, None),
    ({"guidance_scale": 3.0}, None),
    ({"watermarking_config": WatermarkingConfig(bias=9.0)}, None),
    ({"renormalize_logits": True, "remove_invalid_values": True}, None),
    ({"max_length": 4}, None),
    ({"prompt_lookup_num_tokens": 3}, None),
    ({"use_cache": False}, None),
    ({"cache_implementation": "static"}, None),
    ({"prefill_chunk_size": 2}, None),
    ({"return_dict_in_generate": True, "output_scores": True, "output_attentions": True}, None),
    ({"num_beams": 3}, "beam search"),
    ({"num_beams": 3, "length_penalty": -2.0, "early_stopping": True}, "beam search"),
    ({"max_time": 1e6}, "uses MaxTimeCriteria"),
    ({"stop_strings": ["q", "h"]}, "uses StopStringCriteria"),
]


@pytest.mark.parametrize(("fields", "announced"), FIELDS, ids=lambda of: "+".join(of) if isinstance(of, dict) else "")
def test_the_target_s_generation_config_is_kept_to(llama, chat_tokenizer, monkeypatch, fields, announced):
    usual = [plain(llama, request) for request in requests()]
    monkeypatch.setattr(llama.generation_config, "eos_token_id", [END, usual[0][4]])
    ended = [plain(llama, request) for request in requests()]
    for name, value in fields.items():
        monkeypatch.setattr(llama.generation_config, name, value)
    alone = [plain(llama, request, tokenizer=chat_tokenizer) for request in requests()]
    unseen = {
        "max_time",
        "max_length",
        "renormalize_logits",
        "prompt_lookup_num_tokens",
        "use_cache",
        "prefill_chunk_size",
    }
    unseen |= {"cache_implementation", "return_dict_in_generate"}
    assert alone != ended or unseen & fields.keys()

    asked = requests()
    queue = deque(asked)
    with pytest.warns(UserWarning, match=f"one at a time with plain .*{announced}") if announced else nullcontext():
        list(BatchedGenerator(llama, 3, 9, chat_tokenizer).run(lambda: queue.popleft() if queue else None))
    assert [request.answer for request in asked] == alone
    assert [request.cut for request in asked] == [answer[-1] not in (END, usual[0][4]) for answer in alone]


@pytest.mark.parametrize("fields", [{"token_healing": True}, {"penalty_alpha": 0.6}, {"dola_layers": "low"}])
def test_what_generate_hands_to_others_is_refused(llama, monkeypatch, fields):
    for name, value in fields.items():
        monkeypatch.setattr(llama.generation_config, name, value)
    with pytest.raises(ValueError, match=f"the target's generation config is not supported: {next(iter(fields))}"):
        BatchedGenerator(llama, 2, 9)


def test_drawn_answers_keep_to_the_generation_config(llama, monkeypatch):
    monkeypatch.setattr(llama.generation_config, "forced_eos_token_id", END)
    monkeypatch.setattr(llama.generation_config, "top_k", 3)
    drawn = answers(llama, requests(1.0), 3)
    assert all(len(answer) == 9 and answer[-1] == END for answer in drawn)
    monkeypatch.setattr(llama.generation_config, "num_beams", 2)
    with pytest.warns(UserWarning, match="beam sample"):
        beams = answers(llama, requests(1.0), 3)
    torch.manual_seed(1)
    assert beams[1] == plain(llama, requests()[1], do_sample=True, temperature=1.0)


def test_requests_may_follow_from_answers(llama):
    queue, seen = deque(requests()[:2]), []
    for request in BatchedGenerator(llama, 2, 3).run(lambda: queue.popleft() if queue else None):
        seen.append(request)
        if len(seen) < 6:
            queue.append(Request(request.prompt + request.answer))
    assert len(seen) == 7
    assert all(request.answer == plain(llama, request, 3) for request in seen)


def test_targets_with_another_cache_answer_one_by_one(monkeypatch, llama):
    monkeypatch.setattr(
        "specdec.data.batched_generation.capability", lambda model: Capability(None, "a recurrent state")
    )
    alone = [plain(llama, request) for request in requests()]
    assert answers(llama, requests(), 4) == alone
