"""Training data, cached states and the objective of EAGLE-3 heads."""

import copy
import errno
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from transformers.utils import logging
from typer.testing import CliRunner

from specdec import Eagle3Proposer, SpeculativeGenerator
from specdec.cli import app
from specdec.eagle3 import Eagle3Trainer, convert, load, recipe, save, states, transfer
from specdec.eagle3.fresh import grown
from specdec.eagle3.objective import LOSSES, Objective, frequent_tokens, token_counts
from specdec.eagle3.readout import Readout
from specdec.eagle3.recipe import last_checkpoint
from specdec.eagle3.states import StateDataset, collate, extract
from specdec.eagle3.texts import Text, encode_prompt, kept_texts, read_prompts, read_texts
from specdec.eagle3.transfer import transferred, translated
from specdec.eagle3.unroll import unroll
from specdec.taps import Taps
from tests import eagle3, tiny

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> \n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["<unk>", "<end>", "<user>", "<assistant>", "<system>", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


def written(path, *entries):
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def words(tokenizer, ids):
    return " ".join(tokenizer.convert_ids_to_tokens(ids.tolist()))


# Texts


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz"])
def test_every_format_is_read(tokenizer, name, tmp_path):
    path = written(
        tmp_path / name,
        {"prompt": "a b", "response": "c d"},
        {"prompt": "a b", "response": "c d", "finish": "length"},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b c"},
                {"role": "user", "content": "d"},
                {"role": "assistant", "content": "e"},
                {"role": "user", "content": "f"},
            ]
        },
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b c"}]},
        "",
        {"text": "a b c d"},
    )
    texts = list(read_texts(path, tokenizer, 100))
    shown = [(words(tokenizer, text.ids), words(tokenizer, text.ids[text.learn])) for text in texts]
    assert shown == [
        ("<user> a b <end> <assistant> c d <end>", "c d <end>"),
        ("<user> a b <end> <assistant> c d", "c d"),
        (
            "<system> s <end> <user> a <end> <assistant> b c <end> <user> d <end> <assistant> e <end>",
            "b c <end> e <end>",
        ),
        ("<user> a <end> <assistant> b c <end>", "b c <end>"),
        ("a b c d", "a b c d"),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty: one JSON object per line"),
        ([{"text": "a b c"}, "{broken"], "line 2 is not JSON"),
        (['{"text": "a"', {"text": "b"}], "line 1 is not JSON: .* at column 13"),
        (["[1]"], "line 1: expected"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "line 1: the conversation has no answer"),
        ([{"messages": [{"role": "robot", "content": "a"}]}], "line 1: a message needs a role"),
        ([{"prompt": "a", "response": "", "finish": "length"}], "line 1: the response is empty"),
        ([{"question": "a"}], "line 1: expected"),
        ([{"text": 5}], "line 1: text must be a string"),
        ([{"prompt": 5, "response": "a"}], "line 1: prompt must be a string"),
        ([{"messages": 5}], "line 1: messages must be a list"),
        ([{"messages": [{"role": ["user"], "content": "a"}]}], "line 1: a message needs a role"),
        ([{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}], "a string as its content"),
    ],
)
def test_bad_lines_are_named(tokenizer, lines, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        list(read_texts(written(tmp_path / "data.jsonl", *lines), tokenizer, 100))


def test_a_file_cut_short_is_named(tokenizer, tmp_path):
    path = written(tmp_path / "data.jsonl.gz", *[{"text": "a b c"}] * 50)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"data\.jsonl\.gz is not text .* and whole"):
        list(read_texts(path, tokenizer, 100))


def test_prompts_may_be_lines(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert [messages for _, messages in read_prompts(tmp_path / "p.txt")] == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
    ]
    (tmp_path / "p.txt").write_text("\n")
    with pytest.raises(ValueError, match="one prompt per line"):
        list(read_prompts(tmp_path / "p.txt"))


def test_a_template_that_refuses_a_conversation_is_said_with_its_line(tokenizer, tmp_path):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('no system messages') }}"
    messages = [{"role": role, "content": "a"} for role in ("system", "user", "assistant")]
    path = written(tmp_path / "data.jsonl", {"messages": messages})
    with pytest.raises(ValueError, match="line 1: the conversation does not fit the chat template: no system messages"):
        list(read_texts(path, strict, 100))
    with pytest.raises(ValueError, match="does not fit the chat template"):
        encode_prompt(messages[:2], strict)


def test_what_is_lost_of_long_texts_is_said(tokenizer, tmp_path):
    path = written(
        tmp_path / "d.jsonl", {"text": "a b c d e f"}, {"prompt": "a", "response": "b c d"}, {"text": "a b c"}
    )
    with pytest.warns(UserWarning, match="2 of 3 texts are longer than 5 tokens and were cut: 4 tokens"):
        assert [len(text.ids) for text in read_texts(path, tokenizer, 5)] == [5, 5, 3]


def test_long_texts_are_cut_and_those_without_anything_to_learn_left_out(tokenizer, tmp_path):
    path = written(tmp_path / "d.jsonl", {"text": "a b c d e f"}, {"prompt": "a b c d e f", "response": "g"})
    with pytest.warns(UserWarning, match="1 of 2 texts were left out"):
        assert [len(text.ids) for text in read_texts(path, tokenizer, 5)] == [5]


# States


def some_texts(target, count=6, new_tokens=20):
    """Texts that the target wrote itself, of different lengths."""
    out = []
    for i in range(count):
        prompt = tiny.prompts(4 + i, seed=i)["input_ids"]
        ids = target.generate(prompt, do_sample=False, max_new_tokens=new_tokens)[0]
        out.append(Text(ids, torch.arange(len(ids)) >= prompt.shape[1]))
    return out


