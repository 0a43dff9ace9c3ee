"""`NodeProcessors` against the plain processors, called for one node after another; and which may keep a state."""

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from specdec.sampling.logits_processors import NodeProcessors, follows_the_text

V, EOS, PAD = 24, 5, 0
PROMPTS = {1: [6], 3: [4, 7, 5]}  # batch size -> tokens of each row's text before the draft
TREES = {
    "chain": [-1, 0, 1, 2],
    "tree": [-1, 0, 0, 1, 1, 2],
}


def allowed(row: int, text: Tensor) -> list[int]:
    """Differs from row to row and from text to text."""
    return [token for token in range(V) if (int(text.sum()) + 2 * token + row) % 5]


# Each makes a fresh processor for B rows whose prompts fill `length` columns.
CONTEXT_FREE = {
    "temperature": lambda B, length: hf.TemperatureLogitsWarper(0.7),
    "top-k": lambda B, length: hf.TopKLogitsWarper(5),
    "top-p": lambda B, length: hf.TopPLogitsWarper(0.8),
    "top-p, two at least": lambda B, length: hf.TopPLogitsWarper(0.05, min_tokens_to_keep=2),
    "top-p of everything": lambda B, length: hf.TopPLogitsWarper(1.0),
    "min-p": lambda B, length: hf.MinPLogitsWarper(0.1),
    "typical": lambda B, length: hf.TypicalLogitsWarper(0.7),
    "epsilon": lambda B, length: hf.EpsilonLogitsWarper(0.05),
    "eta": lambda B, length: hf.EtaLogitsWarper(0.05),
    "suppress": lambda B, length: hf.SuppressTokensLogitsProcessor([1, 4]),
    "no inf or nan": lambda B, length: hf.InfNanRemoveLogitsProcessor(),
    "normalise": lambda B, length: hf.LogitNormalization(),
}
READING = {
    "repetition penalty": lambda B, length: hf.RepetitionPenaltyLogitsProcessor(1.7),
    "repetition penalty, prompt ignored": lambda B, length: hf.RepetitionPenaltyLogitsProcessor(
        1.7, prompt_ignore_length=length
    ),
    "encoder repetition penalty": lambda B, length: hf.EncoderRepetitionPenaltyLogitsProcessor(
        1.7, torch.arange(3 * B).view(B, 3)
    ),
    "no repeated n-gram": lambda B, length: hf.NoRepeatNGramLogitsProcessor(2),
    "no n-gram of the encoder": lambda B, length: hf.EncoderNoRepeatNGramLogitsProcessor(
        2, torch.arange(8 * B).view(B, 8) % V
    ),
    "bad words": lambda B, length: hf.NoBadWordsLogitsProcessor([[2], [3, 4], [1, 1, 6]], torch.tensor([EOS])),
    "sequence bias": lambda B, length: hf.SequenceBiasLogitsProcessor({(2,): 3.0, (3, 4): -9.0, (1, 1, 6): 5.0}),
    "min length": lambda B, length: hf.MinLengthLogitsProcessor(length + 2, torch.tensor([EOS])),
    "min new tokens": lambda B, length: hf.MinNewTokensLengthLogitsProcessor(length, 2, torch.tensor([EOS])),
    "forced end": lambda B, length: hf.ForcedEOSTokenLogitsProcessor(length + 2, EOS),
    "forced start": lambda B, length: hf.ForcedBOSTokenLogitsProcessor(7),
    "suppressed at the start": lambda B, length: hf.SuppressTokensAtBeginLogitsProcessor([1, 4], length + 1),
    "exponential decay": lambda B, length: hf.ExponentialDecayLengthPenalty((1, 1.5), torch.tensor([EOS]), length),
    "prefix-constrained, by row": lambda B, length: hf.PrefixConstrainedLogitsProcessor(allowed, 1),
    "watermark": lambda B, length: hf.WatermarkLogitsProcessor(V, "cpu", context_width=1),
    "a class of our own": lambda B, length: Shift(),
}
TOGETHER = {
    "as generate() orders them": lambda B, length: [
        READING["repetition penalty"](B, length),
        READING["no repeated n-gram"](B, length),
        CONTEXT_FREE["temperature"](B, length),
        CONTEXT_FREE["top-k"](B, length),
        CONTEXT_FREE["top-p"](B, length),
    ],
    "reading after warping": lambda B, length: [CONTEXT_FREE["top-k"](B, length), READING["sequence bias"](B, length)],
}


