"""What the doctor measures, simulates and says."""

import copy
import re

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from specdec import (
    DraftModelProposer,
    DynamicTree,
    Eagle3Proposer,
    HybridProposer,
    NgramProposer,
    Report,
    SpeculativeGenerator,
)
from specdec.capability import Capability
from specdec.cli import app
from specdec.doctor import PROBED, Diagnosis, MeasuredTree, diagnose, first_questions, questions
from tests import eagle3, tiny

FLAT = {1: 0.1, 2: 0.1, 4: 0.1, 8: 0.1, 16: 0.1}
STEEP = {1: 0.1, 2: 0.2, 4: 0.4, 8: 0.8, 16: 1.6}


def test_prompts_are_read_as_regenerate_reads_them(tmp_path):
    (tmp_path / "mine.txt").write_text("one\n\ntwo\n")
    assert [messages[-1]["content"] for messages in questions(tmp_path / "mine.txt")] == ["one", "two"]
    lines = [
        '{"prompt": "one"}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    assert [messages[-1]["content"] for messages in questions(tmp_path / "mine.jsonl")] == ["one", "a"]


def test_the_first_questions_are_kept_and_all_are_counted(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(f'{{"prompt": "{i}"}}' for i in range(5)))
    kept, count = first_questions(file, 2)
    assert [messages[0]["content"] for messages in kept] == ["0", "1"]
    assert count == 5
    assert len(first_questions(file, 9)[0]) == 5
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"promt": "c"}')
    with pytest.raises(ValueError, match="line 3"):
        first_questions(file, 1)


def diagnosis(acceptance=(0.8, 0.8), draft=0.0, target=FLAT, uncovered=0.0, elsewhere=None, **more):
    return Diagnosis(acceptance, draft, target, uncovered, elsewhere, 1.0, **more)


def tree(tokens, nodes, seconds=0.0, size=8):
    return MeasuredTree(DynamicTree(depth=2, top_k=4, size=size), tokens, nodes, seconds)


@pytest.mark.parametrize(
    ("found", "length", "speed"),
    [
        (diagnosis(), 0, 1.0),
        (diagnosis(), 1, 1.8),
        (diagnosis(), 2, 1 + 0.8 + 0.64),
        (diagnosis(), 3, 1 + 0.8 + 0.64 + 0.512),
        (diagnosis(draft=0.05), 2, 2.44 / 2),
        (diagnosis(target=STEEP), 2, 2.44 / 3),
        (diagnosis(acceptance=()), 4, 1.0),
    ],
)
def test_simulated_speed(found, length, speed):
    assert found.speedup(length) == pytest.approx(speed)


@pytest.mark.parametrize(
    ("found", "measured", "speed"),
    [
        pytest.param(diagnosis(), tree(2.0, 7), 2.0, id="for nothing"),
        pytest.param(diagnosis(draft=9.0), tree(2.0, 7, 0.1), 1.0, id="its own seconds, not the chains'"),
        pytest.param(diagnosis(target=STEEP), tree(2.0, 3), 2 / 4, id="a pass over its nodes and the root"),
        pytest.param(diagnosis(target=STEEP), tree(2.0, 1.5), 2 / 2.5, id="between the sizes"),
        pytest.param(diagnosis(target=STEEP), tree(2.0, 31), 2 / 32, id="beyond the largest size"),
    ],
)
def test_simulated_speed_of_a_tree(found, measured, speed):
    assert found.speedup(measured) == pytest.approx(speed)


def test_rounds_without_a_draft_cost_and_bring_what_plain_ones_do():
    found = diagnosis(target=STEEP, drafted=0.5)  # a chain of one: 1.8 tokens in twice the time, every second round
    assert found.speedup(1) == pytest.approx((1.8 + 1) / (2 + 1))
    assert found.speedup(1, flat=True) == pytest.approx(1.4)


def test_a_trees_limits():
    found, measured = diagnosis(target=STEEP), tree(2.0, 3, 0.1)
    assert found.speedup(measured) == pytest.approx(2 / 5)
    assert found.speedup(measured, free=True) == pytest.approx(2 / 4)
    assert found.speedup(measured, flat=True) == pytest.approx(2 / 2)
    assert found.speedup(measured, sure=True) == pytest.approx(3 / 5)  # it is 2 deep
    assert found.speedup(tree(1.5, 1, 0.1), sure=True) == pytest.approx(2 / 3)  # it had no second node


