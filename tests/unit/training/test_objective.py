"""What a head is trained to do: losses, their gradients, and the target's logits."""

import pytest
import torch
from transformers import AutoConfig

from specdec.heads import layers
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.objectives.losses import LOSSES
from specdec.training.objectives.unroll import unroll
from specdec.training.teacher.target_logits import TargetLogits
from tests.support import eagle3, tiny
from tests.support.naive_eagle3 import NaiveHead
from tests.support.training import batch_of, some_texts, target_logits_of


def naive_loss(head, target, text, state, steps, decay):
    """One text, token by token: the naive head's drafts against the target's own distribution."""
    reference = NaiveHead(head.state_dict(), head.config, target.get_input_embeddings().weight)
    lm_head = target.get_output_embeddings().weight.double()
    ids, taps, final = text.ids.tolist(), state[:, :-32], state[:, -32:].double()
    losses, right = [], []
    for step in range(steps):
        entropies, hits = [], []
        for i in range(len(ids) - 2 - step):
            if not text.learn[i + 2 + step]:
                continue
            drafted = reference.draft(taps[: i + 1], ids[1 : i + 2], ids[i + 2 : i + 2 + step])
            wanted = lm_head @ final[i + 1 + step]
            p = wanted.softmax(-1)[head.draft_to_target]
            entropies.append(-(p * drafted.log_softmax(-1)).sum())
            hits.append(float(wanted.argmax() == head.draft_to_target[drafted.argmax()]))
        losses.append(decay**step * sum(entropies) / len(entropies))
        right.append(sum(hits) / len(hits))
    return sum(losses) / sum(decay**step for step in range(steps)), right


