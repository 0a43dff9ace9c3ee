"""The same seed gives plain `generate()`'s text, whatever is drafted, and leaves the generator where that does."""

import itertools

import pytest
import torch
from transformers import StoppingCriteriaList

from specdec import (
    BlockProposer,
    DraftModelProposer,
    DynamicTree,
    Eagle3Proposer,
    EarlyExitProposer,
    HybridProposer,
    HydraProposer,
    Lenient,
    NgramProposer,
    SpeculativeGenerator,
    SuffixProposer,
)
from specdec.engine.transcript import Transcript
from specdec.sampling.noise import Noise, noise_of_call
from specdec.utils.choices import COUPLED
from tests.support import blocks, eagle3, encoded, tiny
from tests.support.diagonal import diagonal

NEW = 12
FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "mixtral"]
WARPED = {
    "plain": {"top_k": 0},
    "warped": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "penalty": {"repetition_penalty": 1.3, "top_k": 0},
}


def head(model):
    size = model.config.hidden_size
    return eagle3.head(hidden_size=size, target_hidden_size=size, tap_ids=(0, 1, 2))


PROPOSERS = {
    "ngram": lambda model, name: NgramProposer(),
    "ngram tree": lambda model, name: NgramProposer(continuations=2),
    "suffix": lambda model, name: SuffixProposer(),
    "draft": lambda model, name: DraftModelProposer(tiny.model(name, seed=1)),
    "itself": lambda model, name: DraftModelProposer(model),
    "draft tree": lambda model, name: DraftModelProposer(tiny.model(name, seed=1), tree=DynamicTree(depth=3, top_k=2)),
    "fixed tree": lambda model, name: DraftModelProposer(model, branching=(2, 1)),
    "head": lambda model, name: Eagle3Proposer(head(model)),
    "ngram+head": lambda model, name: HybridProposer(Eagle3Proposer(head(model))),
    "block": lambda model, name: BlockProposer(blocks.head("DSpark")),
    "P-EAGLE": lambda model, name: BlockProposer(blocks.parallel()),
    "medusa": lambda model, name: BlockProposer(blocks.medusa()),
    "hydra": lambda model, name: HydraProposer(blocks.hydra()),
    "early exit": lambda model, name: EarlyExitProposer(1),
    "garbage": lambda model, name: tiny.Garbage(),
}


def with_seed(seed, generate, **kwargs):
    """What it wrote, and where it left the generator."""
    torch.manual_seed(seed)
    return generate(do_sample=True, max_new_tokens=NEW, **kwargs).tolist(), torch.get_rng_state()


def differences(spec, seeds, inputs, **kwargs) -> list[int]:
    """Seeds at which texts or the generator's state differ from plain decoding's."""
    out = []
    for seed in seeds:
        text, state = with_seed(seed, spec.generate, **inputs, **kwargs)
        plain, left = with_seed(seed, spec.model.generate, **inputs, **kwargs)
        if text != plain or not torch.equal(state, left):
            out.append(seed)
    return out


QUICK = ("draft", "draft tree", "fixed tree", "ngram+head", "medusa", "hydra", "garbage")


@pytest.mark.parametrize(
    ("proposer", "lengths"),
    [
        pytest.param(name, lengths, id=f"{name}-{kind}", marks=[] if quick else pytest.mark.slow)
        for name in PROPOSERS
        for kind, lengths, quick in (("one row", (7,), name == "block"), ("ragged", (7, 4, 9, 5), name in QUICK))
    ],
)
def test_same_seed_same_text(proposer, lengths):
    model = tiny.model("llama")
    for draft_length in (3, None):
        spec = SpeculativeGenerator(
            model, PROPOSERS[proposer](model, "llama"), draft_length=draft_length, on_unsupported="error"
        )
        for warped in WARPED.values():
            assert differences(spec, range(3), tiny.prompts(*lengths), **warped) == []


# Each pair of a proposer and a family once: one row or four, in turns.
IN_TURNS = [
    pytest.param(proposer, family, lengths, id=f"{proposer}-{family}-{len(lengths)}")
    for row, proposer in enumerate(PROPOSERS)
    for column, family in enumerate(FAMILIES)
    for lengths in [((7,), (7, 4, 9, 5))[(row + column) % 2]]
]