class Shift(LogitsProcessor):
    """Pure: a function of scores and text."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + input_ids[:, -1:] * torch.arange(scores.shape[1]) / 10


def nodes(batch: int, shape: str) -> tuple[list[list[Tensor]], Tensor]:
    """Texts [b][n] in generate()'s layout and logits (B, N, V). Rows differ in padding and in how far they are."""
    generator = torch.Generator().manual_seed(batch)
    lengths, parents = PROMPTS[batch], TREES[shape]
    texts = []
    for b, length in enumerate(lengths):
        pads = max(lengths) - length
        gained = b  # row b is b tokens ahead
        text = torch.cat([torch.full((pads,), PAD), torch.randint(1, 7, (length + gained,), generator=generator)])
        row = [text]
        for parent in parents[1:]:
            row.append(torch.cat([row[parent], torch.randint(1, 7, (1,), generator=generator)]))
        texts.append(row)
    logits = torch.randn(batch, len(parents), V, generator=generator) * 3
    return texts, logits


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("batch", PROMPTS, ids=["one row", "three ragged rows"])
@pytest.mark.parametrize("name", [*CONTEXT_FREE, *READING, *TOGETHER])
def test_every_node_as_in_plain_decoding(name, batch, shape):
    make = (CONTEXT_FREE | READING | TOGETHER)[name]
    width = max(PROMPTS[batch])

    def processors() -> LogitsProcessorList:
        made = make(batch, width)
        return LogitsProcessorList(made if isinstance(made, list) else [made])

    texts, logits = nodes(batch, shape)
    before = logits.clone()
    got = NodeProcessors(processors())(logits, lambda: texts)
    assert torch.equal(logits, before)  # the raw logits are the caller's
    for b, row in enumerate(texts):
        for n, text in enumerate(row):
            # all rows hold this text, so that row b is in its own place
            plain = processors()(text.repeat(batch, 1), logits[b, n].repeat(batch, 1))
            at = f"row {b}, node {n}: "
            torch.testing.assert_close(got[b, n], plain[b], rtol=0, atol=0, msg=lambda message, at=at: at + message)


@pytest.mark.parametrize("name", [*CONTEXT_FREE, *READING])
def test_the_processors_change_something(name):
    """The comparison above is between scores that were changed (what changes nothing is named here)."""
    texts, logits = nodes(3, "tree")
    processor = (CONTEXT_FREE | READING)[name](3, max(PROMPTS[3]))
    got = NodeProcessors(LogitsProcessorList([processor]))(logits, lambda: texts)
    unchanged = {"top-p of everything", "no inf or nan", "forced start"}  # the last one asks for texts of one token
    assert torch.equal(got, logits) == (name in unchanged)


@pytest.mark.parametrize("name", CONTEXT_FREE)
def test_context_free_processors_need_no_texts(name):
    processors = NodeProcessors([CONTEXT_FREE[name](1, 1)])
    assert processors.fit_any_vocabulary == (name != "suppress")
    processors(torch.randn(2, 3, V), lambda: pytest.fail("asked for texts"))


def test_one_text_reader_is_enough_to_need_texts():
    both = LogitsProcessorList([CONTEXT_FREE["top-k"](1, 1), READING["bad words"](1, 1)])
    assert not NodeProcessors(both).fit_any_vocabulary
    assert NodeProcessors(LogitsProcessorList()).fit_any_vocabulary
    ending = hf.MinNewTokensLengthLogitsProcessor(1, 4, [2], device="cpu")
    assert NodeProcessors(LogitsProcessorList([hf.TemperatureLogitsWarper(0.7), ending])).fit_any_vocabulary


def test_without_processors_scores_are_float32_logits():
    logits = torch.randn(2, 3, V, dtype=torch.bfloat16)
    scores = NodeProcessors(LogitsProcessorList())(logits, list)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, logits.float())


