"""Sampling through `SpeculativeGenerator` leaves the target's distribution as it is, whatever drafts.

The law is exact: plain transformers says the processed scores after every possible text, once, and the probabilities of
all VOCAB ** NEW texts follow. Every test counts whole texts.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec import (
    BlockProposer,
    Context,
    DraftModelProposer,
    DraftTree,
    DynamicTree,
    Eagle3Proposer,
    HybridProposer,
    HydraProposer,
    NgramProposer,
    Proposer,
    SpeculativeGenerator,
    SuffixProposer,
    TranslatedDraftProposer,
)
from specdec.engine import draft_session
from specdec.heads.dflash.selector import SelectorShape
from specdec.models.hidden_states import FINAL
from specdec.proposers.pacing.estimates import DraftCost, Estimates
from specdec.proposers.pacing.pacer import Pacer
from specdec.proposers.pacing.pass_cost import BUCKETS, PassCost
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.teacher.target_logits import TargetLogits
from tests.support import blocks, eagle3, naive, tiny

VOCAB, NEW, ROWS, EOS = 6, 4, 512, 4
EXACT = 5.0  # standard deviations, see `departure`
CALLS = 16  # of ROWS texts each: 8,192 draws in about a second
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]  # repeats itself, so that n-grams are found

SAMPLING = {
    "plain": {"top_k": 0},
    "warped": {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    "penalty": {"repetition_penalty": 1.4, "top_k": 0},
}


@functools.cache
def llama(seed: int) -> LlamaForCausalLM:
    """Random, one layer, with distributions that differ from text to text."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.mul_(10)
    model.generation_config.pad_token_id = 0
    return model


def target() -> LlamaForCausalLM:
    return llama(0)


def drafter() -> LlamaForCausalLM:
    return llama(1)


class Garbage(Proposer):
    """Random trees, chains and nothing, of random tokens that nobody asked for; ragged from row to row.

    Args:
        drawn: the tokens are drawn from distributions q as random as they are (and q is handed on), some of them with
            few tokens; else chosen, and q has no say.
    """

    def __init__(self, drawn: bool):
        self.drawn = drawn

    def propose(self, context: Context) -> DraftTree:
        B, V = context.batch_size, context.vocab_size
        chain = bool(torch.rand(()) < 0.3)
        N = 1 + int(torch.randint(0, 4 if chain else 6, ()))
        tokens = torch.cat([context.root[:, None], torch.randint(V, (B, N - 1))], 1)
        parents = torch.full((B, N), -1)
        depth = torch.zeros(B, N, dtype=torch.long)
        budget = torch.tensor([r if a else 0 for r, a in zip(context.budget, context.active, strict=True)])
        q = torch.empty(B, N, V).exponential_().pow(2) * (torch.rand(B, N, V) < 0.7)
        q[..., 0] += 1e-3
        q /= q.sum(-1, keepdim=True)
        left = q.clone()
        rows = torch.arange(B)
        for node in range(1, N):
            parent = torch.full((B,), node - 1) if chain else torch.randint(0, node, (B,))
            fits = (parent == 0) | (parents[rows, parent] >= 0)
            fits &= depth[rows, parent] < budget
            if self.drawn:
                mass = left[rows, parent]
                fits &= mass.sum(-1) > 0
                token = torch.multinomial(torch.where(fits[:, None], mass, torch.ones_like(mass)), 1)[:, 0]
                tokens[:, node] = token
                left[rows[fits], parent[fits], token[fits]] = 0.0
            parents[:, node] = torch.where(fits, parent, -1)
            depth[:, node] = torch.where(fits, depth[rows, parent] + 1, 0)
        probs = None
        if self.drawn:
            has_child = (parents[:, None, :] == torch.arange(N)[:, None]).any(-1)
            probs = q * has_child[..., None]
        return DraftTree(tokens, parents, probs, chain=chain)


class Cutting(DraftModelProposer):
    """A drawn chain that ends early where the draft is unsure: of its distribution, or, `peeking`, of what it drew."""

    def __init__(self, model, peeking: bool, below: float):
        super().__init__(model)
        self.peeking, self.below = peeking, below

    def propose(self, context: Context) -> DraftTree:
        draft = super().propose(context)
        if draft.size == 1:
            return draft
        q, drawn = draft.probs[:, :-1], draft.tokens[:, 1:]
        sure = q.gather(-1, drawn[..., None])[..., 0] if self.peeking else q.amax(-1)
        keep = (sure >= self.below).long().cumprod(-1).sum(-1)
        lengths = torch.minimum(keep, draft.valid.sum(-1) - 1)
        return DraftTree.from_chain(context.root, drawn, lengths, probs=q)