def test_states_are_the_targets_and_extraction_resumes(tmp_path, monkeypatch):
    target, taps = tiny.model("llama"), (0, 1, 2)
    texts = some_texts(target)
    monkeypatch.setattr(states, "SHARD_TOKENS", 60)
    done = []
    extract(target, texts, taps, tmp_path, batch_tokens=64, progress=done.append)
    assert sum(done) == sum(len(text.ids) for text in texts)
    shards = sorted(tmp_path.glob("states-*.safetensors"))
    assert len(shards) > 2
    before = [shard.stat().st_mtime_ns for shard in shards]
    content = shards[1].read_bytes()
    shards[1].unlink()
    (tmp_path / "states-00001.part").write_bytes(b"half")
    extract(target, texts, taps, tmp_path, batch_tokens=64)
    assert shards[1].read_bytes() == content
    assert [shard.stat().st_mtime_ns for shard in shards if shard != shards[1]] == before[:1] + before[2:]

    dataset = StateDataset(tmp_path, 64)
    assert dataset.num_tokens == sum(len(text.ids) for text in texts)
    wanted = [eagle3.states_of(target, text.ids[None], (*taps, -1))[0].bfloat16() for text in texts]
    found = []
    for row in dataset:
        for document in row["documents"].unique():
            of_it = row["documents"] == document
            found.append((row["ids"][of_it].tolist(), row["learn"][of_it].tolist(), row["states"][of_it]))
    for text, state, (ids, learn, ours) in zip(texts, wanted, found, strict=True):
        assert ids == text.ids.tolist()
        assert learn == text.learn.tolist()
        torch.testing.assert_close(ours, state, rtol=2e-2, atol=2e-2)


def test_extraction_takes_fewer_texts_at_once_where_memory_ends(monkeypatch):
    target = tiny.model("llama")
    texts = some_texts(target)
    expected = states.states_of(target, (1,), texts)
    taken, read = [], states._pass

    def small(target, listener, ids):
        taken.append(len(ids))
        if len(ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read(target, listener, ids)

    monkeypatch.setattr(states, "_pass", small)
    found = states.states_of(target, (1,), texts)
    assert taken[0] > 1
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)
    monkeypatch.setattr(states, "_pass", lambda *args: small(None, None, [0, 0]))
    with pytest.raises(torch.OutOfMemoryError):
        states.states_of(target, (1,), texts)


def test_states_on_the_way_are_those_of_each_document(monkeypatch):
    """Whatever shares a pass, and without padding short documents to the longest."""
    target = tiny.model("llama")
    texts = [*some_texts(target, 2, 30), *(Text(torch.arange(5), torch.ones(5, dtype=torch.bool)) for _ in range(7))]
    batch = collate(list(states.PackedTexts(texts, 40)))
    computed, read = [], states._pass

    def counted(target, listener, ids):
        computed.append(len(ids) * max(map(len, ids)))
        return read(target, listener, ids)

    monkeypatch.setattr(states, "_pass", counted)
    listener = Taps(target, (1, -1))
    found = states.states_of_packed(target, listener, batch)
    assert sum(computed) <= 2 * sum(len(text.ids) for text in texts)
    documents = [
        (row[where], states_of_it[where])
        for row, of, states_of_it in zip(batch["ids"], batch["documents"], found, strict=True)
        for where in (of == number for number in of.unique() if number >= 0)
    ]
    assert len(documents) == len(texts)
    for ids, ours in documents:
        torch.testing.assert_close(ours, eagle3.states_of(target, ids[None], (1, -1))[0], rtol=1e-4, atol=1e-5)


def test_rows_are_packed_and_padded(tmp_path):
    target = tiny.model("llama")
    texts = some_texts(target, 5)
    extract(target, texts, (0, 1, 2), tmp_path)
    dataset = StateDataset(tmp_path, 50)
    assert [row["documents"].max().item() for row in dataset] == [1, 0, 0, 0]
    dataset = StateDataset(tmp_path, 60)
    assert len(dataset) == 3
    batch = collate([dataset[0], dataset[2]])
    assert batch["ids"].shape == batch["documents"].shape == batch["states"].shape[:2]
    assert (batch["documents"][1] == -1).sum() == batch["ids"].shape[1] - len(dataset[2]["ids"])
    assert not batch["learn"][1][batch["documents"][1] == -1].any()
    assert all(len(row["ids"]) <= 10 for row in StateDataset(tmp_path, 10))


# Objective


def frozen(target, head):
    return target.get_input_embeddings().weight, Readout.of(target, head.draft_to_target)


def naive_loss(head, target, text, state, steps, decay):
    """One text, token by token: the naive head's drafts against the target's own distribution."""
    from tests.naive_eagle3 import NaiveHead

    reference = NaiveHead(head.state_dict(), head.config, target.get_input_embeddings().weight)
    lm_head = target.get_output_embeddings().weight.double()[head.draft_to_target]
    ids, taps, final = text.ids.tolist(), state[:, :-32], state[:, -32:].double()
    losses, right = [], []
    for step in range(steps):
        entropies, hits = [], []
        for i in range(len(ids) - 2 - step):
            if not text.learn[i + 2 + step]:
                continue
            drafted = reference.draft(taps[: i + 1], ids[1 : i + 2], ids[i + 2 : i + 2 + step])
            wanted = lm_head @ final[i + 1 + step]
            entropies.append(-(wanted.softmax(-1) * drafted.log_softmax(-1)).sum())
            hits.append(float(wanted.argmax() == drafted.argmax()))
        losses.append(decay**step * sum(entropies) / len(entropies))
        right.append(sum(hits) / len(hits))
    return sum(losses) / sum(decay**step for step in range(steps)), right


