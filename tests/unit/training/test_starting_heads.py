"""Heads that training begins with: fresh, with more tokens, carried over from another target."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from specdec.cli.app import app
from specdec.data.texts import Text
from specdec.heads.eagle3.checkpoint import load
from specdec.heads.eagle3.export import save
from specdec.training.initialization import head_transfer
from specdec.training.initialization.draft_vocabulary import frequent_tokens, token_counts
from specdec.training.initialization.eagle3 import initialize, with_vocabulary
from specdec.training.initialization.head_transfer import transfer_head, translate
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.recipe import Recipe
from specdec.training.starting_head import given_head
from specdec.training.teacher import state_cache
from tests.support import eagle3, tiny
from tests.support.training import SMALL, WORDS, batch_of, losses, run, same_heads, some_texts, target_logits_of


def test_frequent_tokens():
    ids, learn = torch.tensor([5, 5, 5, 2, 2, 7, 3, 3, 3]), torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 0])
    counts = token_counts([Text(ids, learn)], 10)
    assert counts.tolist() == [0, 0, 2, 0, 0, 3, 0, 1, 0, 0]
    best = frequent_tokens(counts, 2)
    assert best.tolist() == [2, 5]
    assert float(counts[best].sum() / counts.sum()) == pytest.approx(5 / 6)
    assert len(frequent_tokens(counts, 20)) == 10
    read = token_counts([Text(ids, learn)], 10, all_tokens=True)
    assert frequent_tokens(counts, 4, read).tolist() == [2, 3, 5, 7], "of tokens never written, one that was read"


@torch.no_grad()
def test_a_head_that_drafts_other_tokens():
    """Its own tokens' logits stay, in whatever order it had them; new rows drift as its own did."""
    target, head = tiny.model("llama"), eagle3.head(draft_vocab_size=50)
    theirs, drift = target.get_output_embeddings().weight, torch.randn(32, 32)
    own = torch.arange(50).flip(0)
    head.d2t.copy_(own - torch.arange(50))
    head.lm_head.weight.copy_(theirs[own] @ drift)
    more = torch.arange(60)
    bigger = with_vocabulary(head, target, more)
    assert bigger.draft_to_target.tolist() == more.tolist()
    h = torch.randn(1, 2, 32)
    before, after = torch.zeros(2, 1, 2, tiny.VOCAB)
    before[..., own], after[..., more] = head.logits(h), bigger.logits(h)
    torch.testing.assert_close(after[..., own], before[..., own])
    torch.testing.assert_close(bigger.lm_head.weight[50:], theirs[50:60] @ drift, rtol=0.02, atol=0.02)
    others = torch.arange(40, 56)  # some of its own, and some that it did not draft
    moved = with_vocabulary(head, target, others)
    assert moved.draft_to_target.tolist() == others.tolist()
    torch.testing.assert_close(moved.lm_head.weight, bigger.lm_head.weight[40:56])


def test_a_fresh_heads_attention_may_go_without_biases(tmp_path):
    target = tiny.model("llama", num_hidden_layers=4, attention_bias=True)
    assert initialize(target, torch.arange(20)).config.attention_bias
    head = initialize(target, torch.arange(20), attention_bias=False)
    assert not [name for name in head.state_dict() if name.endswith("bias")]
    with pytest.raises(ValueError, match="leave out --no-attention-bias"):
        given_head(Recipe("target", Path("data"), tmp_path, start_from="head", attention_bias=False))