SMALL, LARGE = tree(2.5, 7), tree(3.0, 23, size=24)
FREE = dict.fromkeys((1, 64), 0.1)  # passes over any number of tokens cost the same
DEAR = {1: 0.1, 8: 0.1, 24: 0.2}  # LARGE costs twice as much as SMALL
MEAGRE = (0.5, 0.0)  # chains: 1.5 tokens a round
OPTION = "the tree: Eagle3Proposer(HEAD, tree=DynamicTree(depth=2, top_k=4, size="


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        pytest.param(
            diagnosis(MEAGRE, draft=1e-6, target=FREE, trees=(SMALL, LARGE)),
            {
                "best chain": "1 tokens: 1.50x by these figures (1.50 tokens a round)",
                "best tree": "24 nodes: 3.00x by these figures (3.00 tokens a round)",
                "fastest by these figures": OPTION + "24))",
            },
            id="the larger tree",
        ),
        pytest.param(
            diagnosis(MEAGRE, target=DEAR, trees=(SMALL, LARGE)),
            {
                "best tree": "8 nodes: 2.50x by these figures (2.50 tokens a round)",
                "fastest by these figures": OPTION + "8))",
            },
            id="the smaller tree, where verifying costs",
        ),
        pytest.param(
            diagnosis(MEAGRE, draft=0.02, trees=(tree(1.5, 7, 0.05),)),
            {
                "best chain": "1 tokens: 1.25x",
                "best tree": "8 nodes: 1.00x",
                "these figures": "the chain: draft_length=1",
            },
            id="a chain of what drafts chains",
        ),
        pytest.param(
            diagnosis(MEAGRE, draft=0.02, trees=(tree(1.5, 7, 0.05),), drafts_trees=True),
            {"fastest by these figures": "the chain: Eagle3Proposer(HEAD, branching=(1,) * 1)"},
            id="a chain of what drafts trees",
        ),
        pytest.param(
            diagnosis((0.1,), draft=0.2, trees=(tree(1.5, 7, 0.1),)),
            {
                "best chain": "0 tokens: 1.00x",
                "best tree": "8 nodes: 0.75x",
                "fastest by these figures": "plain decoding: draft_length=0",
                "Drafting does not pay here:": "neither a chain nor a tree is faster than plain decoding.",
            },
            id="nothing",
        ),
        pytest.param(
            diagnosis(MEAGRE, draft=0.01, trees=(tree(2.5, 7, 0.025),)),
            {"drafting for nothing would bring": "2.50x instead of 2.00x"},
            id="what limits a tree",
        ),
        pytest.param(
            diagnosis(MEAGRE, target=FREE, drafted=0.4),
            {
                "rounds with a draft": "40%",
                "best chain": "1 tokens: 1.20x by these figures (1.20 tokens a round)",
            },
            id="n-grams that often find nothing",
        ),
        pytest.param(
            Diagnosis(MEAGRE, 0.0, FREE, 0.0, None, 1.45),
            {"fastest by these figures": "the automatic length: leave it as it is"},
            id="what is there already",
        ),
        pytest.param(diagnosis(alone="the head alone"), {"measured": "the head alone"}, id="part of a hybrid"),
    ],
)
def test_it_says_which_draft_is_best(found, lines):
    said = re.sub(" +", " ", found.in_words())
    for name, value in lines.items():
        assert f"{name} {value}" in said


def test_of_trees_it_says_nothing_where_there_are_none():
    assert "tree" not in diagnosis((0.9,), draft=0.01).in_words()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (diagnosis((0.3, 0.3)), "limits most: better drafts"),
        (diagnosis((1.0, 1.0), draft=0.09), "limits most: drafting for nothing"),
        (diagnosis((1.0, 1.0), target=STEEP), "limits most: verification at the price of one token"),
        (diagnosis((0.1,), draft=0.2), "Drafting does not pay here"),
        (diagnosis(draft=0.05), "The draft is slow beside its target"),
        (diagnosis(uncovered=0.2), "20% of what the target writes is not in the draft's vocabulary"),
        (diagnosis((0.4,), elsewhere=0.8), "does not know this kind of text, or the prompts miss the chat template"),
    ],
)
def test_it_says_what_limits(found, said):
    assert said in found.in_words()


def test_best_length():
    assert diagnosis((0.9, 0.1)).best_length >= 2
    assert diagnosis((0.9, 0.01), draft=0.02).best_length == 1
    assert diagnosis((0.1,), draft=0.2).best_length == 0