@torch.no_grad()
def test_the_objective_is_the_naive_one():
    target, head = tiny.model("llama"), eagle3.head(tap_ids=(0, 1, 2))
    text = some_texts(target, 1, new_tokens=8)[0]
    state = eagle3.states_of(target, text.ids[None], (0, 1, 2, -1))
    objective = Objective(head, *frozen(target, head), steps=3, decay=0.7)
    outputs = objective(text.ids[None], text.learn[None], torch.zeros_like(text.ids)[None], state)
    loss, accuracy = naive_loss(head, target, text, state[0], 3, 0.7)
    assert float(outputs["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert outputs["accuracy"].tolist() == pytest.approx(accuracy)


def test_gradients_reach_every_parameter():
    target, head = tiny.model("llama"), eagle3.head("3.1", tap_ids=(0, 1, 2)).train()
    text = some_texts(target, 1)[0]
    state = eagle3.states_of(target, text.ids[None], (0, 1, 2, -1))
    objective = Objective(head, *frozen(target, head), steps=2)
    objective(text.ids[None], text.learn[None], torch.zeros_like(text.ids)[None], state)["loss"].backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in head.parameters())
    assert all(weight.grad is None for weight in target.parameters())


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_autograds(loss, monkeypatch):
    """The loss computes them itself, few rows at a time."""
    target, head = tiny.model("llama"), eagle3.head(tap_ids=(0, 1, 2)).train()
    texts = some_texts(target, 2)
    longest = max(len(text.ids) for text in texts)
    ids = torch.stack([torch.nn.functional.pad(text.ids, (0, longest - len(text.ids))) for text in texts])
    learn = torch.stack([torch.nn.functional.pad(text.learn, (0, longest - len(text.learn))) for text in texts])
    documents = torch.zeros_like(ids)
    documents[0, 9:] = 1
    state = eagle3.states_of(target, ids, (0, 1, 2, -1))
    embedding, readout = frozen(target, head)

    losses = []  # by the book: all logits at once
    for step, h in enumerate(unroll(head, embedding[ids], state[..., :-32], 3, documents)):
        rows = ids.shape[1] - 2 - step
        keep = learn[:, 2 + step :] & (documents[:, 2 + step :] == documents[:, :rows])
        p = readout(state[:, 1 + step : -1, -32:][keep]).softmax(-1)
        log_q = head.logits(h[:, :rows])[keep].log_softmax(-1)
        overlap = torch.minimum(p, log_q.exp()).sum(-1)
        of_rows = -(p * log_q).sum(-1) if loss == "ce" else -overlap.log()
        losses.append(0.8**step * of_rows.mean())
    (sum(losses) / sum(0.8**step for step in range(3))).backward()
    wanted = {name: weight.grad.clone() for name, weight in head.named_parameters()}

    head.zero_grad()
    monkeypatch.setattr("specdec.eagle3.objective.ROWS_AT_ONCE", 7)
    found = Objective(head, embedding, readout, steps=3, loss=loss)(ids, learn, documents, state)["loss"]
    assert float(found) == pytest.approx(float(sum(losses) / sum(0.8**step for step in range(3))))
    found.backward()
    for name, weight in head.named_parameters():
        torch.testing.assert_close(weight.grad, wanted[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["bias", "scale", "cap"])
@torch.no_grad()
def test_logits_that_are_more_than_a_matrix(kind):
    if kind == "bias":
        target = tiny.model("phi", seed=7)
        target.lm_head.bias.normal_()
    elif kind == "scale":
        target = tiny.randomised(AutoConfig.for_model("granite", **tiny.BASE, logits_scaling=4.0))
    else:
        target = tiny.randomised(AutoConfig.for_model("gemma2", **tiny.BASE, head_dim=8, final_logit_softcapping=9.0))
    ids, rows = tiny.prompts(9)["input_ids"], torch.tensor([3, 5, 40])
    state = target.get_decoder()(input_ids=ids)[0][0]
    theirs = target(input_ids=ids).logits[0, :, rows]
    torch.testing.assert_close(Readout.of(target, rows)(state), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["plain", "window"])
@torch.no_grad()
def test_flex_attention_agrees_with_the_dense_mask(name):
    head = eagle3.head(name)
    torch.manual_seed(0)
    embeds, states = torch.randn(2, 24, 32), torch.randn(2, 24, 96)
    documents = torch.tensor([[0] * 24, [0] * 7 + [1] * 12 + [-1] * 5])
    dense, flex = (list(unroll(head, embeds, states, 4, documents, flex=flex)) for flex in (False, True))
    for ours, theirs in zip(flex, dense, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_frequent_tokens():
    ids, learn = torch.tensor([5, 5, 5, 2, 2, 7, 3, 3, 3]), torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 0])
    counts = token_counts([(ids, learn)], 10)
    assert counts.tolist() == [0, 0, 2, 0, 0, 3, 0, 1, 0, 0]
    best = frequent_tokens(counts, 2)
    assert best.tolist() == [2, 5]
    assert float(counts[best].sum() / counts.sum()) == pytest.approx(5 / 6)
    assert len(frequent_tokens(counts, 20)) == 10


@torch.no_grad()
def test_a_head_that_can_draft_more():
    """Its own tokens' logits stay, in whatever order it had them; new rows drift as its own did."""
    target, head = tiny.model("llama"), eagle3.head(draft_vocab_size=50)
    theirs, drift = target.get_output_embeddings().weight, torch.randn(32, 32)
    own = torch.arange(50).flip(0)
    head.d2t.copy_(own - torch.arange(50))
    head.lm_head.weight.copy_(theirs[own] @ drift)
    more = torch.arange(60)
    bigger = grown(head, target, more)
    assert bigger.draft_to_target.tolist() == more.tolist()
    h = torch.randn(1, 2, 32)
    before, after = torch.zeros(2, 1, 2, tiny.VOCAB)
    before[..., own], after[..., more] = head.logits(h), bigger.logits(h)
    torch.testing.assert_close(after[..., own], before[..., own])
    torch.testing.assert_close(bigger.lm_head.weight[50:], theirs[50:60] @ drift, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("added", [0.0, transfer.ADDED])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("plain", {}),
        ("norm before residual", {}),
        ("norm output", {}),
        ("qwen3", {}),
        ("biases", {"fc_bias": True}),
        ("whole vocabulary", {}),
        ("two taps", {}),
    ],
)
@torch.no_grad()
def test_a_head_carried_over_drafts_as_it_did(name, changes, added, monkeypatch):
    """To a target whose states and embeddings are its donor's, turned within a wider space."""
    monkeypatch.setattr(transfer, "ADDED", added)
    monkeypatch.setattr(transfer, "RIDGE", 1e-6)
    head = eagle3.head(name, **changes)
    torch.manual_seed(0)
    turn = torch.linalg.qr(torch.randn(48, 48)).Q[:32]
    old, states = torch.randn(tiny.VOCAB, 32), torch.randn(500, head.config.num_taps * 32) + 0.5
    read = torch.cat([part @ turn for part in states.chunk(head.config.num_taps, -1)], -1)
    seen = torch.ones(tiny.VOCAB, dtype=torch.long)
    bigger = translated(head, head.fuse(states), read, old, old @ turn, seen, (0, 2, 3)[: head.config.num_taps])
    assert bigger.config.target_hidden_size == bigger.config.hidden_size == 48
    assert torch.equal(bigger.draft_to_target, head.draft_to_target)
    ids, position = torch.randint(tiny.VOCAB, (1, 500)), torch.arange(500)[None]
    before, after = head.fuse(states[None]), bigger.fuse(read[None])
    for _ in range(2):  # the second pass is fed what the first put out
        before = head(old[ids], before, position, None)
        after = bigger((old @ turn)[ids], after, position, None)
        expected, found = head.logits(before), bigger.logits(after)
        if added == 0:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


