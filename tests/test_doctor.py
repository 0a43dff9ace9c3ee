"""What the doctor measures, simulates and says."""

import pytest
import torch

from specdec import DraftModelProposer, Eagle3Proposer
from specdec.doctor import Diagnosis, diagnose, questions
from tests import eagle3, tiny

FLAT = {1: 0.1, 2: 0.1, 4: 0.1, 8: 0.1, 16: 0.1}
STEEP = {1: 0.1, 2: 0.2, 4: 0.4, 8: 0.8, 16: 1.6}


def test_prompts_are_read_as_regenerate_reads_them(tmp_path):
    (tmp_path / "mine.txt").write_text("one\n\ntwo\n")
    assert [messages[-1]["content"] for messages in questions(tmp_path / "mine.txt")] == ["one", "two"]
    lines = [
        '{"prompt": "one"}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    assert [messages[-1]["content"] for messages in questions(tmp_path / "mine.jsonl")] == ["one", "a"]


def diagnosis(acceptance=(0.8, 0.8), draft=0.0, target=FLAT, uncovered=0.0, elsewhere=None):
    return Diagnosis(acceptance, draft, target, uncovered, elsewhere, 1.0)


@pytest.mark.parametrize(
    ("found", "length", "speed"),
    [
        (diagnosis(), 0, 1.0),
        (diagnosis(), 1, 1.8),
        (diagnosis(), 2, 1 + 0.8 + 0.64),
        (diagnosis(), 3, 1 + 0.8 + 0.64 + 0.512),
        (diagnosis(draft=0.05), 2, 2.44 / 2),
        (diagnosis(target=STEEP), 2, 2.44 / 3),
        (diagnosis(acceptance=()), 4, 1.0),
    ],
)
def test_simulated_speed(found, length, speed):
    assert found.speedup(length) == pytest.approx(speed)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (diagnosis((0.3, 0.3)), "limits most: better drafts"),
        (diagnosis((1.0, 1.0), draft=0.09), "limits most: drafting for nothing"),
        (diagnosis((1.0, 1.0), target=STEEP), "limits most: verification at the price of one token"),
        (diagnosis((0.1,), draft=0.2), "Drafting does not pay here"),
        (diagnosis(draft=0.05), "The draft is slow beside its target"),
        (diagnosis(uncovered=0.2), "20% of what the target writes is not in the draft's vocabulary"),
        (diagnosis((0.4,), elsewhere=0.8), "does not know this kind of text, or the prompts miss the chat template"),
    ],
)
def test_it_says_what_limits(found, said):
    assert said in found.in_words()


def test_best_length():
    assert diagnosis((0.9, 0.1)).best_length >= 2
    assert diagnosis((0.9, 0.01), draft=0.02).best_length == 1
    assert diagnosis((0.1,), draft=0.2).best_length == 0


def test_it_measures():
    target = tiny.model("llama")
    prompts = [tiny.prompts(9, seed=i)["input_ids"][0] for i in range(2)]
    found = diagnose(target, target, prompts, usual=prompts[:1], max_new_tokens=16)
    assert found.acceptance[0] == 1.0
    assert found.elsewhere == 1.0
    assert found.draft_pass > 0
    assert set(found.target_pass) == {1, 2, 4, 8, 16}
    assert diagnose(target, "ngram", prompts, max_new_tokens=16).draft_pass == 0


@pytest.mark.parametrize(
    "make",
    [lambda target: DraftModelProposer(target, vocab=20), lambda target: Eagle3Proposer(eagle3.head())],
)
def test_it_sees_what_the_vocabulary_lacks(make):
    target, prompt = tiny.model("llama"), tiny.prompts(9)["input_ids"]
    proposer = make(target)
    text = target.generate(prompt, do_sample=False, max_new_tokens=24)[0, 9:]
    found = diagnose(target, proposer, [prompt[0]], max_new_tokens=24)
    lacking = [token for token in text.tolist() if token not in proposer.known_tokens().tolist()]
    assert found.uncovered == pytest.approx(len(lacking) / len(text))
    assert torch.is_tensor(proposer.known_tokens())