def test_half_precision_logits_are_processed_in_float32():
    """As plain decoding does, which converts before it processes."""
    logits = (torch.randn(2, 3, V) * 3).bfloat16()
    got = NodeProcessors(LogitsProcessorList([hf.TemperatureLogitsWarper(0.7)]))(logits, list)
    assert torch.equal(got, logits.float() / 0.7)


# The faster top-p


def peaked(rows: int, vocab: int, nucleus: float = 3.0) -> Tensor:
    """Scores as language models give them: a few tokens hold most of the mass."""
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(rows, vocab, generator=generator)
    scores[torch.arange(rows)[:, None], torch.randint(vocab, (rows, 200), generator=generator)] += 9 + nucleus
    return scores


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.95])
@pytest.mark.parametrize("vocab", [300, 1024, 1025, 50_000])
def test_top_p_over_large_vocabularies(vocab, top_p, keep):
    """The nucleus of transformers; tokens on its very border (within rounding of the sums) may fall either way."""
    warper = hf.TopPLogitsWarper(top_p, min_tokens_to_keep=keep)
    scores = peaked(6, vocab)
    got = NodeProcessors(LogitsProcessorList([warper]))(scores.view(2, 3, vocab), list).view(6, vocab)
    plain = warper(None, scores)
    differs = got != plain
    order = scores.double().softmax(-1).sort(-1, descending=True)
    mass_before = order.values.cumsum(-1) - order.values
    before = torch.zeros_like(mass_before).scatter(1, order.indices, mass_before)
    assert ((before - top_p).abs() < 1e-5)[differs].all()
    assert differs.sum() <= 6  # a single token per row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [300, 1500, 32_000])
def test_top_p_among_equal_scores(vocab, dtype):
    """Half-precision logits are full of ties, on the border of the nucleus too.

    Which of equal tokens transformers keeps is its unstable sort's choice, and not always ours; how many of them, and
    everything else, is the same.
    """
    scores = peaked(16, vocab).to(dtype).float()
    for top_p in (0.2, 0.5, 0.7):
        warper = hf.TopPLogitsWarper(top_p)
        plain = warper(None, scores)
        got = NodeProcessors(LogitsProcessorList([warper]))(scores[:, None], list)[:, 0]
        border = plain.masked_fill(plain.isinf(), 1e9).amin(-1, keepdim=True)
        assert torch.equal(got.sort(-1).values, plain.sort(-1).values)
        assert ((got == plain) | (scores == border)).all()


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        pytest.param([0.0, 1.0, 2.0], [2], id="the first holds two thirds"),
        pytest.param([0.0, 0.1, 0.2, 0.3], [2, 3], id="two hold more than half, one does not"),
        pytest.param([float("-inf"), 0.0, float("-inf")], [1], id="what was cut before stays cut"),
    ],
)
def test_top_p_by_hand(scores, kept):
    warper = hf.TopPLogitsWarper(0.49)
    for result in (
        NodeProcessors(LogitsProcessorList([warper]))(torch.tensor([[scores]]), list)[0, 0],
        warper(None, torch.tensor([scores]))[0],
    ):
        assert result.isfinite().nonzero().flatten().tolist() == kept


def test_a_wide_nucleus_is_left_to_transformers():
    """More tokens than the fast way looks at."""
    scores = torch.randn(3, 1, 40_000)
    warper = hf.TopPLogitsWarper(0.9)
    got = NodeProcessors(LogitsProcessorList([warper]))(scores, list)[:, 0]
    assert torch.equal(got, warper(None, scores[:, 0]))
    assert (got.isfinite().sum(-1) > 1024).all()


# What plain decoding would never show to a processor


class Strict:
    """A `prefix_allowed_tokens_fn` that knows few texts, others in each row, and nothing to allow after any other."""

    def __init__(self, known: list[dict[tuple[int, ...], list[int]]]):
        self.known = known

    def __call__(self, row: int, text: Tensor) -> list[int]:
        return self.known[row].get(tuple(text.tolist()), [])


