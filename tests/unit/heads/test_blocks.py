"""Block-parallel drafters: against naive ones, and through the decoder."""

import copy

import pytest
import torch

from specdec import BlockProposer, DynamicTree, Eagle3Proposer, SpeculativeGenerator
from specdec.heads.block import Block
from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.convolution import BlockConvolution, ConvolutionShape
from specdec.heads.dflash.domino import DominoShape
from specdec.heads.dflash.runner import DFlashRunner
from specdec.heads.eagle3.parallel_runner import ParallelRunner
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.proposers.draft_models.acceptance_estimates import bin_of
from tests.support import blocks, eagle3, tiny
from tests.support.naive_blocks import NaiveDrafter, NaiveParallel

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LENGTHS = {"single": (9,), "ragged": (7, 2, 9)}
SHAPES = {
    "default": {},
    "dynamic": {"tree": DynamicTree(depth=3, top_k=3, size=8)},
    "fixed": {"branching": (3, 2, 1)},
    "chain": {"branching": (1, 1, 1, 1)},
}


def naive(head, target):
    kind = NaiveDrafter if isinstance(head.config, DFlashConfig) else NaiveParallel
    embedding, lm_head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    return kind(head.state_dict(), head.config, embedding, lm_head)


class Rows:
    """Random texts and states, a runner fed with them, and what the naive drafter makes of them."""

    def __init__(self, head, lengths):
        self.head, self.lengths = head, list(lengths)
        target, generator = tiny.model("llama"), torch.Generator().manual_seed(0)
        taps = head.config.taps(2)
        self.wide = 32 * len(taps)
        B, T = len(lengths), max(lengths) + 6
        self.states = torch.randn(B, T, self.wide, generator=generator)
        self.tokens = torch.randint(1, tiny.VOCAB, (B, T), generator=generator)
        self.path = torch.randint(1, tiny.VOCAB, (B, head.config.drafted), generator=generator)
        runs = DFlashRunner if isinstance(head.config, DFlashConfig) else ParallelRunner
        self.runner, self.reference = runs(head, BorrowedEmbeddings.by(target, head)), naive(head, target)
        self.runner.start(B)

    def extend(self, ends, counts):
        """Feed each row's `counts[b]` states before column `ends[b]`; logits behind the token there."""
        width = max(counts)
        index = torch.stack([torch.arange(end - width, end).clamp(min=0) for end in ends])
        fed = self.states.gather(1, index[..., None].expand(-1, -1, self.wide))
        return self.runner.extend(self.tokens.gather(1, index + 1), fed, [width - count for count in counts])

    def check(self, logits, ends, paths):
        for b, end in enumerate(ends):
            states, tokens = self.states[b, :end], self.tokens[b].tolist()
            if isinstance(self.reference, NaiveDrafter):
                wanted, sure = self.reference.draft(states, tokens[end], paths[b])
            else:
                wanted, sure = self.reference.draft(states, tokens[1 : end + 1], paths[b]), None
            scale = max(1.0, float(wanted.detach()[wanted.isfinite()].abs().max()))
            torch.testing.assert_close(logits[b].double() / scale, wanted / scale, **CLOSE)
            if sure is not None:
                torch.testing.assert_close(self.runner.block.acceptance[b, -1].double(), sure, **CLOSE)

    def check_chain(self, logits, ends):
        """All of a block, along `path`."""
        self.check(logits[:, 0], ends, [()] * len(ends))
        for depth in range(1, self.head.config.drafted):
            logits = self.runner.logits_after(depth, self.path[:, depth - 1 : depth], None)
            self.check(logits[:, 0], ends, self.path[:, :depth].tolist())

    def check_rounds(self):
        """A prompt in two parts, more text, a row that gains nothing."""
        half, ends = [length // 2 for length in self.lengths], self.lengths
        self.check_chain(self.extend(half, half), half)
        self.runner.drop_draft()
        self.check_chain(self.extend(ends, [end - h for end, h in zip(ends, half, strict=True)]), ends)
        self.runner.drop_draft()
        gained = [3, 1, 2][: len(ends)]
        ends = [end + more for end, more in zip(ends, gained, strict=True)]
        self.check_chain(self.extend(ends, gained), ends)
        assert self.runner.lengths == ends


def any_head(name):
    return blocks.parallel() if name == "P-EAGLE" else blocks.head(name)


# Against the naive drafter


@torch.no_grad()
@pytest.mark.parametrize("lengths", [LENGTHS["ragged"], pytest.param(LENGTHS["single"], marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*blocks.VARIANTS, "P-EAGLE"])
def test_it_computes_what_the_naive_drafter_does(name, lengths):
    Rows(any_head(name), lengths).check_rounds()


@torch.no_grad()
@pytest.mark.parametrize("name", ["DFlash", "window"])
def test_prompts_are_read_in_parts(name, monkeypatch):
    monkeypatch.setattr("specdec.heads.base.AT_ONCE", 4)
    Rows(blocks.head(name), LENGTHS["ragged"]).check_rounds()


@torch.no_grad()
@pytest.mark.parametrize("name", ["DSpark", "gated", "rnn", "rnn behind the anchor", "Domino", "DFlash 2"])
def test_siblings_have_children_of_their_own(name):
    """Two tokens behind the anchor; one behind the first of them and two behind the second."""
    rows = Rows(blocks.head(name), (9, 4))
    rows.extend([9, 4], [9, 4])
    first, second = torch.tensor([[5, 9], [9, 7]]), torch.tensor([[3, 8, 4], [1, 2, 6]])
    logits = rows.runner.logits_after(1, first, None)
    for n in range(2):
        for b, end in enumerate((9, 4)):
            wanted, _ = rows.reference.draft(rows.states[b, :end], int(rows.tokens[b, end]), [int(first[b, n])])
            torch.testing.assert_close(logits[b, n].double(), wanted, rtol=1e-4, atol=1e-4)
    logits = rows.runner.logits_after(2, second, torch.tensor([[0, 1, 1], [0, 1, 1]]))
    for n, above in enumerate((0, 1, 1)):
        for b, end in enumerate((9, 4)):
            path = [int(first[b, above]), int(second[b, n])]
            wanted, _ = rows.reference.draft(rows.states[b, :end], int(rows.tokens[b, end]), path)
            torch.testing.assert_close(logits[b, n].double(), wanted, rtol=1e-4, atol=1e-4)


def causal(monkeypatch):
    """Tokens of the block see those before them alone."""
    visible = DFlashRunner._visible

    def broken(self, visible_slots, place, rows):
        node = self.cache.held(self.spans[0], place.device)[:, None] - visible_slots.base[..., None]
        return [seen & (node <= place[:, None]) for seen in visible(self, visible_slots, place, rows)]

    monkeypatch.setattr(DFlashRunner, "_visible", broken)


def late(monkeypatch):
    """The block stands one position behind where it should."""
    place = DFlashRunner.place_draft
    monkeypatch.setattr(DFlashRunner, "place_draft", lambda self, depth, ancestors: place(self, depth + 1, ancestors))


def shifted(monkeypatch):
    """States belong to the tokens after theirs."""
    extend = DFlashRunner.extend
    monkeypatch.setattr(DFlashRunner, "extend", lambda self, t, states, p: extend(self, t, states.roll(1, 1), p))


def swapped(monkeypatch):
    """The taps are in another order."""
    extend = DFlashRunner.extend
    monkeypatch.setattr(DFlashRunner, "extend", lambda self, t, states, p: extend(self, t, states.roll(32, -1), p))


def stale(monkeypatch):
    """The block's keys and values stay, and count as text."""
    drop = DFlashRunner.drop_draft

    def broken(self):
        self.commit([1] * len(self.lengths))
        drop(self)

    monkeypatch.setattr(DFlashRunner, "drop_draft", broken)


def one_place_early(monkeypatch):
    """Each token is drafted from the place before its own."""
    logits_after = DFlashRunner.logits_after
    monkeypatch.setattr(
        DFlashRunner, "logits_after", lambda self, d, tokens, above: logits_after(self, max(0, d - 1), tokens, above)
    )


def bidirectional(monkeypatch):
    """Tokens of the block see those after them, too."""
    monkeypatch.setattr(DFlashConfig, "is_causal", lambda self, window: False)


def backwards(monkeypatch):
    """The kernel's parts are in another order."""
    kernels = BlockConvolution.kernels
    monkeypatch.setattr(BlockConvolution, "kernels", lambda self, x: [part.flip(2) for part in kernels(self, x)])


def overlapping(monkeypatch):
    """The convolution goes around the block."""
    monkeypatch.setattr(
        BlockConvolution,
        "forward",
        lambda self, x, kernel: sum(x.roll(back, 1) * kernel[:, :, back] for back in range(self.shape.kernel_size)),
    )


def forgetful(monkeypatch):
    """Every token is drafted as if the block began there."""
    monkeypatch.setattr(Block, "_state", lambda self, depth, above, n: None)


def anchored(monkeypatch):
    """Candidates are scored after the anchor instead of the token before them."""
    logits_after = Block.logits_after

    def broken(self, depth, tokens, above):
        self.__dict__.setdefault("anchor", tokens)
        logits, block = logits_after(self, depth, self.anchor, above)
        block.__dict__["anchor"] = self.anchor
        return logits, block

    monkeypatch.setattr(Block, "logits_after", broken)


FAULTS = {
    causal: "DFlash",
    late: "DFlash",
    shifted: "DFlash",
    swapped: "DFlash",
    stale: "DFlash",
    one_place_early: "DFlash",
    bidirectional: "JetSpec",
    backwards: "DFlash 2",
    overlapping: "DFlash 2",
    anchored: "DFlash 2",
    forgetful: "Domino",
}


@torch.no_grad()
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_that_check_finds_faults(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        Rows(blocks.head(FAULTS[fault]), (9,)).check_rounds()


# Through the decoder


@pytest.mark.parametrize("name", ["gemma3"])
@pytest.mark.parametrize("drafter", ["DFlash", "JetSpec", "DSpark", "Domino", "DFlash 2", "P-EAGLE"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lengths", [(9,), (20, 3, 14)], ids=["single", "ragged"])
def test_the_text_is_plain_decodings(name, drafter, shape, lengths, plain_text):
    target = tiny.model(name)
    proposer = BlockProposer(any_head(drafter), **shape)
    spec = SpeculativeGenerator(target, proposer, draft_length=4 if shape else None, on_unsupported="error")
    ours = spec.generate(**tiny.prompts(*lengths), do_sample=False, max_new_tokens=20)
    assert ours.tolist() == plain_text(target, lengths)
    if shape:
        assert spec.report.num_draft_tokens > 0


@pytest.fixture(scope="module")
def plain_text():
    known = {}

    def generate(target, lengths):
        key = (target.config.model_type, lengths)
        if key not in known:
            known[key] = target.generate(**tiny.prompts(*lengths), do_sample=False, max_new_tokens=20).tolist()
        return known[key]

    return generate


@pytest.mark.parametrize("drafter", ["JetSpec", "Domino", "DFlash 2"])
@pytest.mark.parametrize("shape", ["default", "chain"])
def test_the_sampled_text_is_plain_decodings(drafter, shape):
    target, inputs = tiny.model("gemma3"), tiny.prompts(20, 3, 14)
    spec = SpeculativeGenerator(target, BlockProposer(any_head(drafter), **SHAPES[shape]), on_unsupported="error")
    for seed, sampling in enumerate([{"top_k": 0}, {"temperature": 0.8, "top_k": 20}, {"repetition_penalty": 1.3}]):
        torch.manual_seed(seed)
        plain = target.generate(**inputs, do_sample=True, max_new_tokens=10, **sampling)
        torch.manual_seed(seed)
        assert spec.generate(**inputs, do_sample=True, max_new_tokens=10, **sampling).tolist() == plain.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", blocks.VARIANTS)
def test_every_variant_drafts(name):
    target, inputs = tiny.model("llama"), tiny.prompts(9, 4)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=16)
    spec = SpeculativeGenerator(target, BlockProposer(blocks.head(name)), draft_length=4, on_unsupported="error")
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=16).tolist() == plain.tolist()


@pytest.mark.parametrize("drafter", ["DSpark", "DFlash 2", "own vocabulary"])
def test_processors_that_read_the_text(drafter):
    target, inputs = tiny.model("llama"), tiny.prompts(9, 4)
    arguments = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    plain = target.generate(**inputs, **arguments)
    spec = SpeculativeGenerator(target, BlockProposer(blocks.head(drafter)), draft_length=4)
    assert spec.generate(**inputs, **arguments).tolist() == plain.tolist()


def test_prompt_given_as_embeddings():
    target = tiny.model("llama")
    embeds = target.get_input_embeddings()(tiny.prompts(9)["input_ids"]).detach()
    plain = target.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=12)
    spec = SpeculativeGenerator(target, BlockProposer(blocks.head()), draft_length=3, on_unsupported="error")
    assert spec.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()


def test_one_pass_drafts_a_block():
    target = tiny.model("llama")
    spec = SpeculativeGenerator(target, BlockProposer(blocks.head(), branching=(1,) * 9), draft_length=9)
    spec.generate(**tiny.prompts(9), do_sample=False, max_new_tokens=20)
    drafts = spec.report.num_drafts
    assert spec.report.num_draft_passes == drafts
    assert 3 * drafts < spec.report.num_draft_tokens <= 4 * drafts  # blocks of 5, anchors not counted


@torch.no_grad()
def test_the_confidence_head_says_how_sure_a_chain_is():
    rows = Rows(blocks.head("DSpark"), (9, 4))
    proposer = BlockProposer(rows.head)
    proposer.runner = rows.runner
    rows.extend([9, 4], [9, 4])
    keys = bin_of(proposer._confidence(torch.zeros(2, tiny.VOCAB), None))
    assert keys.tolist() == bin_of(rows.runner.block.acceptance[:, -1]).tolist()
    assert keys.tolist() != [bin_of(torch.tensor([1 / tiny.VOCAB])).item()] * 2  # what the scores alone would say


# A trained drafter: what it accepts is what the naive one drafts


@torch.no_grad()
def assistants(head, target, text, prompt, draft_length):
    """Rounds that chains of the naive drafter's best tokens take to write the text."""
    states, reference, ids = (
        eagle3.states_of(target, text[None], head.config.tap_ids)[0],
        naive(head, target),
        text.tolist(),
    )
    root, rounds = prompt, 0  # the first token comes from the prefill
    while root < len(ids) - 2:
        rounds, path = rounds + 1, []
        while len(path) < min(draft_length, len(ids) - 2 - root):
            logits, _ = reference.draft(states[:root], ids[root], path)
            path.append(int(logits.argmax()))
            if path[-1] != ids[root + len(path)]:
                path.pop()
                break
        root += 1 + len(path)
    return rounds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DFlash", "JetSpec", "DSpark", "Domino", "DFlash 2"])
def test_a_trained_drafter_accepts_what_the_naive_one_drafts(name):
    head, target, prompts = blocks.trained(name)
    spec = SpeculativeGenerator(target, BlockProposer(head, branching=(1,) * 4), draft_length=4, on_unsupported="error")
    for prompt in prompts[:6]:
        text = spec.generate(prompt[None], do_sample=False, max_new_tokens=30)[0]
        assert spec.last_report.num_drafts == assistants(head, target, text, 8, 4)
    spec = SpeculativeGenerator(target, BlockProposer(head, branching=(1,) * 4), draft_length=4)
    spec.generate(prompts, do_sample=False, max_new_tokens=33, attention_mask=torch.ones_like(prompts))
    assert spec.report.mean_acceptance_length > 2.5


# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 16}, "hidden states of 16, this one's have 32"),
        ({"vocab_size": 5000, "draft_vocab_size": 5000}, "vocabulary of 5000 tokens, the target's has 64"),
        ({"hidden_size": 48}, "embeddings 48 wide and has none of its own"),
        ({"tap_ids": (0, 7)}, "2 layers: there is no tap 7"),
        ({"mask_token_id": 64}, "mask token 64 is outside the 64"),
    ],
)
def test_a_drafter_of_another_target(changes, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeGenerator(tiny.model("llama"), BlockProposer(blocks.head(**changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, "a block drafter needs one"),
        ({"block_size": 1}, "leaves no token to draft"),
        ({"windows": (None,)}, "1 windows for 2 layers"),
        ({"windows": (3, None)}, "smaller than a block of 5"),
        ({"markov": "hidden"}, "one of vanilla, gated, rnn"),
        ({"causal": "layers"}, "causal must be one of none, windows, all"),
        ({"markov": "rnn", "domino": DominoShape(4, 4)}, "one of a Markov head, a Domino head and a selector"),
        ({"convolution": ConvolutionShape(2, 5)}, "32 is no multiple of the convolution's groups of 5"),
        ({"convolution": ConvolutionShape(6, 8)}, "kernel of 6 is larger than a block of 5"),
        ({"confidence_with_markov": True}, "needs a Markov head, but markov is None"),
        ({"draft_vocab_size": 65}, "larger than vocab_size"),
    ],
)
def test_a_config_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        DFlashConfig(**blocks.SHAPE | changes)


def test_each_kind_of_head_has_its_proposer():
    with pytest.raises(ValueError, match="Eagle3Proposer"):
        BlockProposer(eagle3.head())
    with pytest.raises(ValueError, match="BlockProposer"):
        Eagle3Proposer(blocks.parallel())


def test_one_drafter_serves_targets_of_one_kind():
    """The head is shared, what it has read is not."""
    proposer = BlockProposer(blocks.head())
    for seed in (0, 2):
        target = tiny.model("llama", seed=seed)
        plain = target.generate(**tiny.prompts(9), do_sample=False, max_new_tokens=12)
        spec = SpeculativeGenerator(target, proposer, draft_length=3)
        assert spec.generate(**tiny.prompts(9), do_sample=False, max_new_tokens=12).tolist() == plain.tolist()


def test_windows_hold_no_more_than_they_show():
    """Keys and values of layers with a window do not grow with the text."""
    rows = Rows(blocks.head("window"), (60,))
    rows.check_rounds()
    small, whole = sorted(rows.runner.cache.nbytes.values())
    assert small < whole / 2


@pytest.mark.parametrize("size", [tiny.VOCAB + 6, tiny.VOCAB + 1])
@pytest.mark.parametrize("name", ["DSpark", "rnn", "Domino"])
def test_drafters_of_a_target_with_added_tokens(name, size):
    """Their corrections are of the tokens that they were trained with."""
    model, prompt = copy.deepcopy(tiny.model("llama")), tiny.prompts(9)
    model.resize_token_embeddings(size)
    head = blocks.head(name)
    spec = SpeculativeGenerator(model, BlockProposer(head), draft_length=3)
    arguments = {**prompt, "do_sample": False, "max_new_tokens": 12}
    assert spec.generate(**arguments).tolist() == model.generate(**arguments).tolist()
    assert spec.report.num_draft_tokens