@torch.no_grad()
def test_both_targets_are_read_at_the_same_tokens(monkeypatch):
    """Carried over to its own target a head stays what it is."""
    monkeypatch.setattr(transfer, "RIDGE", 1e-7)
    target, head = tiny.model("llama", num_hidden_layers=4), eagle3.head()
    texts = some_texts(target, 12, 24)
    same = transferred(head.to(torch.bfloat16), target, target, texts)
    assert head.dtype == torch.bfloat16  # the given one is left alone
    text = texts[-1].ids[None, :-1]
    embeds = target.get_input_embeddings()(text[:, 1:])
    states_of_text = eagle3.states_of(target, text, (2, 2, 1))[:, 1:]
    position = torch.arange(embeds.shape[1])[None]
    h = [each(embeds, each.fuse(states_of_text), position, None) for each in (head.float(), same)]
    torch.testing.assert_close(same.logits(h[1]), head.logits(h[0]), rtol=0.02, atol=0.02 * float(h[0].abs().max()))


def test_the_linear_map_is_weighted_least_squares(monkeypatch):
    monkeypatch.setattr(transfer, "RIDGE", 0.0)
    torch.manual_seed(0)
    x, y, weight = torch.randn(60, 5) * torch.rand(5) * 9, torch.randn(60, 3), torch.rand(60) * 4
    root = weight.sqrt()[:, None]
    expected = torch.linalg.lstsq(x * root, y * root).solution.T
    torch.testing.assert_close(transfer._linear_map(x, y, weight), expected, rtol=1e-3, atol=1e-4)


def test_the_added_part_is_seen_once_training_has_begun():
    """No gradient is 0 because all weights of a product are."""
    donor = tiny.model("llama", num_hidden_layers=4)
    target = tiny.model("llama", num_hidden_layers=6, hidden_size=48, num_attention_heads=4)
    head = transferred(eagle3.head("biases"), donor, target, some_texts(target, 8, 20))
    assert head.config.taps(6) == (2, 3, 3)
    text = some_texts(target, 1)[0]
    state = states.states_of(target, (*head.config.taps(6), -1), [text])[0]
    objective = Objective(head.train(), target.get_input_embeddings().weight, Readout.of(target, head.draft_to_target))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        objective(text.ids[None], text.learn[None], torch.zeros_like(text.ids)[None], state[None].float())[
            "loss"
        ].backward()
        optimizer.step()
    assert bool((head.lm_head.weight.grad[:, 32:] != 0).any())
    for name in ("fc", "layers.0.self_attn.o_proj", "layers.0.mlp.down_proj"):
        assert bool((head.get_submodule(name).weight.grad[32:] != 0).any()), name


def test_heads_that_cannot_be_carried_over():
    small, large = tiny.model("llama", num_hidden_layers=4), tiny.model("llama", hidden_size=16, num_hidden_layers=4)
    with pytest.raises(ValueError, match="32 wide, of 1 layers, .* 16 wide: it needs"):
        transferred(eagle3.head(), small, large, some_texts(small))
    with pytest.raises(ValueError, match="of 2 layers"):
        transferred(eagle3.head("two layers"), small, small, some_texts(small))


# Training


@pytest.mark.slow
def test_training_makes_a_head_that_drafts(tmp_path):
    """From nothing to a head that beats what the previous token alone tells."""
    target = tiny.model("llama", num_hidden_layers=4)
    texts = some_texts(target, 16, 40)
    extract(target, texts, (1, 2, 3), tmp_path / "states")
    counts = token_counts([(text.ids, text.learn) for text in texts], tiny.VOCAB)
    vocab = frequent_tokens(counts, 40)
    assert counts[vocab].sum() > 0.8 * counts.sum()
    torch.manual_seed(0)
    head = convert(target, vocab, tap_ids=(1, 2, 3))
    args = TrainingArguments(
        str(tmp_path / "run"),
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        num_train_epochs=400,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        logging_steps=100,
    )
    trainer = Eagle3Trainer(head, target, args, steps=4, train_dataset=StateDataset(tmp_path / "states", 60))
    trainer.train()
    trainer.save_head(tmp_path / "head")
    logged = [entry for entry in trainer.state.log_history if "simulated_length" in entry]
    assert logged[-1]["simulated_length"] > logged[0]["simulated_length"] + 1

    spec = SpeculativeGenerator(target, Eagle3Proposer(load(tmp_path / "head"), branching=(1,) * 4), draft_length=4)
    for i in range(8):
        spec.generate(tiny.prompts(4 + i, seed=i)["input_ids"], do_sample=False, max_new_tokens=40)
    follows = {}  # the bigram baseline, as generous as can be: fitted to the very texts
    for text in texts:
        for one, two in zip(text.ids.tolist(), text.ids.tolist()[1:], strict=False):
            follows.setdefault(one, []).append(two)
    total = sum(map(len, follows.values()))
    bigram = sum(max(map(seen.count, set(seen))) for seen in follows.values()) / total
    assert spec.report.conditional_acceptance_rate_per_pos[0] > bigram
    assert spec.report.mean_acceptance_length > 2.5


# The command


@pytest.fixture(scope="module")
def files(tokenizer, tmp_path_factory):
    """A tiny target with its tokenizer, and texts of its own."""
    folder = tmp_path_factory.mktemp("target")
    target = tiny.model("llama", num_hidden_layers=4)
    target.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = []
    for i in range(12):
        ids = some_texts(target, 1, 16)[0].ids if i == 0 else some_texts(target, 2, 16)[i % 2].ids
        lines.append({"text": " ".join(WORDS[5 + token % 26] for token in ids.tolist())})
    written(folder / "data.jsonl", *lines)
    return folder


SMALL = "--draft-vocab 30 --steps 3 --length 40 --epochs 2 --batch-size 2 --held-out 2 --save-every 2 --device cpu"


def arguments(files, out, *options):
    return ["train", str(files / "model"), str(files / "data.jsonl"), str(out), *SMALL.split(), *options]


def run(files, out, *options):
    return CliRunner().invoke(app, arguments(files, out, *options))


