"""Drafters of blocks are trained as they draft: what they learn from, faults that are planted, whole runs."""

import json
from dataclasses import replace

import pytest
import torch

from specdec import BlockProposer
from specdec.data.packed_dataset import PackedTexts
from specdec.heads import loading
from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.export import save
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.training.evaluate import evaluate
from specdec.training.initialization.dflash import initialize_block
from specdec.training.objectives import block_unroll
from specdec.training.objectives.block_unroll import lm_head_weight, unroll_blocks
from specdec.training.objectives.dflash import BlockObjective
from specdec.training.objectives.losses import LOSSES
from specdec.training.teacher.base import LocalTeacher
from specdec.training.teacher.target_logits import TargetLogits
from specdec.training.trainer import HeadTrainer
from tests.support import blocks, eagle3, tiny
from tests.support.naive_blocks import NaiveDrafter
from tests.support.training import batch_of, losses, quiet_arguments, run, some_texts, target_logits_of

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
OWN = {"own_head": True, "draft_vocab_size": 40}


def check_unroll(head, documents, wanted):
    """Each row's blocks against the naive drafter, given the text of its document alone."""
    target, generator = tiny.on_host("llama"), torch.Generator().manual_seed(0)
    B, T = documents.shape
    ids = torch.randint(1, tiny.VOCAB, (B, T), generator=generator)
    states = torch.randn(B, T, 32 * len(head.config.tap_ids), generator=generator)
    embeddings = BorrowedEmbeddings.by(target, head)
    reference = NaiveDrafter(head.state_dict(), head.config, target.get_input_embeddings().weight)
    places = unroll_blocks(
        head,
        ids,
        lambda tokens: embeddings.embedded(tokens, head),
        states,
        head.config.drafted,
        documents,
        wanted=wanted,
    )
    for step, place in enumerate(places):
        logits = place.hidden @ lm_head_weight(head).T
        for b, i in wanted.nonzero().tolist():
            anchor, begin = i + 1, int((documents[b] == documents[b, i + 1]).nonzero()[0, 0])
            if i + 1 + step >= T or documents[b, min(T - 1, i + 1 + step)] != documents[b, anchor]:
                continue
            path = ids[b, anchor + 1 : anchor + 1 + step].tolist()
            expected, sure = reference.draft(states[b, begin:anchor], int(ids[b, anchor]), path)
            scale = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(logits[b, i].double() / scale, expected / scale, **CLOSE)
            if sure is not None:
                torch.testing.assert_close(place.acceptance[b, i].double(), sure, **CLOSE)


def some_rows():
    """Two rows of texts, the second of two of them, and the rows that blocks are drafted of."""
    documents = torch.zeros(2, 14, dtype=torch.long)
    documents[1, 6:] = 1
    wanted = torch.zeros(2, 14, dtype=torch.bool)
    wanted[0, [0, 5, 11]] = wanted[1, [2, 7, 8, 10]] = True
    return documents, wanted


@torch.no_grad()
@pytest.mark.parametrize("name", blocks.TRAINED)
def test_many_blocks_at_once_are_the_naive_drafters(name):
    check_unroll(blocks.head(name, **OWN), *some_rows())


def sees_its_anchor(monkeypatch):
    """The mask is off by one: the target's state at the anchor, which knows what comes next."""
    visible = block_unroll._visible
    monkeypatch.setattr(block_unroll, "_visible", lambda c, d, p, anchors, at: visible(c, d, p, anchors + 1, at))


def late(monkeypatch):
    """Blocks stand one position behind where they should."""
    forward = DFlashHead.forward
    monkeypatch.setattr(DFlashHead, "forward", lambda self, embeds, at, *rest: forward(self, embeds, at + 1, *rest))


def one_text(monkeypatch):
    """Texts that are packed in one row see each other."""
    visible = block_unroll._visible
    monkeypatch.setattr(block_unroll, "_visible", lambda c, d, *rest: visible(c, torch.zeros_like(d), *rest))


def one_token_early(monkeypatch):
    """A row's block is the one behind the token before."""
    monkeypatch.setattr(block_unroll, "split", lambda wanted, like: ((split(wanted, like)[0] - 1).clamp(min=0), None))


def bidirectional(monkeypatch):
    """Tokens of a block see those after them."""
    monkeypatch.setattr(DFlashConfig, "is_causal", lambda self, window: False)


split = block_unroll.split


@torch.no_grad()
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        *((fault, "DSpark") for fault in (sees_its_anchor, late, one_text, one_token_early)),
        (bidirectional, "JetSpec"),
    ],
)
def test_that_check_finds_faults(fault, name, monkeypatch):
    documents, wanted = some_rows()
    wanted[0, 0] = False
    check_unroll(blocks.head(name, **OWN), documents, wanted)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_unroll(blocks.head(name, **OWN), documents, wanted)