def eagle_head():
    """Untrained, and one token short of the target's vocabulary."""
    return eagle3.head(
        hidden_size=16,
        target_hidden_size=16,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB - 1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


@functools.cache
def trained_eagle_head():
    """The same, trained on texts of the target's."""
    model = target()
    head = eagle_head().train().to(model.device)
    torch.manual_seed(3)
    prompt = torch.tensor([PROMPT] * 64, device=model.device)
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0, max_new_tokens=NEW)
    states = eagle3.states_of(model, ids, (*head.config.taps(1), FINAL))
    logits = TargetLogits.of(model)
    target_logits = logits.restricted(head.draft_to_target)
    objective = Eagle3Objective(head, model.get_input_embeddings().weight, target_logits, steps=3)
    learn = torch.arange(ids.shape[1], device=ids.device).expand_as(ids) >= len(PROMPT)
    documents = torch.zeros_like(ids)
    over_all = logits.over_all(states, learn)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        objective(ids, learn, documents, states, over_all)["loss"].backward()
        optimizer.step()
    return head.eval()


def block_head(name: str, **changes):
    """Untrained, for blocks of five."""
    return blocks.head(
        name,
        **changes,
        hidden_size=16,
        target_hidden_size=16,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        num_attention_heads=2,
        num_key_value_heads=1,
        tap_ids=(0, 1),
        mask_token_id=0,
    )


def few_candidates():
    """A drafter that draws from three of the tokens."""
    return block_head("DFlash 2", selector=SelectorShape(rank=6, candidates=3))


def translated(**shape):
    """A draft model that has four of the target's tokens, under other numbers, and two of its own."""
    letters = [
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({c: i for i, c in enumerate(text)}, unk_token="b"))
        )
        for text in ("edxcyb", "abcdef")
    ]
    return TranslatedDraftProposer(drafter(), tokenizer=letters[0], target_tokenizer=letters[1], **shape)


SMALL_TREE = DynamicTree(depth=3, top_k=2, size=6)
PROPOSERS = {
    "chain": lambda: DraftModelProposer(drafter()),
    "tree, drawn": lambda: DraftModelProposer(drafter(), branching=(2, 2), draw=True),
    "tree, top": lambda: DraftModelProposer(drafter(), branching=(2, 2), draw=False),
    "chain, top": lambda: DraftModelProposer(drafter(), draw=False),
    "dynamic tree": lambda: DraftModelProposer(drafter(), tree=SMALL_TREE),
    "dynamic tree, automatic size": lambda: DraftModelProposer(drafter(), tree=DynamicTree(depth=3, top_k=3)),
    "eagle3": lambda: Eagle3Proposer(eagle_head(), tree=SMALL_TREE),
    "eagle3, trained": lambda: Eagle3Proposer(trained_eagle_head(), tree=SMALL_TREE),
    "eagle3, trained, drawn tree": lambda: Eagle3Proposer(trained_eagle_head(), branching=(2, 2)),
    "eagle3, trained, drawn chain": lambda: Eagle3Proposer(trained_eagle_head(), branching=(1, 1, 1)),
    "eagle3, automatic size": lambda: Eagle3Proposer(eagle_head()),
    "eagle3, drawn chain": lambda: Eagle3Proposer(eagle_head(), branching=(1, 1, 1)),
    "eagle3, drawn tree": lambda: Eagle3Proposer(eagle_head(), branching=(2, 2)),
    "block": lambda: BlockProposer(block_head("DFlash"), tree=SMALL_TREE),
    "block, Markov": lambda: BlockProposer(block_head("DSpark")),
    "block, Markov, drawn chain": lambda: BlockProposer(block_head("rnn"), branching=(1, 1, 1)),
    "block, selector, drawn tree": lambda: BlockProposer(few_candidates(), branching=(2, 2)),
    "block, drawn tree": lambda: BlockProposer(block_head("DFlash"), branching=(2, 2)),
    "medusa": lambda: BlockProposer(blocks.medusa(hidden=16, vocab=VOCAB), tree=SMALL_TREE),
    "hydra": lambda: HydraProposer(blocks.hydra(hidden=16, vocab=VOCAB), tree=SMALL_TREE),
    "hydra, drawn chain": lambda: HydraProposer(blocks.hydra(False, hidden=16, vocab=VOCAB), branching=(1, 1, 1)),
    "hydra, drawn tree": lambda: HydraProposer(blocks.hydra(hidden=16, vocab=VOCAB), branching=(2, 2)),
    "translated": translated,
    "translated, drawn tree": lambda: translated(branching=(2, 2)),
    "trimmed vocabulary": lambda: DraftModelProposer(drafter(), vocab=torch.tensor([1, 3, 4])),
    "hybrid": lambda: HybridProposer(DraftModelProposer(drafter())),
    "turns, drawn chain": lambda: tiny.TakingTurns(DraftModelProposer(drafter())),
    "turns, drawn tree": lambda: tiny.TakingTurns(DraftModelProposer(drafter(), branching=(2, 2))),
    "turns, eagle3": lambda: tiny.TakingTurns(Eagle3Proposer(trained_eagle_head(), tree=SMALL_TREE)),
    "n-gram": lambda: NgramProposer(),
    "n-gram tree": lambda: NgramProposer(continuations=2),
    "suffix": lambda: SuffixProposer(),
    "garbage, chosen": lambda: Garbage(drawn=False),
    "garbage, drawn": lambda: Garbage(drawn=True),
}