def test_it_measures():
    target = tiny.model("llama")
    prompts = [tiny.prompts(9, seed=i)["input_ids"][0] for i in range(2)]
    found = diagnose(target, target, prompts, usual=prompts[:1], max_new_tokens=16)
    assert found.acceptance[0] == 1.0
    assert found.elsewhere == 1.0
    assert found.draft_pass > 0
    assert set(found.target_pass) == {1, 2, 4, 8, 16, 32, 64}
    assert [t.shape.size for t in found.trees] == [8, 24, 60]
    assert not found.drafts_trees
    ngrams = diagnose(target, "ngram", prompts, max_new_tokens=16)
    assert ngrams.draft_pass == 0
    assert ngrams.trees == ()


@pytest.fixture(scope="module")
def unseen():
    """A head, its target, and prompts that it was not trained on: its first choice is wrong at times, not all are."""
    head, target, _ = eagle3.trained()
    return head, target, [tiny.prompts(8, seed=seed)["input_ids"][0] for seed in (50, 51)]


def report_of(target, proposer, length, prompts) -> Report:
    spec = SpeculativeGenerator(target, proposer, draft_length=length)
    for prompt in prompts:
        spec.generate(prompt[None], do_sample=False, max_new_tokens=24)
    return spec.report


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda head: Eagle3Proposer(head), id="a head"),
        pytest.param(lambda head: Eagle3Proposer(head, branching=(4, 2)), id="a head with a fixed tree"),
        pytest.param(lambda head: HybridProposer(Eagle3Proposer(head)), id="a head beside n-grams"),
    ],
)
def test_acceptance_is_that_of_chains_and_trees_have_their_own(unseen, make):
    head, target, prompts = unseen
    found = diagnose(target, make(head), prompts, usual=prompts[1:], max_new_tokens=24)
    chain = report_of(target, Eagle3Proposer(head, branching=(1,) * PROBED), PROBED, prompts)
    assert chain.num_draft_tokens_per_pos[PROBED - 1] > 0
    assert found.acceptance == tuple(rate for rate in chain.conditional_acceptance_rate_per_pos if rate == rate)
    whole = report_of(target, Eagle3Proposer(head), PROBED, prompts)
    assert whole.conditional_acceptance_rate_per_pos[0] > found.acceptance[0]  # a tree accepts more: not what is meant
    usual = report_of(target, Eagle3Proposer(head, branching=(1,) * PROBED), PROBED, prompts[1:])
    assert found.elsewhere == usual.conditional_acceptance_rate_per_pos[0]
    assert found.drafts_trees
    assert [measured.shape.size for measured in found.trees] == [8, 24, 60]
    for measured in found.trees:
        by_hand = report_of(target, Eagle3Proposer(head, tree=measured.shape), measured.shape.depth, prompts)
        assert measured.tokens == by_hand.mean_acceptance_length
        assert measured.nodes == by_hand.num_draft_tokens / by_hand.num_drafts
        assert 1 < measured.nodes < measured.shape.size
        assert measured.seconds > 0
    assert found.trees[2].nodes > 2 * found.trees[1].nodes > 4 * found.trees[0].nodes


@pytest.mark.parametrize("shape", [None, DynamicTree(size=40)], ids=["chains", "trees"])
def test_a_draft_models_chains_and_trees_are_measured_whatever_it_drafts(shape):
    target = tiny.model("llama")
    draft, prompts = copy.deepcopy(target), [tiny.prompts(9, seed=i)["input_ids"][0] for i in range(2)]
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():  # so that some drafts are right
            weight += 0.1 * weight.std() * torch.randn_like(weight)
    proposer = DraftModelProposer(draft, tree=shape)
    found = diagnose(target, proposer, prompts, max_new_tokens=24)
    chain = report_of(target, DraftModelProposer(draft), PROBED, prompts)
    assert found.acceptance == tuple(rate for rate in chain.conditional_acceptance_rate_per_pos if rate == rate)
    for measured in found.trees:
        by_hand = report_of(target, DraftModelProposer(draft, tree=measured.shape), measured.shape.depth, prompts)
        assert measured.tokens == by_hand.mean_acceptance_length
        assert by_hand.conditional_acceptance_rate_per_pos[0] > found.acceptance[0]
    assert found.drafts_trees == (shape is not None)
    assert (proposer.tree, proposer.branching) == (shape, None)  # as it was