def batch(target, count=3, new_tokens=20):
    texts = some_texts(target, count, new_tokens)
    longest = max(len(text.ids) for text in texts)
    ids, learn = (
        torch.stack([torch.nn.functional.pad(getattr(text, name), (0, longest - len(text.ids))) for text in texts])
        for name in ("ids", "learn")
    )
    return batch_of(target, ids, learn, eagle3.states_of(target, ids, (1, 2, -1)))


def by_the_book(objective, target, ids, learn, documents, states, over_all):
    """All logits of all learnt places at once, by autograd: DSpark's loss, every token an anchor that may be one."""
    head = objective.head
    embeddings, chosen = BorrowedEmbeddings.by(target, head), torch.zeros_like(learn)
    chosen[:, :-2] = learn[:, 1:-1] & learn[:, 2:]
    final, loss, weights = states[..., -32:], 0.0, 0.0
    places = unroll_blocks(
        head,
        ids,
        lambda tokens: embeddings.embedded(tokens, head),
        states[..., :-32],
        head.config.drafted,
        wanted=chosen,
    )
    alive = chosen
    for step, place in enumerate(places):
        rows = ids.shape[1] - 2 - step
        alive = alive[:, :rows] & learn[:, 2 + step :]
        p = target.get_output_embeddings()(final[:, 1 + step : -1][alive]).softmax(-1)[:, head.draft_to_target]
        log_q = (place.hidden[:, :rows][alive] @ lm_head_weight(head).T).log_softmax(-1)
        missing = 1 - p.sum(-1)
        distance = (p - log_q.exp()).abs().sum(-1) + missing
        accepted = torch.minimum(p, log_q.exp()).sum(-1).detach()
        sure = place.acceptance[:, :rows][alive]
        confidence = -(accepted * sure.log() + (1 - accepted) * (1 - sure).log())
        each = 0.9 * distance - 0.1 * (p * log_q).sum(-1) + confidence
        loss = loss + objective.decay**step * each.mean()
        weights += objective.decay**step
    return loss / weights


def test_the_objective_is_dsparks():
    target, head = tiny.on_host("llama"), blocks.head("DSpark", **OWN).train()
    objective = BlockObjective(head, *target_logits_of(target, head), steps=5, loss="tv", anchors=100)
    ids, learn, documents, states, over_all = batch(target)
    wanted = by_the_book(objective, target, ids, learn, documents, states, over_all)
    wanted.backward()
    gradients = {name: weight.grad.clone() for name, weight in head.named_parameters()}
    assert all(bool(gradient.any()) for gradient in gradients.values())
    head.zero_grad()
    found = objective(ids, learn, documents, states, over_all)["loss"]
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)
    found.backward()
    for name, weight in head.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-3, atol=1e-6)


def test_a_chance_may_come_out_above_one(monkeypatch):
    """min(p, q) summed over thousands of tokens where the draft is the target's: a rounding error more than 1."""
    of_rows = LOSSES["tv"]

    def rounded_up(p, logits):
        loss, gradient, accepted = of_rows(p, logits)
        return loss, gradient, torch.full_like(accepted, 1 + 2e-6)

    monkeypatch.setitem(LOSSES, "tv", rounded_up)
    target, head = tiny.on_host("llama"), blocks.head("DSpark", **OWN).train()
    objective = BlockObjective(head, *target_logits_of(target, head), steps=5, loss="tv")
    loss = objective(*batch(target))["loss"]
    loss.backward()
    assert bool(loss.isfinite())


def test_parts_of_the_loss_that_autocast_refuses_or_rounds_are_computed_without_it(monkeypatch):
    """CUDA refuses binary_cross_entropy there, and the target's norm was computed outside of it."""
    entropy, logits_of = torch.nn.functional.binary_cross_entropy, TargetLogits.__call__
    seen = []

    def noting(function):
        def noted(*args, **kwargs):
            seen.append(torch.is_autocast_enabled("cpu"))
            return function(*args, **kwargs)

        return noted

    monkeypatch.setattr(torch.nn.functional, "binary_cross_entropy", noting(entropy))
    monkeypatch.setattr(TargetLogits, "__call__", noting(logits_of))
    target, head = tiny.on_host("llama"), blocks.head("DSpark", **OWN).train()
    objective = BlockObjective(head, *target_logits_of(target, head), steps=5, loss="tv")
    given = batch(target)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        objective(*given)["loss"].backward()
    assert len(seen) >= 2
    assert not any(seen)