@torch.no_grad()
def test_a_fresh_heads_feature_is_the_highest_state():
    """Without noise, and so that the other states are learnt to be read."""
    target = tiny.model("llama", num_hidden_layers=4)
    head = initialize(target, torch.arange(20), tap_ids=(1, 2, 3))
    text = some_texts(target, 1)[0]
    state = state_cache.states_of(target, (1, 2, 3, -1), [text])[0].float()  # (T, 4 * 32)
    torch.testing.assert_close(head.fuse(state[None, :, :-32]), state[None, :, 64:96])
    objective = Eagle3Objective(head.train(), *target_logits_of(target, head))
    with torch.enable_grad():
        objective(*batch_of(target, text.ids[None], text.learn[None], state[None]))["loss"].backward()
    assert all(bool((part != 0).any()) for part in head.fc.weight.grad.split(32, 1))


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
        ("two layers", {}),
    ],
)
@pytest.mark.parametrize("wide", [32, 48])
@torch.no_grad()
def test_a_head_carried_over_drafts_as_it_did(name, changes, wide, monkeypatch):
    """To a target whose states and embeddings are its donor's, turned within a wider space."""
    monkeypatch.setattr(head_transfer, "RIDGE", 1e-6)
    head = eagle3.head(name, **changes)
    torch.manual_seed(0)
    turn = torch.linalg.qr(torch.randn(wide, wide)).Q[:32]
    old, states = torch.randn(tiny.VOCAB, 32), torch.randn(500, head.config.num_taps * 32) + 0.5
    read = torch.cat([part @ turn for part in states.chunk(head.config.num_taps, -1)], -1)
    seen = torch.ones(tiny.VOCAB, dtype=torch.long)
    carried = translate(head, head.fuse(states), read, old, old @ turn, seen, (0, 2, 3)[: head.config.num_taps])
    assert (carried.config.target_hidden_size, carried.config.hidden_size) == (wide, 32)
    assert torch.equal(carried.draft_to_target, head.draft_to_target)
    ids, position = torch.randint(tiny.VOCAB, (1, 500)), torch.arange(500)[None]
    before, after = head.fuse(states[None]), carried.fuse(read[None])
    for _ in range(2):  # the second pass is fed what the first put out
        before = head(old[ids], before, position, None)
        after = carried((old @ turn)[ids], after, position, None)
        torch.testing.assert_close(carried.logits(after), head.logits(before), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_both_targets_are_read_at_the_same_tokens(monkeypatch):
    """Carried over to its own target a head stays what it is."""
    monkeypatch.setattr(head_transfer, "RIDGE", 1e-7)
    target, head = tiny.model("llama", num_hidden_layers=4), eagle3.head()
    texts = some_texts(target, 12, 24)
    same = transfer_head(head.to(torch.bfloat16), target, target, texts)
    assert head.dtype == torch.bfloat16  # the given one is left alone
    text = texts[-1].ids[None, :-1]
    embeds = target.get_input_embeddings()(text[:, 1:])
    states_of_text = eagle3.states_of(target, text, (2, 2, 1))[:, 1:]
    position = torch.arange(embeds.shape[1])[None]
    h = [each(embeds, each.fuse(states_of_text), position, None) for each in (head.float(), same)]
    torch.testing.assert_close(same.logits(h[1]), head.logits(h[0]), rtol=0.02, atol=0.02 * float(h[0].abs().max()))


def test_the_linear_map_is_weighted_least_squares(monkeypatch):
    monkeypatch.setattr(head_transfer, "RIDGE", 0.0)
    torch.manual_seed(0)
    x, y, weight = torch.randn(60, 5) * torch.rand(5) * 9, torch.randn(60, 3), torch.rand(60) * 4
    root = weight.sqrt()[:, None]
    expected = torch.linalg.lstsq(x * root, y * root).solution.T
    torch.testing.assert_close(head_transfer._linear_map(x, y, weight), expected, rtol=1e-3, atol=1e-4)


def test_a_head_that_cannot_be_carried_over():
    model = tiny.model("llama")
    with pytest.raises(ValueError, match="P-EAGLE head's .* cannot be transferred"):
        transfer_head(eagle3.head(mask_token_id=3), model, model, some_texts(model))


@pytest.mark.slow
def test_training_goes_on_from_a_head(files, tmp_path):
    adamw = ["--optimizer", "adamw"]  # which small heads get on faster by
    assert run(files, tmp_path / "first", "--epochs", "10", *adamw).exit_code == 0
    start = ["--from", str(tmp_path / "first" / "head"), "--epochs", "5", *adamw]
    assert run(files, tmp_path / "still", *start, "--learning-rate", "0").exit_code == 0
    assert same_heads(tmp_path / "first", tmp_path / "still")
    second = run(files, tmp_path / "second", *start)
    assert second.exit_code == 0
    assert "update 0: accepted per round" in second.output
    assert not same_heads(tmp_path / "first", tmp_path / "second")
    log = json.loads((tmp_path / "second" / "evaluation.json").read_text())["log"]
    assert [entry["step"] for entry in log[:2]] == [0, 0]  # what it went on from is measured too
    assert "eval_loss" in log[0]
    before = json.loads((tmp_path / "first" / "evaluation.json").read_text())["best"]["tree_length"]
    assert log[1]["decoder_tree_length"] == pytest.approx(before, rel=0.05)  # it was saved in bfloat16
    assert losses(tmp_path / "second")[0][1] < losses(tmp_path / "first")[0][1]
    assert run(files, tmp_path / "more", *start, "--draft-vocab", "40").exit_code == 0
    first, more = (set(load(tmp_path / name / "head").draft_to_target.tolist()) for name in ("first", "more"))
    assert first < more
    assert len(more) == 40
    assert run(files, tmp_path / "fewer", *start, "--draft-vocab", "12").exit_code == 0
    assert set(load(tmp_path / "fewer" / "head").draft_to_target.tolist()) < first


@pytest.mark.slow
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
    assert "transferring" in result.output
    config = load(out / "head").config
    assert (config.hidden_size, config.target_hidden_size) == (32, 48)
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
    left = {path.name for path in (tmp_path / "out").glob("*")}
    assert left <= {
        ".lock",
        "recipe.json",
        "texts.safetensors",
        "held_out.safetensors",
    }  # no work was done, and a corrected command is not refused


def test_training_does_not_go_on_from_the_first_eagle(monkeypatch):
    monkeypatch.setattr(
        "specdec.training.starting_head.load", lambda path: eagle3.head(version=1, draft_vocab_size=tiny.VOCAB)
    )
    with pytest.raises(ValueError, match="only EAGLE-3"):
        given_head(Recipe("target", Path("data"), Path("out"), start_from="head"))