def law(prompt: list[int], pads: int = 0, eos: int | None = None, **sampling) -> dict[tuple[int, ...], float]:
    """The target's exact distribution over what follows `prompt` (behind `pads` pad tokens): plain transformers."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for size in range(NEW):
        texts = {text: weight for text, weight in texts.items() if weight > 0}
        going = [text for text in texts if eos is None or eos not in text]
        ids = torch.tensor([[0] * pads + prompt + list(text) for text in going])
        mask = torch.ones_like(ids)
        mask[:, :pads] = 0
        # min_length and the like count from the prompt's end, which here would move: none is used in this file
        first = target().generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            max_new_tokens=1,
            output_scores=True,
            return_dict_in_generate=True,
            **sampling,
        )
        probs = first.scores[0].double().softmax(-1).tolist()
        longer = {(*text, 0): weight for text, weight in texts.items() if text not in set(going)}
        for text, row in zip(going, probs, strict=True):
            for token, probability in enumerate(row):
                longer[(*text, token)] = longer.get((*text, token), 0.0) + texts[text] * probability
        texts = longer
        assert all(len(text) == size + 1 for text in texts)
    assert abs(sum(texts.values()) - 1) < 1e-6
    return texts


def count(texts: Tensor, into: dict[tuple[int, ...], int]) -> None:
    """Add each row of (B, T) to the counts, padded to NEW tokens as a longer batch mate would have it."""
    padded = torch.nn.functional.pad(texts, (0, NEW - texts.shape[1]))
    values, counts = padded.unique(dim=0, return_counts=True)
    for value, many in zip(values.tolist(), counts.tolist(), strict=True):
        into[tuple(value)] = into.get(tuple(value), 0) + many


class Free(Estimates):
    """A machine where drafting costs nothing: how far is decided by the drafts alone, not by what a test's CPU is."""

    def __init__(self, verify: PassCost, draft: DraftCost) -> None:
        super().__init__(Flat(), draft)

    draft_step = 0.0

    def observe_pace(self, cost: float, new_tokens: float) -> None:
        pass


class Flat(PassCost):
    def __init__(self) -> None:
        super().__init__(dict.fromkeys(BUCKETS, (1.0, self.FAMILIAR)))
        self.known = True

    def observe(self, size: int, seconds: float) -> None:
        pass


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch):
    monkeypatch.setattr(draft_session, "Estimates", Free)


def sampled(spec: SpeculativeGenerator, calls: int, rows: int = ROWS, eos: int | None = None, **sampling) -> dict:
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(calls):
        out = spec.generate(
            torch.tensor([PROMPT]),
            do_sample=True,
            max_new_tokens=NEW,
            num_return_sequences=rows,
            eos_token_id=eos,
            **sampling,
        )
        count(out[:, len(PROMPT) :], counts)
    assert spec.report.num_plain_calls == 0
    assert spec.report.num_draft_tokens > 0
    return counts