@torch.no_grad()
def test_anchors_are_few_and_others_in_every_update():
    target, head = tiny.on_host("llama"), blocks.head("DSpark", **OWN)
    few = BlockObjective(head, *target_logits_of(target, head), steps=5, anchors=2)
    every = BlockObjective(head, *target_logits_of(target, head), steps=5, anchors=100)
    inputs = batch(target)

    def counts(objective, update=0, rows=slice(None)):
        objective.update = update
        return objective.drafts(*(part[rows] for part in inputs[:3]))

    assert counts(few)[0].sum(-1).tolist() == [2, 2, 2]
    assert bool((counts(few)[0] <= counts(every)[0]).all())
    assert any(not torch.equal(counts(few, 0)[0], counts(few, update)[0]) for update in range(1, 4))
    alone = counts(few, rows=slice(1, 2))  # a row's anchors are its own, whatever it is beside
    assert torch.equal(alone[:, 0], counts(few)[:, 1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "jetspec", "dspark"])
def test_training_makes_a_drafter_that_accepts_what_it_was_taught(kind, tmp_path):
    """From nothing; read back from its folder; simulation and decoder agree."""
    target = tiny.on_host("llama", num_hidden_layers=4)
    texts = some_texts(target, 16, 40)
    torch.manual_seed(0)
    head = initialize_block(target, torch.arange(tiny.VOCAB), 63, kind, 4, tap_ids=(1, 2, 3), num_layers=1)
    args = quiet_arguments(tmp_path / "run", 150, 50)
    trainer = HeadTrainer(head, LocalTeacher.of(target, head), args, steps=4, train_dataset=PackedTexts(texts, 60))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "simulated_length" in entry]
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.1
    assert logged[-1]["simulated_length"] > logged[0]["simulated_length"] + 0.5
    trainer.save_head(tmp_path / "head")
    read = loading.read(tmp_path / "head")
    assert read.format == "vLLM speculators"
    assert not read.ignored.keys() - {"t2d"}
    made = read.head().float()
    BlockProposer(made).check(target)
    prompts = [text.ids[: int(text.learn.long().argmax())] for text in texts[:6]]
    found = evaluate(made, target, prompts, draft_length=4, max_new_tokens=32)
    assert found.mean_acceptance_length == pytest.approx(found.simulated_length)
    assert found.mean_acceptance_length > 1.7


def test_the_layout_says_all_of_a_drafter(tmp_path):
    for name in ("DFlash", "JetSpec", "DSpark", "window from the anchor", "rnn", "rope", "confidence alone"):
        head = blocks.head(name, **OWN)
        if name == "window from the anchor":
            head.config = replace(head.config, windows=(None, 6))
        save(head, tmp_path / name, "target")
        read = loading.read(tmp_path / name)
        assert read.config == head.config
        weights = read.head().state_dict()
        assert all(torch.equal(weights[key], tensor) for key, tensor in head.state_dict().items())
    with pytest.raises(ValueError, match="needs a drafter with its own LM head"):
        save(blocks.head(), tmp_path / "none")
    with pytest.raises(ValueError, match="this layout's count from the anchor"):
        save(blocks.head("window", **OWN), tmp_path / "none")
    for name in blocks.UNTRAINED:
        with pytest.raises(ValueError, match="cannot be written: copy the files"):
            save(blocks.head(name, own_head=True), tmp_path / "none")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_command_goes_on_as_if_it_had_not_been_stopped(files, tmp_path, kind):
    options = ["--kind", kind, "--anchors", "5", "--layers", "1"]
    whole = run(files, tmp_path / "whole", *options)
    assert whole.exit_code == 0, whole.output
    assert "dflash:" in whole.output
    for _ in range(60):
        result = run(files, tmp_path / "slices", *options, "--max-minutes", "0")
        assert result.exit_code == 0, result.output
        if "not finished yet" not in result.output:
            break
    assert losses(tmp_path / "slices") == losses(tmp_path / "whole")
    one, two = (loading.load(tmp_path / name / "head").state_dict() for name in ("whole", "slices"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    evaluation = json.loads((tmp_path / "whole" / "evaluation.json").read_text())
    assert evaluation["best"]["mean_acceptance_length"] == pytest.approx(evaluation["best"]["simulated_length"])
    onward = run(files, tmp_path / "on", "--kind", kind, "--from", str(tmp_path / "whole" / "head"))
    assert "leave out --draft-vocab" in onward.output
    other = run(
        files,
        tmp_path / "other",
        "--kind",
        "dspark" if kind != "dspark" else "jetspec",
        "--from",
        str(tmp_path / "whole" / "head"),
    )
    assert "choose another --kind" in other.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "dspark", "--flex"], "needs no --flex"),
        (["--kind", "dflash", "--from", "{model}", "--from-target", "{model}"], "leave out --from-target"),
    ],
)
def test_what_drafters_of_blocks_are_not_trained_with(files, tmp_path, options, message):
    result = run(files, tmp_path, *(option.format(model=files / "model") for option in options))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