def test_a_target_that_takes_no_trees_is_offered_none(monkeypatch):
    target, prompt = tiny.model("llama"), tiny.prompts(9)["input_ids"][0]
    chains_only = Capability("own", "as if its attention took no masks")
    for module in ("doctor", "generator"):
        monkeypatch.setattr(f"specdec.{module}.capability", lambda model: chains_only)
    found = diagnose(target, Eagle3Proposer(eagle3.head()), [prompt], max_new_tokens=16)
    assert found.trees == ()
    assert not found.drafts_trees  # draft_length=3 is a chain of 3 there


def test_a_tree_of_no_drafts_is_none():
    assert MeasuredTree.of(DynamicTree(), Report()) is None


def test_of_a_hybrid_it_says_what_was_measured():
    target, prompt = tiny.model("llama"), tiny.prompts(9)["input_ids"][0]
    proposers = {
        "the head alone, n-grams aside": HybridProposer(Eagle3Proposer(eagle3.head())),
        "the draft model alone, n-grams aside": HybridProposer(DraftModelProposer(target)),
        "Garbage alone, n-grams aside": HybridProposer(tiny.Garbage()),
        "": NgramProposer(),
    }
    for words, proposer in proposers.items():
        assert diagnose(target, proposer, [prompt], max_new_tokens=8).alone == words


def test_the_advice_names_the_proposer_that_was_measured():
    class Ours(DraftModelProposer):
        pass

    target, prompt = tiny.model("llama"), tiny.prompts(9)["input_ids"][0]
    assert diagnose(target, target, [prompt], max_new_tokens=8).maker == "DraftModelProposer(DRAFT, "
    assert diagnose(target, Eagle3Proposer(eagle3.head()), [prompt], max_new_tokens=8).maker == "Eagle3Proposer(HEAD, "
    assert diagnose(target, Ours(target), [prompt], max_new_tokens=8).maker == "Ours(..., "


def test_progress_goes_from_nothing_to_all():
    target, steps = tiny.model("llama"), []
    prompts = [tiny.prompts(9, seed=i)["input_ids"][0] for i in range(3)]
    diagnose(target, target, prompts, usual=prompts[:2], max_new_tokens=8, progress=lambda *step: steps.append(step))
    total = 5 * 3 + 2 + 1  # chains, automatic and three trees; ours; the target's passes
    assert steps == [(done, total) for done in range(total + 1)]


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `doctor` with n-grams on a tiny model and a file of five prompts."""
    inner = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate("_abcde")}, unk_token="_"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE)
    monkeypatch.setattr("specdec.cli._load", lambda target: (tiny.model("llama"), tokenizer))
    (tmp_path / "mine.txt").write_text("abcab\n" * 5)
    asked = ["doctor", "TARGET", "ngram", "--prompts", str(tmp_path / "mine.txt"), "--max-new-tokens", "8"]
    return lambda *more: CliRunner().invoke(app, [*asked, *more])


def test_the_command_measures_the_first_prompts_and_says_so(command, monkeypatch):
    lengths = []

    def counted(target, proposer, prompts, **options):
        lengths.append(len(prompts))
        return diagnose(target, proposer, prompts, **options)

    monkeypatch.setattr("specdec.doctor.diagnose", counted)
    limited, whole = command("--limit", "2"), command()
    assert limited.exit_code == whole.exit_code == 0, limited.output
    assert lengths == [2, 5]
    assert limited.stdout.startswith("measured on 2 of 5 prompts of ")
    assert whole.stdout.startswith("measured on 5 prompts of ")
    assert command("--limit", "0").exit_code == 2


def test_a_message_that_the_template_refuses_ends_the_command_with_its_reason(command, monkeypatch):
    def refuse(messages, tokenizer):
        raise ValueError("System role not supported")

    monkeypatch.setattr("specdec.data.conversations.encode_prompt", refuse)
    result = command()
    assert result.exit_code == 2
    assert "error: System role not supported" in result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    "make",
    [lambda target: DraftModelProposer(target, vocab=20), lambda target: Eagle3Proposer(eagle3.head())],
)
def test_it_sees_what_the_vocabulary_lacks(make):
    target, prompt = tiny.model("llama"), tiny.prompts(9)["input_ids"]
    proposer = make(target)
    text = target.generate(prompt, do_sample=False, max_new_tokens=24)[0, 9:]
    found = diagnose(target, proposer, [prompt[0]], max_new_tokens=24)
    lacking = [token for token in text.tolist() if token not in proposer.known_tokens().tolist()]
    assert found.uncovered == pytest.approx(len(lacking) / len(text))
    assert torch.is_tensor(proposer.known_tokens())