def process(command, **environment):
    threads = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | threads | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def logged(out):
    """Of all updates, by the newest checkpoint."""
    state = json.loads((Path(last_checkpoint(out / "run")) / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def losses(out):
    return [(entry["step"], entry["loss"]) for entry in logged(out)]


def same_heads(one, two):
    one, two = load(one / "head").state_dict(), load(two / "head").state_dict()
    return all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_the_command_makes_a_head_that_is_ahead_of_bigrams(tokenizer, tmp_path):
    """On prompts that neither has seen, in chains of three, by the decoder."""
    target = tiny.model("llama", num_hidden_layers=4, vocab_size=len(WORDS))
    target.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompts = torch.randint(5, len(WORDS), (208, 10), generator=torch.manual_seed(0))
    endless = {"max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
    texts = target.generate(prompts, do_sample=True, top_k=0, **endless)
    lines = [{"text": " ".join(WORDS[token] for token in text)} for text in texts.tolist()]
    data = written(tmp_path / "data.jsonl", *lines[8:])
    held = written(tmp_path / "held.jsonl", *lines[:8])
    command = ["train", str(tmp_path / "model"), str(data), str(tmp_path / "out"), "--held-out-data", str(held)]
    options = f"--draft-vocab {len(WORDS)} --steps 3 --length 50 --epochs 30 --learning-rate 5e-3 --batch-size 16"
    result = CliRunner().invoke(app, [*command, *options.split(), "--cache-states", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    spec = SpeculativeGenerator(
        target, Eagle3Proposer(load(tmp_path / "out" / "head"), branching=(1,) * 3), draft_length=3
    )
    follows = [[0] * len(WORDS) for _ in WORDS]
    for text in texts[8:].tolist():
        for one, two in pairwise(text):
            follows[one][two] += 1
    rounds = accepted = 0
    for prompt in prompts[:8]:
        text = spec.generate(prompt[None], do_sample=False, **endless)[0].tolist()
        at = len(prompt)
        while at < len(text) - 3:
            taken, token = 0, text[at]
            while taken < 3 and (token := follows[token].index(max(follows[token]))) == text[at + 1 + taken]:
                taken += 1
            rounds, accepted, at = rounds + 1, accepted + taken, at + 1 + taken
    assert spec.report.mean_acceptance_length > 1 + accepted / rounds + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False])
def test_the_command_trains_and_takes_up_its_work(files, tmp_path, cached):
    more = ["--cache-states"] if cached else []
    result = run(files, tmp_path, *more)
    assert result.exit_code == 0, result.output
    assert "% of what it writes" in result.output
    assert "mean acceptance length on held-out prompts" in result.output
    assert (tmp_path / "states").exists() == cached
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["best_update"] == evaluation["log"][-1]["step"]
    before = load(tmp_path / "head").state_dict()
    again = run(files, tmp_path, *more)  # everything is done: nothing changes
    assert again.exit_code == 0, again.output
    after = load(tmp_path / "head").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    other = run(files, tmp_path, *more, "--seed", "1")
    assert other.exit_code == 2
    assert "another recipe (seed was 0, is 1)" in other.output


@pytest.mark.slow
def test_training_goes_on_from_a_head(files, tmp_path):
    assert run(files, tmp_path / "first", "--epochs", "30").exit_code == 0
    start = ["--from", str(tmp_path / "first" / "head"), "--epochs", "5"]
    assert run(files, tmp_path / "still", *start, "--learning-rate", "0").exit_code == 0
    assert same_heads(tmp_path / "first", tmp_path / "still")
    second = run(files, tmp_path / "second", *start)
    assert second.exit_code == 0
    assert "update 0: accepted per round" in second.output
    assert not same_heads(tmp_path / "first", tmp_path / "second")
    log = json.loads((tmp_path / "second" / "evaluation.json").read_text())["log"]
    assert log[0]["step"] == 0  # what it went on from is measured too
    before = json.loads((tmp_path / "first" / "evaluation.json").read_text())["best"]["tree_length"]
    assert log[0]["decoder_tree_length"] == pytest.approx(before, rel=0.05)  # it was saved in bfloat16
    assert losses(tmp_path / "second")[0][1] < losses(tmp_path / "first")[0][1]
    assert run(files, tmp_path / "more", *start, "--draft-vocab", "40").exit_code == 0
    first, more = (set(load(tmp_path / name / "head").draft_to_target.tolist()) for name in ("first", "more"))
    assert first < more
    assert len(more) == 40


def test_training_goes_on_from_another_targets_head(files, tokenizer, tmp_path):
    wide = tiny.model("llama", num_hidden_layers=6, hidden_size=48, num_attention_heads=4)
    wide.save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    save(eagle3.head(tap_ids=(2, 2, 1)), tmp_path / "head")
    start = ["--from", str(tmp_path / "head"), "--epochs", "1"]
    data, out = str(files / "data.jsonl"), tmp_path / "out"
    options = SMALL.replace("--draft-vocab 30", "").split()
    command = ["train", str(tmp_path / "wide"), data, str(out), *options, *start]
    other = CliRunner().invoke(app, command)
    assert other.exit_code == 2
    assert "belongs to another model" in other.output.replace("\n", " ")
    command += ["--from-target", str(files / "model")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "carrying" in result.output
    assert load(out / "head").config.hidden_size == 48
    kept = (out / "transferred" / "model.safetensors").stat().st_mtime_ns
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert (out / "transferred" / "model.safetensors").stat().st_mtime_ns == kept  # the work was not done again


def test_another_targets_head_needs_its_name_and_the_same_tokens(files, tokenizer, tmp_path):
    result = run(files, tmp_path / "out", "--from-target", str(files / "model"))
    assert result.exit_code == 2
    assert "give --from too" in result.output.replace("\n", " ")
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(reversed(WORDS))}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(tmp_path / "other")
    save(eagle3.head(draft_vocab_size=20), tmp_path / "head")
    options = ["--from", str(tmp_path / "head"), "--from-target", str(tmp_path / "other")]
    result = run(files, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert "have different tokens" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, ["--intermediate-size", "8"], "leave out --intermediate-size"),
        ({}, ["--draft-vocab", "8"], "choose a larger --draft-vocab"),
        ({"target_hidden_size": 64}, [], "belongs to another model"),
        (None, [], "neither a folder"),
    ],
)
def test_heads_that_training_cannot_go_on_from(files, tmp_path, changes, options, message):
    if changes is not None:
        save(eagle3.head(tap_ids=(0, 1, 2), **changes), tmp_path / "head")
    result = run(files, tmp_path / "out", "--from", str(tmp_path / "head"), *options)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
    left = [path.name for path in (tmp_path / "out").iterdir()]
    assert left == [".lock"]  # no work was done, and a corrected command is not refused


def test_training_does_not_go_on_from_the_first_eagle(monkeypatch):
    monkeypatch.setattr(recipe, "load", lambda path: eagle3.head(version=1, draft_vocab_size=tiny.VOCAB))
    with pytest.raises(ValueError, match="only EAGLE-3"):
        recipe.Recipe("target", Path("data"), Path("out"), start_from="head")._given()


@pytest.mark.slow
def test_states_computed_on_the_way_train_the_same_head(files, tmp_path):
    """Up to the rounding of cached states to bfloat16."""
    for name, options in {"cached": ["--cache-states"], "online": []}.items():
        assert run(files, tmp_path / name, *options).exit_code == 0
    cached, online = losses(tmp_path / "cached"), losses(tmp_path / "online")
    assert [step for step, _ in cached] == [step for step, _ in online]
    assert [loss for _, loss in online] == pytest.approx([loss for _, loss in cached], rel=0.02)


@pytest.mark.slow
def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(files, tmp_path):
    whole = run(files, tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    assert run(files, tmp_path / "cut").exit_code == 0
    checkpoints = sorted((tmp_path / "cut" / "run").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    (checkpoints[-1] / "trainer_state.json").write_text("{")  # as if killed while it was written
    assert last_checkpoint(tmp_path / "cut" / "run") == str(checkpoints[-2])
    (tmp_path / "cut" / "evaluation.json").unlink()
    (tmp_path / "cut" / "head" / "model.safetensors").unlink()
    assert run(files, tmp_path / "cut").exit_code == 0
    assert same_heads(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_killed_and_taken_up_again(files, tmp_path):
    long = ["--epochs", "30", "--cache-states", "--save-every", "15"]
    assert run(files, tmp_path / "whole", *long).exit_code == 0
    killed = process(["-m", "specdec", *arguments(files, tmp_path / "killed", *long)])
    runs = tmp_path / "killed" / "run"
    deadline = time.monotonic() + 120
    while last_checkpoint(runs) is None and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.kill()  # SIGKILL
    killed.wait()
    assert last_checkpoint(runs) is not None, killed.stdout.read()
    assert not (tmp_path / "killed" / "evaluation.json").exists()  # it had not come to the end
    assert run(files, tmp_path / "killed", *long).exit_code == 0
    assert "accuracy_2" in logged(tmp_path / "whole")[0]
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")
    assert same_heads(tmp_path / "killed", tmp_path / "whole")


def test_a_folder_of_before_an_option_was_there_is_taken_up(tmp_path):
    mine = recipe.Recipe("target", Path("data"), tmp_path)
    before = mine._settled("sha", "weights")
    del before["start_from"]
    (tmp_path / "recipe.json").write_text(json.dumps(before))
    assert mine._settled("sha", "weights") == before | {"start_from": "None"}
    with pytest.raises(ValueError, match=r"another recipe \(--from was None, is head\)"):
        recipe.Recipe("target", Path("data"), tmp_path, start_from="head")._settled("sha", "weights")


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one(files, tmp_path):
    """Also if they are out of time in between, and where one has more to learn from than the other."""
    lines = (files / "data.jsonl").read_text().splitlines()
    short = [{"prompt": "a b c d e f g h i j k l", "response": letter} for letter in "mnopqrst"]
    data = written(tmp_path / "data.jsonl", *(entry for pair in zip(lines, short, strict=False) for entry in pair))
    longer = ["--epochs", "15", "--length", "20"]

    def train(out):
        return ["train", str(files / "model"), str(data), str(tmp_path / out), *SMALL.split(), *longer]

    assert CliRunner().invoke(app, train("one")).exit_code == 0
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    for minutes, said in (("0", "time is up at update 2 of "), ("9", "the head is in")):
        command = [*launch, "-m", "specdec", *train("two"), "--max-minutes", minutes]
        both = process(command, ACCELERATE_USE_CPU="true")
        output, _ = both.communicate(timeout=240)
        assert both.returncode == 0, output
        assert said in output
    assert (Path(last_checkpoint(tmp_path / "two" / "run")) / "rng_state_1.pth").exists()  # there were two
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) > 5
    assert [step for step, _ in one] == [step for step, _ in two]
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-3)


@pytest.mark.slow
def test_a_run_in_slices(files, tmp_path):
    assert run(files, tmp_path / "whole").exit_code == 0
    for _ in range(60):
        result = run(files, tmp_path / "slices", "--max-minutes", "0")
        assert result.exit_code == 0, result.output
        if "not finished yet" not in result.output:
            break
    assert same_heads(tmp_path / "whole", tmp_path / "slices")


def test_a_loss_that_is_not_a_number_ends_training(files, tmp_path, monkeypatch):
    def broken(self, ids, **kwargs):
        return {"loss": torch.nan * self.head.fc.weight.sum(), "accuracy": torch.ones(3)}

    monkeypatch.setattr("specdec.eagle3.objective.Objective.forward", broken)
    result = run(files, tmp_path)
    assert result.exit_code == 2
    assert "the loss is nan at update 0: try a lower learning rate" in result.output


@pytest.mark.parametrize("verbosity", [logging.WARNING, logging.ERROR], ids=["with a bar", "without"])
def test_what_training_says_on_the_way(files, tmp_path, request, verbosity):
    request.addfinalizer(partial(logging.set_verbosity, logging.get_verbosity()))
    logging.set_verbosity(verbosity)  # above warnings there is no bar
    result = run(files, tmp_path, "--epochs", "2")
    assert result.exit_code == 0, result.output
    lines = result.output.replace("\r", "\n").splitlines()
    assert any(re.search(r"update 10: loss \d+\.\d+, first choices right( \d\.\d\d){3} ", line) for line in lines)
    assert any(re.search(r"update 10: accepted per round \d\.\d\d tokens with trees at T=0", line) for line in lines)


@pytest.mark.parametrize("kind", recipe.SHARDING)
def test_sharding_the_head_is_refused(files, tmp_path, monkeypatch, kind):
    monkeypatch.setenv(recipe.SHARDING[kind], "true")
    result = run(files, tmp_path / "out")
    assert result.exit_code == 2
    assert f"not with {kind}" in result.output
    assert not (tmp_path / "out").exists()


def test_failures_as_they_come_are_understood(tmp_path):
    """Not as somebody thinks they do: of a device that is full, and of more memory than there is."""
    with pytest.raises(ValueError, match="the disk is full"), recipe._clear_failures(tmp_path, ""):
        torch.save(torch.ones(100_000), "/dev/full")
    with pytest.raises(ValueError, match="the disk is full"), recipe._clear_failures(tmp_path, ""):
        Path("/dev/full").write_text("a")
    with pytest.raises(ValueError, match="out of memory: use less"), recipe._clear_failures(tmp_path, "use less"):
        torch.empty(1 << 50)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (torch.OutOfMemoryError("CUDA out of memory"), "use fewer --rows-at-once"),
    ],
)
def test_failures_for_want_of_room_are_clear(files, tmp_path, monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("specdec.eagle3.trainer.Eagle3Trainer.train", fail)
    result = run(files, tmp_path)
    assert result.exit_code == 2
    assert message in result.output
    assert "the same command goes on" in result.output.replace("\n", " ")


def test_rows_that_cannot_be_divided(files, tmp_path):
    result = run(files, tmp_path / "out", "--batch-size", "5", "--rows-at-once", "2")
    assert result.exit_code == 2
    assert "choose a multiple" in result.output
    assert not (tmp_path / "out").exists()  # a corrected command is not refused


@pytest.mark.slow
def test_rows_in_several_passes_train_the_same_head(files, tmp_path):
    for name, at_once in (("two", "2"), ("one", "1")):
        assert run(files, tmp_path / name, "--rows-at-once", at_once, "--epochs", "8").exit_code == 0
    one, two = ([loss for _, loss in losses(tmp_path / name)] for name in ("one", "two"))
    assert len(one) > 2
    assert one == pytest.approx(two, rel=0.01)


def test_a_chat_template_may_show_the_time(files, tokenizer, tmp_path):
    """Tokens of another day would not fit the states of the first."""
    shutil.copytree(files / "model", tmp_path / "model")
    dated = copy.deepcopy(tokenizer)
    dated.chat_template = "{{ ('a ' * (strftime_now('%f') | int % 13)) }}" + TEMPLATE
    dated.save_pretrained(tmp_path / "model")
    entries = [{"prompt": "a b", "response": " ".join("cdefghij"[: 2 + i % 7])} for i in range(12)]
    data = written(tmp_path / "data.jsonl", *entries)
    command = ["train", str(tmp_path / "model"), str(data), str(tmp_path / "out"), *SMALL.split(), "--cache-states"]
    first = CliRunner().invoke(app, [*command, "--max-minutes", "0"])
    assert "not finished yet" in first.output
    texts = (tmp_path / "out" / "texts.safetensors").read_bytes()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "texts.safetensors").read_bytes() == texts
    written(tmp_path / "data.jsonl", *entries[1:])
    other = CliRunner().invoke(app, command)
    assert other.exit_code == 2
    assert "another recipe (on other texts)" in other.output.replace("\n", " ")


