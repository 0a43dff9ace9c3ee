"""Muon beside AdamW, as one optimizer."""

import copy

import torch

from specdec.training.optimizer import matrices, muon
from tests.support import blocks, eagle3

RATE, BETAS = 1e-2, (0.9, 0.95)


def updated(head, optimizer, updates, seed=0):
    """The head after updates by gradients that are always the same ones."""
    draws = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        for weight in head.parameters():
            weight.grad = torch.randn(weight.shape, generator=draws)
        optimizer.step()
        optimizer.zero_grad()
    return head


def fresh():
    return eagle3.head().float().requires_grad_(True)


def test_every_weight_has_one_optimizer_and_matrices_have_muon():
    for head in (fresh(), blocks.head("DSpark", own_head=True, draft_vocab_size=40).float()):
        optimizer = muon(head, RATE, BETAS)
        first, second = ([id(w) for g in part.param_groups for w in g["params"]] for part in optimizer.parts)
        assert sorted(first + second) == sorted(id(weight) for weight in head.parameters())
        assert first == [id(weight) for weight in matrices(head)]
        assert all(weight.dim() == 2 for weight in matrices(head))
        assert id(head.lm_head.weight) in second


def test_updates_of_a_matrix_are_nearly_orthogonal_and_of_adamw_s_size():
    head = fresh()
    before = head.fc.weight.detach().clone()
    updated(head, muon(head, RATE, BETAS), 1)
    change = (head.fc.weight - before).detach()
    spread = torch.linalg.svdvals(change)
    assert spread.max() / spread.min() < 2.5  # of a random matrix's, many times that
    assert 0.05 * RATE < float(change.square().mean().sqrt()) < RATE


def test_it_goes_on_where_it_was():
    whole = fresh()
    parted = copy.deepcopy(whole)
    updated(whole, muon(whole, RATE, BETAS), 6)
    draws, saved = torch.Generator().manual_seed(0), None
    for updates in (4, 2):  # saved and loaded in between
        optimizer = muon(parted, RATE, BETAS)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for _ in range(updates):
            for weight in parted.parameters():
                weight.grad = torch.randn(weight.shape, generator=draws)
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
    for mine, theirs in zip(parted.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_schedulers_steer_both():
    optimizer = muon(fresh(), RATE, BETAS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [RATE / 2] * 2