@torch.no_grad()
def test_the_objective_is_the_naive_one():
    target, head = tiny.model("llama"), eagle3.head(tap_ids=(0, 1, 2))
    text = some_texts(target, 1, new_tokens=8)[0]
    state = eagle3.states_of(target, text.ids[None], (0, 1, 2, -1))
    objective = Eagle3Objective(head, *target_logits_of(target, head), steps=3, decay=0.7)
    outputs = objective(*batch_of(target, text.ids[None], text.learn[None], state))
    loss, accuracy = naive_loss(head, target, text, state[0], 3, 0.7)
    assert float(outputs["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert outputs["accuracy"].tolist() == pytest.approx(accuracy)


def test_texts_shorter_than_the_drafts():
    """Steps beyond a text's end have no drafts."""
    target, head = tiny.model("llama"), eagle3.head(tap_ids=(0, 1, 2)).train()
    embedding, target_logits = target_logits_of(target, head)
    ids = torch.randint(1, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    states = eagle3.states_of(target, ids, (0, 1, 2, -1))
    batch = batch_of(target, ids, torch.ones_like(ids, dtype=torch.bool), states, torch.zeros_like(ids))
    losses = [Eagle3Objective(head, embedding, target_logits, steps=n)(*batch)["loss"] for n in (3, 5)]
    torch.testing.assert_close(*losses)


def test_gradients_reach_every_parameter():
    target, head = tiny.model("llama"), eagle3.head("3.1", tap_ids=(0, 1, 2)).train()
    text = some_texts(target, 1)[0]
    state = eagle3.states_of(target, text.ids[None], (0, 1, 2, -1))
    objective = Eagle3Objective(head, *target_logits_of(target, head), steps=2)
    objective(*batch_of(target, text.ids[None], text.learn[None], state))["loss"].backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in head.parameters())
    assert all(weight.grad is None for weight in target.parameters())


@torch.no_grad()
def test_a_row_with_few_drafts_is_not_filled_up_to_one_with_many(monkeypatch):
    """Where rows are long: many short ones are a pass together."""
    target, head = tiny.model("llama"), eagle3.head(tap_ids=(0, 1, 2))
    torch.manual_seed(0)
    ids = torch.randint(3, tiny.VOCAB, (2, 24))
    learn = torch.arange(24) >= torch.tensor([[12], [21]])
    states = eagle3.states_of(target, ids, (0, 1, 2, -1))
    objective = Eagle3Objective(head, *target_logits_of(target, head), steps=2)
    ids, learn, documents, states, over_all = batch_of(target, ids, learn, states)
    counts = objective.drafts(ids, learn, documents).sum((1, 2))
    passes = []
    monkeypatch.setattr("specdec.training.objectives.eagle3.LONG", 24)
    hook = head.register_forward_pre_hook(lambda _, given: passes.append(tuple(given[0].shape[:2])))
    whole = objective(ids, learn, documents, states, over_all)["loss"]
    hook.remove()
    assert sorted(passes) == [(1, 4), (1, 4), (1, 13), (1, 13)]  # a token is drafted from one of two rows before it
    of_rows = [objective(ids[b], learn[b], documents[b], states[b], over_all[b], counts)["loss"] for b in ([0], [1])]
    assert float(sum(of_rows)) == pytest.approx(float(whole), rel=1e-5)


def naive_weights(overlap, keep):
    """D-PACE's weights of the drafts that begin with each token, by automatic differentiation. overlap: by step."""
    logs = [torch.zeros_like(each, requires_grad=True) for each in overlap]
    expected, chance = 0.0, 1.0
    for log, each, kept in zip(logs, overlap, keep, strict=True):
        step = torch.where(kept, (0.5 + 0.5 * each.detach()) * log.exp(), 1.0)
        chance = step * (chance if isinstance(chance, float) else chance[:, : step.shape[1]])
        expected = expected + chance[kept].sum()
    return torch.autograd.grad(expected, logs)


@pytest.mark.parametrize("by_acceptance", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_autograds(loss, by_acceptance, monkeypatch):
    """The loss computes them itself, few rows at a time."""
    target, head = tiny.model("llama"), eagle3.head(tap_ids=(0, 1, 2)).train()
    texts = some_texts(target, 2)
    longest = max(len(text.ids) for text in texts)
    ids = torch.stack([torch.nn.functional.pad(text.ids, (0, longest - len(text.ids))) for text in texts])
    learn = torch.stack([torch.nn.functional.pad(text.learn, (0, longest - len(text.learn))) for text in texts])
    documents = torch.zeros_like(ids)
    documents[0, 9:] = 1
    state = eagle3.states_of(target, ids, (0, 1, 2, -1))
    embedding, target_logits = target_logits_of(target, head)

    losses, overlaps, kept = [], [], []  # by the book: all logits at once
    for step, h in enumerate(unroll(head, embedding[ids], state[..., :-32], 3, documents)):
        rows = ids.shape[1] - 2 - step
        keep = learn[:, 2 + step :] & (documents[:, 2 + step :] == documents[:, :rows])
        p = target.get_output_embeddings()(state[:, 1 + step : -1, -32:]).softmax(-1)[..., head.draft_to_target]
        log_q = head.logits(h[:, :rows]).log_softmax(-1)
        overlap = torch.minimum(p, log_q.exp()).sum(-1)
        entropy = -(p * log_q).sum(-1)
        distance = (p - log_q.exp()).abs().sum(-1) + 1 - p.sum(-1)
        of_rows = {
            "ce": entropy,
            "lk": -overlap.log(),
            "ce+lk": (entropy - overlap.log()) / 2,
            "tv": 0.9 * distance + 0.1 * entropy,
        }[loss]
        losses.append(of_rows)
        overlaps.append(overlap)
        kept.append(keep)
    if by_acceptance:
        weights = naive_weights(overlaps, kept)
        most = max(int(keep.sum()) for keep in kept)
        wanted = sum((w * each)[keep].sum() for w, each, keep in zip(weights, losses, kept, strict=True)) / most
    else:
        wanted = sum(0.8**step * each[keep].mean() for step, (each, keep) in enumerate(zip(losses, kept, strict=True)))
        wanted = wanted / sum(0.8**step for step in range(3))
    wanted.backward()
    right = float(wanted)
    wanted = {name: weight.grad.clone() for name, weight in head.named_parameters()}

    head.zero_grad()
    monkeypatch.setattr("specdec.training.objectives.losses.ROWS_AT_ONCE", 7)
    objective = Eagle3Objective(head, embedding, target_logits, steps=3, loss=loss)
    objective.by_acceptance = by_acceptance
    found = objective(*batch_of(target, ids, learn, state, documents))["loss"]
    assert float(found) == pytest.approx(right)
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
    torch.testing.assert_close(TargetLogits.of(target, rows)(state), theirs, rtol=1e-3, atol=1e-4)


def test_flex_attention_is_compiled_for_more_sizes_than_torch_allows_by_itself(monkeypatch):
    limits = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda: limits.append(torch._dynamo.config.recompile_limit))
    layers._flex_attention.__wrapped__(True)()
    assert limits == [layers.SIZES]
    assert torch._dynamo.config.recompile_limit < layers.SIZES


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