def departure(counts: dict[tuple[int, ...], int], texts: dict[tuple[int, ...], float]) -> float:
    """`naive.departure` of whole texts and of every pair of their tokens, where small errors add up: the largest."""
    worst = naive.departure(counts, texts)
    for pair in itertools.combinations(range(NEW), 2):
        both: list[dict] = [{}, {}]
        for folded, whole in zip(both, (counts, texts), strict=True):
            for text, weight in whole.items():
                key = tuple(text[i] for i in pair)
                folded[key] = folded.get(key, 0) + weight
        worst = max(worst, naive.departure(*both))
    return worst


def measured(
    proposer: Proposer, calls: int, sampling: dict, rule="block", draft_length=None, rows=ROWS, eos=None
) -> float:
    """How far the texts of `calls` calls are from the target's law, in standard deviations."""
    torch.manual_seed(7)
    spec = SpeculativeGenerator(target(), proposer, draft_length=draft_length, rule=rule)
    counts = sampled(spec, calls, rows, eos, **sampling)
    return departure(counts, law(PROMPT, eos=eos, **sampling))


def test_the_law_is_that_of_plain_generate():
    """The reference itself, against transformers' own sampling."""
    torch.manual_seed(3)
    counts: dict[tuple[int, ...], int] = {}
    sampling = SAMPLING["warped"] | SAMPLING["penalty"] | {"top_k": 5}
    for _ in range(4):
        out = target().generate(
            torch.tensor([PROMPT]),
            do_sample=True,
            max_new_tokens=NEW,
            num_return_sequences=4096,
            eos_token_id=EOS,
            **sampling,
        )
        count(out[:, len(PROMPT) :], counts)
    assert departure(counts, law(PROMPT, eos=EOS, **sampling)) < EXACT
    assert departure(counts, law(PROMPT, eos=EOS, **sampling | {"temperature": 0.75})) > EXACT


REPRESENTATIVE = [
    pytest.param("chain", "block", "plain", None, id="chain, block, automatic length"),
    pytest.param("chain", "token", "warped", 3, id="chain, token, warped, length 3"),
    pytest.param("tree, drawn", "block", "plain", 2, id="drawn tree"),
    pytest.param("tree, top", "block", "warped", None, id="top tree, warped, automatic length"),
    pytest.param("n-gram tree", "block", "plain", 3, id="n-gram tree", marks=pytest.mark.slow),
    pytest.param("eagle3", "block", "plain", 3, id="eagle3, dynamic tree"),
    pytest.param("eagle3, trained", "block", "plain", 3, id="trained eagle3, dynamic tree"),
    pytest.param("turns, drawn chain", "block", "plain", 3, id="n-grams and drawn chain take turns"),
    pytest.param("eagle3, drawn tree", "block", "warped", 3, id="eagle3, drawn tree, warped", marks=pytest.mark.slow),
    pytest.param(
        "translated", "block", "warped", 3, id="drawn chain in another tokenizer's tokens", marks=pytest.mark.slow
    ),
    pytest.param(
        "block, Markov, drawn chain", "block", "plain", 3, id="drawn chain of a block", marks=pytest.mark.slow
    ),
    pytest.param("block, Markov", "coupled", "warped", 3, id="tree of a block, coupled, warped"),
    pytest.param(
        "hydra, drawn tree", "block", "plain", 3, id="drawn tree of heads that read it", marks=pytest.mark.slow
    ),
    pytest.param("garbage, drawn", "block", "warped", None, id="drawn garbage, warped", marks=pytest.mark.slow),
    pytest.param("chain", "coupled", "plain", None, id="chain, coupled, automatic length"),
    pytest.param("dynamic tree", "coupled", "warped", 3, id="dynamic tree, coupled, warped"),
    pytest.param("garbage, drawn", "coupled", "plain", None, id="drawn garbage, coupled"),
]


@pytest.mark.parametrize(("proposer", "rule", "sampling", "draft_length"), REPRESENTATIVE)
def test_distribution(proposer, rule, sampling, draft_length):
    assert measured(PROPOSERS[proposer](), CALLS, SAMPLING[sampling], rule, draft_length) < EXACT


def test_the_trained_head_drafts_better():
    lengths = []
    for head in (eagle_head(), trained_eagle_head()):
        spec = SpeculativeGenerator(target(), Eagle3Proposer(head, branching=(1, 1, 1)), draft_length=3)
        torch.manual_seed(0)
        prompt = torch.tensor([PROMPT] * 64, device=target().device)
        spec.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0, max_new_tokens=12)
        lengths.append(spec.report.mean_acceptance_length)
    assert lengths[1] > lengths[0] + 0.5