@pytest.mark.slow
@pytest.mark.parametrize(("proposer", "family", "lengths"), IN_TURNS)
def test_nine_seeds_of_every_pair(proposer, family, lengths):
    """Three under each processing."""
    model = tiny.model(family)
    spec = SpeculativeGenerator(model, PROPOSERS[proposer](model, family), draft_length=3, on_unsupported="error")
    for place, warped in enumerate(WARPED.values()):
        assert differences(spec, range(3 * place, 3 * place + 3), tiny.prompts(*lengths), **warped) == []


def test_rows_that_end_early():
    """Plain decoding goes on drawing for finished rows."""
    model, inputs = tiny.model("llama"), tiny.prompts(7, 4, 9, 5)
    plain, _ = with_seed(0, model.generate, **inputs)
    spec = SpeculativeGenerator(model, DraftModelProposer(model), draft_length=4, on_unsupported="error")
    ends = [row[9 + place] for place, row in enumerate(plain)]
    assert differences(spec, range(10), inputs, eos_token_id=ends) == []


def test_recorded_scores_of_a_sampled_batch():
    model, inputs = tiny.model("llama"), tiny.prompts(7, 4, 9)
    spec = SpeculativeGenerator(model, DraftModelProposer(model), draft_length=4, on_unsupported="error")
    arguments = {"do_sample": True, "max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(3)
    ours = spec.generate(**inputs, **arguments, eos_token_id=5, top_k=9)
    torch.manual_seed(3)
    plain = model.generate(**inputs, **arguments, eos_token_id=5, top_k=9)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for a, b in zip(ours.scores, plain.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_several_sequences_of_one_prompt():
    model = tiny.model("llama")
    spec = SpeculativeGenerator(model, "ngram", draft_length=3, on_unsupported="error")
    assert differences(spec, range(5), tiny.prompts(8), num_return_sequences=4) == []


def test_bets_on_the_race_are_won_where_the_draft_is_the_target():
    model, inputs = tiny.model("llama"), tiny.prompts(8)
    spec = SpeculativeGenerator(model, DraftModelProposer(model), draft_length=4)
    with_seed(0, spec.generate, **inputs)
    assert spec.report.draft_acceptance_rate == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_scores_that_cannot_be_sampled_raise_as_in_plain_decoding(value):
    class Broken:
        stateless = True

        def __call__(self, ids, scores):
            return scores.index_fill(1, torch.tensor([3]), value) if ids.shape[1] > 12 else scores

    model = tiny.model("llama")
    spec = SpeculativeGenerator(model, "ngram", draft_length=3, on_unsupported="error")
    said = []
    for generate in (model.generate, spec.generate):
        with pytest.raises(RuntimeError) as error:
            with_seed(0, generate, **tiny.prompts(8), logits_processor=[Broken()])
        said.append(str(error.value))
    assert said[0] == said[1]


# Calls that are broken off


class Breaks:
    """A streamer, a criterion or a processor that raises: what was streamed before is in `puts`."""

    def __init__(self, error, put=None, criterion=None, at_end=False):
        self.error, self.put_no, self.width, self.at_end, self.puts = error, put, criterion, at_end, []

    def put(self, value):
        if len(self.puts) + 1 == self.put_no:
            raise self.error
        self.puts.append(value.tolist())

    def end(self):
        if self.at_end:
            raise self.error

    def __call__(self, ids, scores, **kwargs):
        if ids.shape[1] == self.width:
            raise self.error
        return torch.zeros(len(ids), dtype=torch.bool)


BREAKS = {f"put {k}": {"put": k} for k in (1, 2, 3, 6, 9)} | {"end": {"at_end": True}}
BREAKS |= {f"criterion {k}": {"criterion": k} for k in (1, 2, 3, 6)}  # new tokens


def broken_off(generate, seed, error, breaks, width, **kwargs):
    """Where a call that raises leaves the generator, and what it streamed until then."""
    if "criterion" in breaks:
        breaks = {"criterion": width + breaks["criterion"]}
    spoils = Breaks(error, **breaks)
    if "criterion" in breaks:
        kwargs["stopping_criteria"] = StoppingCriteriaList([spoils])
    with pytest.raises(type(error), match="enough"):
        with_seed(seed, generate, streamer=spoils, **kwargs)
    return spoils.puts, torch.get_rng_state().tolist()


@pytest.mark.parametrize(
    ("proposer", "lengths", "rule", "error"),
    diagonal(
        ["itself", "fixed tree", "garbage"],
        {"ragged": (7, 4, 9), "one row": (7,)},
        {"coupled": COUPLED, "lenient": Lenient(0.0)},
        {type(error).__name__: error for error in (RuntimeError("enough"), KeyboardInterrupt("enough"))},
        times=2,
    ),
)
def test_a_call_that_is_broken_off_leaves_the_generator_where_plain_decoding_does(proposer, lengths, rule, error):
    model, inputs = tiny.model("llama"), tiny.prompts(*lengths)
    drafts = PROPOSERS[proposer](model, "llama")
    spec = SpeculativeGenerator(model, drafts, draft_length=4, rule=rule, on_unsupported="error")
    for breaks in BREAKS.values():
        made = [broken_off(g.generate, 1, error, breaks, max(lengths), **inputs) for g in (model, spec)]
        assert made[0] == made[1]
    assert spec.report.num_draft_tokens > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_an_encoder_decoder_call_that_is_broken_off(rows):
    model = encoded.model("bart")
    inputs = encoded.inputs("bart", rows) | {"min_new_tokens": NEW}
    spec = SpeculativeGenerator(model, DraftModelProposer(model), draft_length=4)
    for breaks in BREAKS.values():
        made = [broken_off(g.generate, 1, RuntimeError("enough"), breaks, 1, **inputs) for g in (model, spec)]
        assert made[0] == made[1]
    assert spec.report.num_accepted_tokens > 0


def outcome(generate, seed=1, **kwargs):
    """What a call wrote or raised, what it streamed until then, and where it leaves the generator."""
    streamer = Breaks(None)
    torch.manual_seed(seed)
    try:
        wrote = generate(max_new_tokens=NEW, streamer=streamer, **kwargs).tolist()
    except Exception as error:
        wrote = type(error), str(error)
    return wrote, streamer.puts, torch.get_rng_state().tolist()


def calls_with_a_processor_that_raises():
    """Arguments of calls whose processor raises in one row, from a length on, unless the row has ended."""
    for lengths, eos in (((7,), None), ((7, 4, 9), None), ((7, 4, 9), [5, 9, 11, 17, 23, 44])):
        inputs, width = tiny.prompts(*lengths), max(lengths)
        for row, after in itertools.product(range(len(lengths)), (0, 2, 5)):

            def allowed(b, ids, row=row, length=width + after, eos=eos, width=width):
                over = eos is not None and any(token in eos for token in ids[width:].tolist())
                if b == row and len(ids) >= length and not over:
                    raise RuntimeError(f"no tokens for row {b} of {len(ids)}")
                return list(range(1, tiny.VOCAB))

            yield {**inputs, "prefix_allowed_tokens_fn": allowed, "eos_token_id": eos}


@pytest.mark.parametrize(
    ("proposer", "do_sample"),
    diagonal(["itself", "fixed tree", "draft tree", "medusa", "garbage"], {"sampled": True, "greedy": False}),
)
def test_a_processor_that_raises(proposer, do_sample):
    """In one row, at a length: a round that is there already ends before it, and rows that are ahead wait."""
    model = tiny.model("llama")
    spec = SpeculativeGenerator(model, PROPOSERS[proposer](model, "llama"), draft_length=4, on_unsupported="error")
    raised = 0
    for arguments in calls_with_a_processor_that_raises():
        expected = outcome(model.generate, do_sample=do_sample, **arguments)
        assert outcome(spec.generate, do_sample=do_sample, **arguments) == expected
        raised += expected[0][0] is RuntimeError
    assert raised > 12
    if proposer in ("itself", "fixed tree"):
        assert spec.report.num_accepted_tokens > 20


@pytest.mark.parametrize(
    ("proposer", "rule"),
    [
        pytest.param(*case, marks=[] if case in (("itself", "block"), ("fixed tree", "token")) else pytest.mark.slow)
        for case in itertools.product(
            ["itself", "draft", "fixed tree", "medusa", "garbage"], ["block", "token", "typical"]
        )
    ],
)
def test_a_processor_that_raises_under_a_rule_over_all_nodes(proposer, rule):
    """`top_k=1` leaves one text to sample, so it, what was streamed and the error are plain decoding's."""
    model = tiny.model("llama")
    drafts = PROPOSERS[proposer](model, "llama")
    spec = SpeculativeGenerator(model, drafts, draft_length=4, rule=rule, on_unsupported="error")
    raised = accepted = 0
    for arguments in calls_with_a_processor_that_raises():
        arguments |= {"do_sample": True, "top_k": 1}
        expected = outcome(model.generate, **arguments)
        assert outcome(spec.generate, **arguments)[:2] == expected[:2]
        raised += expected[0][0] is RuntimeError
        accepted += spec.report.num_accepted_tokens
    assert raised > 12
    if proposer in ("itself", "fixed tree"):
        assert accepted > 20


class Raises:
    """A stateless processor that raises `message` for some texts."""

    stateless = True

    def __init__(self, message, refuses):
        self.message, self.refuses = message, refuses

    def __call__(self, ids, scores):
        if self.refuses(ids):
            raise RuntimeError(self.message)
        return scores


@pytest.mark.parametrize("rule", ["block", "token"])
def test_the_first_of_two_processors_that_raise(rule):
    """One refuses texts that are only drafted, before the other refuses the text that is there."""
    model, inputs = tiny.model("llama"), tiny.prompts(7, 4, 9)
    processors = [Raises("late", lambda ids: ids.shape[1] >= 15), Raises("early", lambda ids: ids.shape[1] >= 13)]
    spec = SpeculativeGenerator(model, DraftModelProposer(model), draft_length=4, rule=rule, on_unsupported="error")
    arguments = {**inputs, "do_sample": True, "top_k": 1, "logits_processor": processors}
    assert outcome(spec.generate, **arguments)[:2] == outcome(model.generate, **arguments)[:2]


@pytest.mark.parametrize("rule", ["block", "token", COUPLED])
def test_scores_of_rows_that_go_on_with_padding_when_a_processor_raises(rule):
    """Finished rows are recorded with padding, whose probability may be 0, up to the text that a processor refuses."""
    model, inputs, ends = tiny.model("llama"), tiny.prompts(7, 4, 9), [5, 9, 11, 17, 23, 44]
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    penalty = {"repetition_penalty": 1.7, "suppress_tokens": [0]}
    spec = SpeculativeGenerator(model, tiny.Garbage(), draft_length=4, rule=rule, on_unsupported="error")
    wrote = 0
    for token in range(1, 40, 3):
        refuses = lambda ids, token=token: bool((ids[:, 9:] == token).any())  # noqa: E731
        arguments = {**inputs, **asked, **penalty, "do_sample": True, "top_k": 1, "eos_token_id": ends}
        arguments |= {"pad_token_id": 0, "max_new_tokens": NEW, "logits_processor": [Raises("no", refuses)]}
        found = []
        for generate in (model.generate, spec.generate):
            torch.manual_seed(token)
            try:
                found.append(generate(**arguments))
            except RuntimeError as error:
                found.append(str(error))
        plain, ours = found
        if isinstance(plain, str):
            assert ours == plain
            continue
        wrote += 1
        assert ours.sequences.tolist() == plain.sequences.tolist()
        for name in ("scores", "logits"):
            for mine, expected in zip(ours[name], plain[name], strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    assert wrote > 2


@pytest.mark.parametrize("lengths", [(7,), (7, 4, 9)], ids=["one row", "ragged"])
def test_scores_that_break_in_one_row(lengths):
    class Broken:
        stateless = True

        def __init__(self, row, length):
            self.row, self.length = row, length

        def __call__(self, ids, scores):
            if ids.shape[1] >= self.length:
                scores[self.row, 3] = float("nan")
            return scores

    model, inputs = tiny.model("llama"), tiny.prompts(*lengths)
    spec = SpeculativeGenerator(model, DraftModelProposer(model), draft_length=4, on_unsupported="error")
    for row in range(len(lengths)):
        for after in (0, 2, 5):
            arguments = {**inputs, "do_sample": True, "logits_processor": [Broken(row, max(lengths) + after)]}
            expected = outcome(model.generate, **arguments)
            assert expected[0][0] is RuntimeError
            assert outcome(spec.generate, **arguments) == expected


@pytest.mark.parametrize("proposer", ["head", "medusa", "hydra", "block", "draft", "draft tree", "early exit"])
def test_a_row_that_waits_for_one_that_ends(proposer):
    """Then it is alone in the next round, and has gained nothing in the last one for a head to read."""
    model, inputs, ends = tiny.model("llama"), tiny.prompts(9, 5), [5, 9, 11, 17, 23, 44]
    spec = SpeculativeGenerator(model, PROPOSERS[proposer](model, "llama"), draft_length=4, on_unsupported="error")
    for after in (3, 4, 7):

        def allowed(b, ids, length=9 + after):
            if b == 0 and len(ids) >= length and not any(token in ends for token in ids[9:].tolist()):
                raise RuntimeError("no tokens")
            return list(range(1, tiny.VOCAB))

        arguments = {**inputs, "do_sample": True, "prefix_allowed_tokens_fn": allowed, "eos_token_id": ends}
        for seed in (5, 7, 10, 11):
            expected = outcome(model.generate, seed=seed, **arguments)
            assert outcome(spec.generate, seed=seed, **arguments) == expected


@pytest.mark.parametrize("proposer", ["draft", "head", "medusa", "garbage"])
def test_rows_that_waited_go_on(proposer, monkeypatch):
    """Where a processor answers the second time: one that asks a server may."""
    model, inputs, held = tiny.model("llama"), tiny.prompts(7, 4, 9), []
    write = Transcript.write

    def noted(text, result, output=None):
        if result.hold is not None:
            held.append(result.hold)
        write(text, result, output)

    monkeypatch.setattr(Transcript, "write", noted)

    def allowed(b, ids):
        if watched and b == 1 and len(ids) == 14 and not held:
            raise RuntimeError("try again")
        return list(range(1, tiny.VOCAB))

    drafts = PROPOSERS[proposer](model, "llama")
    spec = SpeculativeGenerator(model, drafts, draft_length=4, on_unsupported="error")
    for seed in range(40):
        watched = False
        arguments = {**inputs, "do_sample": True, "prefix_allowed_tokens_fn": allowed, "seed": seed}
        expected = outcome(model.generate, **arguments)
        watched = True
        held.clear()
        found = outcome(spec.generate, **arguments)
        if held:
            assert found == expected
            return
    raise AssertionError("no row was ahead")


# The noise itself


def test_noise_is_what_multinomial_draws():
    probs = torch.rand(3, 50).softmax(-1)
    torch.manual_seed(1)
    plain = [torch.multinomial(probs, 1)[:, 0].tolist() for _ in range(5)]
    torch.manual_seed(1)
    with noise_of_call(3, 50, torch.device("cpu")) as noise:
        ahead = [noise.column(column) for column in (4, 0, 2, 1, 3)]
    assert [(probs / ahead[place]).argmax(-1).tolist() for place in (1, 3, 2, 4, 0)] == plain


@pytest.mark.parametrize("columns", [[0, 0, 0], [2, 0, 1], [0, 40, 3]], ids=["together", "ragged", "far apart"])
def test_columns_ahead_are_each_rows_own(columns):
    with noise_of_call(3, 7, torch.device("cpu")) as noise:
        ahead = noise.ahead(columns, 4)
        for b, column in enumerate(columns):
            for more in range(4):
                assert torch.equal(ahead[b, more], noise.column(column + more)[b])


def test_columns_that_are_not_kept_are_drawn_again(monkeypatch):
    monkeypatch.setattr("specdec.sampling.noise.KEPT_BYTES", 3 * 50 * 4 * 2)  # two columns
    torch.manual_seed(1)
    noise = Noise(3, 50, torch.device("cpu"))
    first = [noise.column(column).clone() for column in range(6)]
    assert len(noise._drawn) == 2
    for column in (0, 5, 3):
        assert torch.equal(noise.column(column), first[column])


def test_rows_at_different_columns():
    noise = Noise(3, 50, torch.device("cpu"))
    mixed = noise.at([2, 0, 2])
    for row, column in enumerate([2, 0, 2]):
        assert torch.equal(mixed[row], noise.column(column)[row])


def test_calls_in_other_threads_do_not_share_noise():
    """The same prompt four times at once: four texts, as from four calls in a row."""
    from concurrent.futures import ThreadPoolExecutor

    model, inputs = tiny.model("llama"), tiny.prompts(8)
    spec = SpeculativeGenerator(model, "ngram", draft_length=3, on_unsupported="error")
    torch.manual_seed(0)
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: spec.generate(**inputs, do_sample=True, max_new_tokens=NEW), range(16)))
    assert len({tuple(text[0].tolist()) for text in texts}) > 12