def test_one_folder_has_one_name(files, tmp_path, monkeypatch):
    assert "not finished yet" in run(files, tmp_path / "out", "--cache-states", "--max-minutes", "0").output
    monkeypatch.chdir(files)
    command = ["train", "./model", "data.jsonl", str(tmp_path / "out"), *SMALL.split(), "--cache-states"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output


def test_texts_to_evaluate_on_may_be_a_file_of_their_own(files, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(recipe, "Judge", lambda trainer, prompts, *rest, **more: seen.append(prompts) or 1 / 0)
    held = written(tmp_path / "held.jsonl", {"text": "a b c d e f g h"}, {"prompt": "z", "response": "y x"})
    result = run(files, tmp_path / "out", "--held-out-data", str(held), "--held-out", "50")
    assert isinstance(result.exception, ZeroDivisionError)
    assert [len(prompt) for prompt in seen[0]] == [2, 4]
    assert len(kept_texts(tmp_path / "out" / "texts.safetensors")) == 12  # all


def test_texts_both_learnt_and_evaluated_on_are_said(files, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "Judge", lambda *rest, **more: 1 / 0)
    options = ["--held-out-data", str(files / "data.jsonl")]
    with pytest.warns(UserWarning, match="12 of the 12 texts to evaluate on are learnt from, too"):
        run(files, tmp_path / "out", *options)
    again = run(files, tmp_path / "out", "--held-out", "1")
    assert "(held_out was a file of its own, is 1)" in again.output.replace("\n", " ")


def test_a_target_that_has_changed_since_is_said(files, tokenizer, tmp_path):
    shutil.copytree(files / "model", tmp_path / "model")
    command = ["train", str(tmp_path / "model"), str(files / "data.jsonl"), str(tmp_path / "out"), *SMALL.split()]
    assert CliRunner().invoke(app, [*command, "--max-minutes", "0"]).exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert recipe.weights_of(model) == recipe.weights_of(AutoModelForCausalLM.from_pretrained(files / "model"))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.01)
    model.save_pretrained(tmp_path / "model")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "another recipe (the target's weights were others): choose another folder" in result.output


def test_two_runs_do_not_share_a_folder(files, tmp_path):
    with recipe._alone(tmp_path):
        result = run(files, tmp_path)
    assert result.exit_code == 2
    assert f"another run is at work in {tmp_path}" in result.output


def test_a_trainings_folder_is_no_head_but_holds_one(files, tmp_path):
    save(convert(tiny.model("llama", num_hidden_layers=4), torch.arange(20)), tmp_path / "head")
    with pytest.raises(ValueError, match=f"has no config.json: it is a training's, whose head is {tmp_path}/head"):
        load(tmp_path)


def test_the_probe_says_when_hardly_anything_is_accepted(files, tmp_path):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(files / "model")
    head = convert(target, torch.arange(20))
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_()
    save(head, tmp_path / "head")
    command = ["inspect", str(tmp_path / "head"), "--target", str(files / "model"), "--probe"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "Hardly a draft is accepted: this head is of another model, or was not trained." in result.output


def test_results_do_not_go_into_a_models_folder(files):
    before = sorted(files.glob("model/*"))
    result = run(files, files / "model")
    assert result.exit_code == 2
    assert "is a model's folder: choose another one" in result.output.replace("\n", " ")
    assert sorted(files.glob("model/*")) == before


def test_a_fresh_heads_attention_may_go_without_biases(tmp_path):
    target = tiny.model("llama", num_hidden_layers=4, attention_bias=True)
    assert convert(target, torch.arange(20)).config.attention_bias
    head = convert(target, torch.arange(20), attention_bias=False)
    assert not [name for name in head.state_dict() if name.endswith("bias")]
    with pytest.raises(ValueError, match="leave out --no-attention-bias"):
        recipe.Recipe("target", Path("data"), tmp_path, start_from="head", attention_bias=False)._given()


def test_rows_longer_than_the_target_reads_are_refused(files, tmp_path):
    shutil.copytree(files / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 39}))
    command = ["train", str(tmp_path / "model"), str(files / "data.jsonl"), str(tmp_path / "out"), *SMALL.split()]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "reads 39 tokens at most" in result.output.replace("\n", " ")