# Every proposer under both rules, with both lengths and two ways of sampling; over all of them, every pair is seen.
WAYS = list(itertools.product(SAMPLING, (None, 3)))
SQUARE = [
    (proposer, rule, *WAYS[(row + 3 * column) % len(WAYS)])
    for row, proposer in enumerate(PROPOSERS)
    for column, rule in enumerate(("coupled", "block"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("proposer", "rule", "sampling", "draft_length"), SQUARE)
def test_distribution_of_every_proposer(proposer, rule, sampling, draft_length):
    assert measured(PROPOSERS[proposer](), CALLS, SAMPLING[sampling], rule, draft_length) < EXACT


@pytest.mark.parametrize(
    "proposer",
    ["chain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tree, drawn", "n-gram", "turns, drawn tree"))],
)
def test_distribution_with_an_end_token(proposer):
    """Rows end in the middle of accepted blocks, each at its own time."""
    assert measured(PROPOSERS[proposer](), CALLS, SAMPLING["plain"], draft_length=3, eos=EOS) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["chain", "tree, drawn", "eagle3"])
def test_distribution_one_row_at_a_time(proposer):
    assert measured(PROPOSERS[proposer](), 1000, SAMPLING["plain"], rows=1) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["chain", "n-gram tree", "garbage, drawn", "turns, drawn chain"])
def test_distribution_three_rows_at_a_time(proposer):
    assert measured(PROPOSERS[proposer](), 600, SAMPLING["plain"], draft_length=2, rows=3) < EXACT


@pytest.mark.parametrize(
    ("proposer", "sampling"),
    [
        pytest.param("chain", "plain"),
        pytest.param("tree, drawn", "penalty", marks=pytest.mark.slow),
        pytest.param("n-gram", "warped", marks=pytest.mark.slow),
        pytest.param("garbage, drawn", "penalty", marks=pytest.mark.slow),
        pytest.param("eagle3", "warped", marks=pytest.mark.slow),
    ],
)
def test_distribution_of_a_ragged_batch(proposer, sampling):
    """Three prompts of different lengths, left-padded, side by side: each row keeps its own law."""
    prompts = [PROMPT, [5, 3, 5], [2, 2, 4, 1, 2]]
    T, copies = len(PROMPT), 256
    ids = torch.tensor([[0] * (T - len(prompt)) + prompt for prompt in prompts]).repeat(copies, 1)
    mask = torch.tensor([[0] * (T - len(prompt)) + [1] * len(prompt) for prompt in prompts]).repeat(copies, 1)
    spec = SpeculativeGenerator(target(), PROPOSERS[proposer](), draft_length=3)
    torch.manual_seed(9)
    counts: list[dict] = [{} for _ in prompts]
    for _ in range(CALLS):
        out = spec.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=NEW, **SAMPLING[sampling])
        for row, into in enumerate(counts):
            count(out[row :: len(prompts), T:], into)
    for prompt, into in zip(prompts, counts, strict=True):
        assert departure(into, law(prompt, T - len(prompt), **SAMPLING[sampling])) < EXACT, prompt


# No peeking


@pytest.fixture
def eager_pacing(monkeypatch):
    """Pacing that decides by the draft's confidence alone, sharply: whatever it looks at has its largest effect."""

    def worth(self, chances, drafted, draft_steps=0):
        return drafted < 3 and sum(chances) > 0.45 * len(chances)

    monkeypatch.setattr(Pacer, "worth", worth)
    monkeypatch.setattr(Pacer, "may_start", lambda self, chances, draft_steps, backlog, tokens_left: True)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_pacing")
@pytest.mark.parametrize("rule", ["block", "token"])
def test_pacing_does_not_peek(rule):
    """One row at a time, where the row's own draft decides its own length."""
    assert measured(PROPOSERS["chain"](), 1000, SAMPLING["plain"], rule, rows=1) < EXACT


def test_ending_drafts_by_their_distribution_changes_nothing():
    assert measured(Cutting(drafter(), peeking=False, below=0.35), CALLS, SAMPLING["plain"], draft_length=3) < EXACT


@pytest.mark.parametrize("rule", ["block", pytest.param("token", marks=pytest.mark.slow)])
def test_ending_drafts_by_what_was_drawn_is_caught(rule):
    """The same proposer, looking at the token just drawn: its texts are visibly not the target's."""
    peeking = Cutting(drafter(), peeking=True, below=0.2)
    assert measured(peeking, CALLS, SAMPLING["plain"], rule, draft_length=3) > 2 * EXACT


