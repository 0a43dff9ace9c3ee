"""T = 0: token for token what plain `generate()` writes, for every model, proposer, draft length and shape of batch."""

import pytest
import torch

from specdec import (
    BlockProposer,
    DraftModelProposer,
    DynamicTree,
    HybridProposer,
    HydraProposer,
    NgramProposer,
    SpeculativeGenerator,
    SuffixProposer,
)
from tests.support import blocks, tiny
from tests.support.diagonal import diagonal

MODELS = list(tiny.CONFIGS)
BATCHES = {"single": (9,), "ragged": (9, 1, 5), "one token": (1,), "past the window": (20, 3, 14)}
PROPOSERS = {
    "ngram": lambda target: NgramProposer(),
    "ngram tree": lambda target: NgramProposer(continuations=3),
    "suffix": lambda target: SuffixProposer(),
    "draft": lambda target: draft_of(target),
    "target itself": lambda target: target,
    "draft tree": lambda target: DraftModelProposer(draft_of(target), branching=(3, 2, 1)),
    "target tree": lambda target: DraftModelProposer(target, branching=(3, 2, 1)),
    "dynamic tree": lambda target: DraftModelProposer(draft_of(target), tree=DynamicTree(depth=4, top_k=3, size=9)),
    "dynamic target tree": lambda target: DraftModelProposer(target, tree=DynamicTree(depth=4, top_k=3)),
    "trimmed": lambda target: DraftModelProposer(target, vocab=20),
    "hybrid": lambda target: HybridProposer(DraftModelProposer(draft_of(target))),
    "block": lambda target: BlockProposer(blocks.head("DSpark")),
    "medusa": lambda target: BlockProposer(blocks.medusa()),
    "hydra": lambda target: HydraProposer(blocks.hydra()),
    "garbage": lambda target: tiny.Garbage(),
}
LENGTHS = (None, 0, 1, 4)


def draft_of(target):
    """A tiny model of another seed: some of its drafts are right, most are wrong."""
    return tiny.model(target.name, seed=1)


@pytest.fixture(scope="module")
def target(request, models):
    """The model of that name, and its plain outputs, each made once."""
    made = models(request.param)
    made.name = request.param
    return made


@pytest.fixture(scope="module")
def plain():
    known = {}

    def generate(target, lengths, **kwargs):
        key = (target.name, lengths, str(kwargs))
        if key not in known:
            known[key] = target.generate(**tiny.prompts(*lengths), do_sample=False, **kwargs)
        return known[key]

    return generate


def check(target, plain, proposer, lengths, draft_length, **kwargs):
    kwargs = {"max_new_tokens": 20} | kwargs
    spec = SpeculativeGenerator(target, PROPOSERS[proposer](target), draft_length=draft_length)
    ours = spec.generate(**tiny.prompts(*lengths), do_sample=False, **kwargs)
    assert ours.tolist() == plain(target, lengths, **kwargs).tolist()
    assert spec.report.num_plain_calls == 0
    return spec.report


# Every model with every proposer; every proposer with every length and batch: what each adds, seen at least once.
PAIRS = [
    (target, proposer, ("single", "ragged")[(row + column) % 2])
    for row, target in enumerate(MODELS)
    for column, proposer in enumerate(PROPOSERS)
]


@pytest.mark.parametrize(("target", "proposer", "batch"), PAIRS, indirect=["target"])
def test_every_model_with_every_proposer(target, plain, proposer, batch):
    report = check(target, plain, proposer, BATCHES[batch], draft_length=4)
    if proposer.startswith("target"):
        assert report.mean_acceptance_length > 3


@pytest.mark.parametrize("target", ["gemma3"], indirect=True)
@pytest.mark.parametrize(
    ("batch", "draft_length", "proposer"),
    diagonal(["past the window", "one token"], LENGTHS, PROPOSERS.keys(), times=2),
)
def test_lengths_and_batches(target, plain, batch, draft_length, proposer):
    report = check(target, plain, proposer, BATCHES[batch], draft_length)
    if draft_length == 0:
        assert report.num_draft_tokens == 0


# Without those of above; a draft length of 0 asks no proposer.
OTHERS = [
    (batch, length)
    for batch in BATCHES
    for length in (None, 1, 4)
    if (batch, length) not in (("single", 4), ("ragged", 4))
]
# Two of these for each pair of a model and a proposer, like the letters of a Latin square: every model meets each, and
# so does every proposer.
SQUARE = [
    (target, proposer, *OTHERS[(row + column + shift) % len(OTHERS)])
    for row, target in enumerate(MODELS)
    for column, proposer in enumerate(PROPOSERS)
    for shift in (0, len(OTHERS) // 2)
]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "proposer", "batch", "draft_length"), SQUARE, indirect=["target"])
def test_batches_and_lengths_for_every_pair(target, plain, proposer, batch, draft_length):
    check(target, plain, proposer, BATCHES[batch], draft_length)


@pytest.mark.parametrize(
    ("proposer", "target"), diagonal(["target tree", "ngram"], ["mistral", "qwen3"]), indirect=["target"]
)
def test_outputs_that_outgrow_the_first_cache_block(proposer, target, plain):
    check(target, plain, proposer, BATCHES["ragged"], draft_length=4, max_new_tokens=320)


DIAGONALS = [
    (target, proposer)
    for row, target in enumerate(MODELS)
    for column, proposer in enumerate(PROPOSERS)
    if (row + column) % 6 == 0
]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "proposer"), DIAGONALS, indirect=["target"])
def test_outputs_that_outgrow_the_first_cache_block_everywhere(target, plain, proposer):
    check(target, plain, proposer, BATCHES["ragged"], draft_length=None, max_new_tokens=320)


@pytest.mark.parametrize("target", MODELS, indirect=True)
@pytest.mark.parametrize("proposer", ["ngram tree", "target itself", "target tree", "garbage"])
def test_rows_that_end_at_different_times(target, plain, proposer):
    ends = ends_at(plain(target, BATCHES["ragged"], max_new_tokens=20), BATCHES["ragged"], steps=(3, 17, 8))
    check(target, plain, proposer, BATCHES["ragged"], draft_length=4, max_new_tokens=40, eos_token_id=ends)


def ends_at(output, lengths, steps):
    """The tokens that the rows write at these steps: as end tokens, they stop the rows there or earlier."""
    return sorted({int(row[max(lengths) + step]) for row, step in zip(output, steps, strict=True)})


@pytest.mark.parametrize("target", ["gpt2"], indirect=True)
def test_prompt_at_the_end_of_the_context(target, plain):
    """Drafts are cut to the room that is left: no position past max_position_embeddings is ever asked for."""
    lengths = (1004, 500)
    check(target, plain, "target itself", lengths, draft_length=4, max_new_tokens=20)


@pytest.mark.parametrize("ends", [7, [7, 9]])
def test_end_tokens_of_the_config_do_not_cost_capability(models, ends):
    """Llama 3 and Gemma list several."""
    model = models("llama", seed=2)
    model.config.eos_token_id = ends
    assert SpeculativeGenerator(model, "ngram").capability.trees


@torch.no_grad()
def test_the_tiny_models_vary(models):
    """What the other tests stand on: outputs with some variety, and rows that differ."""
    for name in MODELS:
        output = models(name).generate(**tiny.prompts(9, 1, 5), do_sample=False, max_new_tokens=40)[:, 9:]
        assert len(output.unique()) > 8, name
        assert len({tuple(row.tolist()) for row in output}) == 3, name