def test_a_drafted_text_that_is_ruled_out_is_no_error():
    """Root 1 allows 2 and 3; the draft has 2 (which allows 4), 5 (ruled out) and a node behind each."""
    fn = Strict([{(1,): [2, 3], (1, 2): [4], (1, 2, 4): [6]}])
    texts = [[torch.tensor(text) for text in ([1], [1, 2], [1, 5], [1, 2, 4], [1, 5, 4])]]
    processors = NodeProcessors(LogitsProcessorList([hf.PrefixConstrainedLogitsProcessor(fn, 1)]))
    scores = processors(torch.zeros(1, 5, V), lambda: texts)
    for node, tokens in {0: [2, 3], 1: [4], 3: [6]}.items():
        assert scores[0, node].isfinite().nonzero().flatten().tolist() == tokens
    assert not scores.isnan().any()


def test_a_row_is_asked_about_its_own_texts_where_it_can_be():
    """Row 0 has one node more than row 1, and row 1 is further on."""
    fn = Strict([{(1,): [2], (1, 2): [4]}, {(7,): [8], (7, 8): [9], (7, 8, 9): [3]}])
    texts = [
        [torch.tensor([1]), torch.tensor([1, 2])],
        [torch.tensor([7, 8]), torch.tensor([7, 8, 9])],
    ]
    processors = NodeProcessors(LogitsProcessorList([hf.PrefixConstrainedLogitsProcessor(fn, 1)]))
    with pytest.raises(ValueError, match="batch ID 0"):  # row 0 has no text of three tokens: no way around
        processors(torch.zeros(2, 2, V), lambda: texts)
    fn.known[0][7, 8, 9] = [0]
    scores = processors(torch.zeros(2, 2, V), lambda: texts)
    assert [row.isfinite().nonzero()[:, 1].tolist() for row in scores] == [[2, 4], [9, 3]]


def test_a_subclass_may_read_the_text():
    """Being a kind of temperature does not make it blind: its texts are its own nodes'."""

    class Cooling(hf.TemperatureLogitsWarper):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores / input_ids.shape[1]

    texts, logits = nodes(3, "tree")
    processors = NodeProcessors(LogitsProcessorList([Cooling(1.0)]))
    assert not processors.fit_any_vocabulary
    scores = processors(logits, lambda: texts)
    for b, row in enumerate(texts):
        for n, text in enumerate(row):
            assert torch.equal(scores[b, n], logits[b, n] / len(text))


# Who may see drafted text


class Counter(LogitsProcessor):
    """Remembers how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores


class DeclaredStateless(Counter):
    stateless = True


class DeclaredStateful(Shift):
    stateless = False


class Grammar(hf.TopKLogitsWarper):
    """A subclass of one we know that we don't."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.top_k += 1
        return super().__call__(input_ids, scores)


@pytest.mark.parametrize("name", [name for name in (*CONTEXT_FREE, *READING) if name != "a class of our own"])
def test_transformers_own_may_see_drafts(name):
    assert not follows_the_text((CONTEXT_FREE | READING)[name](2, 6))


@pytest.mark.parametrize(
    ("processor", "follows"),
    [
        pytest.param(lambda: hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None), True, id="guidance"),
        pytest.param(lambda: hf.ClassifierFreeGuidanceLogitsProcessor(1.5), True, id="batched guidance"),
        pytest.param(
            lambda: hf.SynthIDTextWatermarkLogitsProcessor(3, [1, 2], 8, 0, 4, "cpu"), True, id="SynthID watermark"
        ),
        pytest.param(Shift, True, id="a class nobody knows"),
        pytest.param(lambda: Grammar(5), True, id="subclass of a known one"),
        pytest.param(DeclaredStateful, True, id="declared stateful, though pure"),
        pytest.param(DeclaredStateless, False, id="declared stateless, though counting"),
        pytest.param(lambda: lambda input_ids, scores: scores, True, id="a function, which may be a closure"),
    ],
)
def test_which_processors_may_follow_the_text(processor, follows):
    made = processor()
    assert follows_the_text(made) == follows
    processors = NodeProcessors([hf.TopKLogitsWarper(5), made])
    assert processors.known == (not follows)
    assert len(processors.for_drafts(captured=False).processors) == 2 - follows