def test_a_wrong_q_is_caught():
    """A proposer that says it drew from another distribution than it did."""

    class Liar(DraftModelProposer):
        def propose(self, context: Context) -> DraftTree:
            draft = super().propose(context)
            if draft.probs is None:
                return draft
            flat = draft.probs.sqrt()
            flat /= flat.sum(-1, keepdim=True).clamp(min=1e-9)
            return DraftTree(draft.tokens, draft.parents, flat, draft.chain)

    assert measured(Liar(drafter()), CALLS, SAMPLING["plain"], draft_length=3) > 2 * EXACT


@pytest.mark.parametrize("proposer", ["chain", pytest.param("tree, top", marks=pytest.mark.slow)])
def test_typical_is_lossy(proposer):
    assert measured(PROPOSERS[proposer](), CALLS, SAMPLING["plain"], rule="typical", draft_length=3) > 2 * EXACT


@pytest.mark.parametrize("proposer", ["chain", pytest.param("tree, drawn", marks=pytest.mark.slow)])
def test_other_temperatures_would_be_noticed(proposer):
    """What the tests above can see: they tell temperature 0.9 from 1."""
    torch.manual_seed(7)
    spec = SpeculativeGenerator(target(), PROPOSERS[proposer](), draft_length=3)
    counts = sampled(spec, CALLS, **SAMPLING["plain"])
    assert departure(counts, law(PROMPT, **SAMPLING["plain"] | {"temperature": 0.9})) > EXACT


def test_one_percent_would_be_seen():
    """In any whole text; and in any pair of tokens, four times as much at the most."""
    texts = law(PROMPT, **SAMPLING["plain"])
    assert set(texts) == set(itertools.product(range(VOCAB), repeat=NEW))
    assert max(naive.limit(CALLS * ROWS, probability) for probability in texts.values()) < 0.01
    assert naive.limit(CALLS * ROWS, 0.2) < 0.04


# What else must not bend the distribution, or break


def test_a_constraint_that_knows_its_own_texts_only():
    """A `prefix_allowed_tokens_fn` over a few texts: drafts outside of them neither raise nor come through.

    It has to know what follows a full text, though: rows that are finished wait beside those that are not.
    """
    known = {(): [1, 2], (1,): [3, 4], (2,): [4], (1, 3): [5], (1, 4): [0, 1], (2, 4): [2, 5]}

    def allowed(row: int, text: Tensor) -> list[int]:
        return known.get(tuple(text[len(PROMPT) :].tolist()), [0] if len(text) >= len(PROMPT) + 3 else [])

    sampling = {"top_k": 0, "prefix_allowed_tokens_fn": allowed}
    for proposer in ("chain", "n-gram", "garbage, chosen", "garbage, drawn", "tree, drawn", "dynamic tree", "eagle3"):
        spec = SpeculativeGenerator(target(), PROPOSERS[proposer](), draft_length=2)
        torch.manual_seed(1)  # garbage is at times nothing, and there are few rounds
        assert departure(sampled(spec, 1, 300, **sampling), law(PROMPT, **sampling)) < EXACT


class Enough(Exception):
    pass


class Streamed:
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("proposer", "rule"), [("chain", "block"), ("tree, drawn", "token")])
def test_texts_that_a_processor_breaks_off(proposer, rule):
    """It raises after one of the tokens. What was streamed by then has the law of texts that end with this token."""
    after, counts, spec = 3, {}, SpeculativeGenerator(target(), PROPOSERS[proposer](), draft_length=3, rule=rule)

    def allowed(row, ids):
        if len(ids) > len(PROMPT) and ids[-1] == after:
            raise Enough
        return list(range(VOCAB))

    for seed in range(1000):
        torch.manual_seed(seed)
        streamer = Streamed()
        with contextlib.suppress(Enough):
            spec.generate(
                torch.tensor([PROMPT]),
                do_sample=True,
                top_k=0,
                max_new_tokens=NEW,
                streamer=streamer,
                prefix_allowed_tokens_fn=allowed,
            )
        count(torch.tensor([streamer.tokens[len(PROMPT) :]]), counts)
    assert departure(counts, law(PROMPT, eos=after, top_k=0)) < EXACT