def test_texts_up_to_the_end_of_what_the_target_reads(tokenizer, tmp_path):
    """Where positions are learnt, one more is an IndexError."""
    target = tiny.model("gpt2", n_positions=32, n_layer=4)
    target.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    entries = [{"prompt": "a b " * 14, "response": "c d e"} for _ in range(6)]
    data = written(tmp_path / "data.jsonl", *entries)
    command = ["train", str(tmp_path / "model"), str(data), str(tmp_path / "out"), *SMALL.split(), "--length", "32"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    prompts = written(tmp_path / "prompts.jsonl", {"prompt": "a " * 8}, {"prompt": "a " * 22})
    command = ["regenerate", str(tmp_path / "model"), str(prompts), str(tmp_path / "answers.jsonl")]
    with pytest.warns(UserWarning, match="1 conversations were left out: their prompts are longer than 16 tokens"):
        result = CliRunner().invoke(app, [*command, "--max-new-tokens", "16"])
    assert result.exit_code == 0, result.output
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 1
    result = CliRunner().invoke(app, [*command, "--max-new-tokens", "32"])
    assert result.exit_code == 2
    assert "leaves no room for a prompt in the 32 tokens" in result.output.replace("\n", " ")


def test_too_few_texts(files, tmp_path):
    result = run(files, tmp_path, "--held-out", "50")
    assert result.exit_code == 2
    assert "none is left" in result.output


# Regenerating


def asked(files, name="prompts.jsonl"):
    two_turns = [{"role": role, "content": text} for role, text in [("user", "a b"), ("assistant", "x"), ("user", "c")]]
    return written(files / name, {"prompt": "a b c"}, {"messages": two_turns}, {"prompt": "d"}, {"prompt": "e " * 90})


def rewrite(files, out, *options):
    command = ["regenerate", str(files / "model"), str(files / "prompts.jsonl"), str(out)]
    limits = ["--max-new-tokens", "6", "--max-prompt-tokens", "60", "--batch-size", "2"]
    return CliRunner().invoke(app, [*command, *limits, *options])


def test_the_target_answers_all_turns_itself(files, tokenizer, tmp_path):
    asked(files)
    result = rewrite(files, tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.output
    lines = {line["id"]: line for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert set(lines) == {0, 1, 2}  # the last one is too long
    target = tiny.model("llama", num_hidden_layers=4)
    for line in lines.values():
        for i, message in enumerate(line["messages"]):
            if message["role"] != "assistant":
                continue
            prompt = torch.tensor([encode_prompt(line["messages"][:i], tokenizer)])
            plain = target.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
            assert message["content"] == tokenizer.decode(plain)
            assert message["content"] != "x"
    texts = list(read_texts(tmp_path / "out.jsonl", tokenizer, 100))
    assert len(texts) == 3
    assert all(text.ids[-1] == tokenizer.eos_token_id for text in texts)
    assert not any(text.learn[-1] for text in texts)  # they were cut off: the end is the template's


def test_regenerating_goes_on_where_it_stopped(files, tmp_path):
    asked(files)
    out = tmp_path / "out.jsonl"
    assert rewrite(files, out, "--temperature", "0", "--temperature", "1").exit_code == 0
    whole = out.read_text()
    first, *_ = whole.splitlines(keepends=True)
    out.write_text(first + whole[len(first) : len(first) + 20])  # killed in the middle of a line
    assert rewrite(files, out, "--temperature", "0", "--temperature", "1").exit_code == 0
    assert sorted(out.read_text().splitlines()) == sorted(whole.splitlines())
    assert out.read_text().startswith(first)
    assert rewrite(files, out, "--temperature", "0", "--temperature", "1", "--limit", "1").exit_code == 0
    assert sorted(out.read_text().splitlines()) == sorted(whole.splitlines())
    assert "nothing was left to answer" in rewrite(files, out, "--temperature", "0", "--temperature", "1").output
    for changed in (["--temperature", "0.5"], ["--temperature", "0", "--temperature", "1", "--max-new-tokens", "3"]):
        result = rewrite(files, out, *changed)
        assert result.exit_code == 2
        assert "holds answers with" in result.output
    sliced = tmp_path / "sliced.jsonl"
    result = rewrite(files, sliced, "--max-minutes", "0")
    assert "so far: the same command goes on" in result.output
    assert not sliced.read_text()
    for foreign in ("these are my notes\n", '{"mine": 1}'):
        (tmp_path / "notes.jsonl").write_text(foreign)
        result = rewrite(files, tmp_path / "notes.jsonl")
        assert result.exit_code == 2
        assert "is not a file of answers" in result.output
        assert (tmp_path / "notes.jsonl").read_text() == foreign
    written(files / "prompts.jsonl", {"prompt": "z"})
    result = rewrite(files, out)
    assert result.exit_code == 2
    assert "holds answers of another target or to other prompts" in result.output


def test_without_a_chat_template_a_conversation_is_a_prompt_and_its_answer(tokenizer):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    [text] = read_texts([{"messages": messages, "finish": "length"}], plain, 10)
    assert (words(plain, text.ids), words(plain, text.ids[text.learn])) == ("a b c d", "c d")


def test_plain_texts_and_datasets_are_read(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("a b c d\n\ne f g\n")
    assert [words(tokenizer, text.ids) for text in read_texts(tmp_path / "a.txt", tokenizer, 10)] == [
        "a b c d",
        "e f g",
    ]
    rows = [{"text": "a b c"}, {"prompt": "a", "response": "b"}]  # a Dataset yields dictionaries, too
    assert len(list(read_texts(rows, tokenizer, 10))) == 2
    with pytest.raises(ValueError, match="entry 1: expected"):
        list(read_texts([{"text": "a b c"}, {"question": "a"}], tokenizer, 10))
