"""What the doctor measures, and what it says: nothing that its own figures contradict."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from specdec.cli.app import app
from specdec.data.messages import first_questions, questions
from specdec.evaluation.code import imports, loading
from specdec.evaluation.diagnosis import Diagnosis
from specdec.evaluation.doctor import diagnose
from specdec.evaluation.measured import Measured
from specdec.evaluation.methods import CHAINS, TREE_SIZES, methods
from specdec.evaluation.timing import Runs
from specdec.evaluation.verdict import NEAR, NEAR_DRAFT
from specdec.heads.eagle3.export import save
from specdec.models.capability import Capability
from specdec.models.loading import load
from tests.support import eagle3, tiny


def test_prompts_are_read_as_regenerate_reads_them(tmp_path):
    (tmp_path / "mine.txt").write_text("one\n\ntwo\n")
    assert [asked.messages[-1]["content"] for asked in questions(tmp_path / "mine.txt")] == ["one", "two"]
    lines = [
        '{"prompt": "one"}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    assert [asked.messages[-1]["content"] for asked in questions(tmp_path / "mine.jsonl")] == ["one", "a"]


def test_the_first_questions_are_kept_and_all_are_counted(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(f'{{"prompt": "{i}"}}' for i in range(5)))
    kept, count = first_questions(file, 2)
    assert [asked.messages[0]["content"] for asked in kept] == ["0", "1"]
    assert count == 5
    assert len(first_questions(file, 9)[0]) == 5
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"promt": "c"}')
    with pytest.warns(UserWarning, match=r"1 of 3 prompts were left out:\n  .*line 3: expected"):
        assert first_questions(file, 1)[1] == 2


# What is said


def plain(seconds=10.0):
    return Measured("plain decoding", "model.generate()", 100, seconds, 0.5, paces=exactly(seconds))


def exactly(seconds):
    """Paces without any noise: two turns on one prompt, of 100 tokens."""
    return ((seconds / 100, seconds / 100),)


def drafting(name="as it comes", seconds=10.0, rounds=50, depth=3, accepted=1, draft=1.0, verify=6.0, passes=1):
    """100 tokens in so many rounds, each with a draft of `depth` tokens of which `accepted` were taken."""
    report = Report(num_draft_passes=passes)
    for _ in range(rounds):
        report.record_round([depth], [depth], [accepted], seconds=0.1, drafted_by=name)
    report.seconds |= {"draft": draft, "verify": verify}
    return Measured(name, f"<{name}>", 100, seconds, 0.25, report, exactly(seconds))


def diagnosis(*drafted, seconds=10.0, step=0.1, **more):
    return Diagnosis(plain(seconds), drafted or (drafting(),), step, **more)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        pytest.param(diagnosis(drafting(seconds=5.0)), "recommended: as it comes, 2.00x plain decoding's", id="it"),
        pytest.param(
            diagnosis(drafting(seconds=5.0), drafting("tree", 4.0)),
            "recommended: tree, 2.50x plain decoding's",
            id="a shape",
        ),
        pytest.param(
            diagnosis(drafting(seconds=4.1), drafting("tree", 4.0)),
            "recommended: as it comes, 2.44x plain decoding's speed (2.44 to 2.44): no other is more than 10% faster",
            id="as it comes where a shape is hardly faster",
        ),
        pytest.param(
            diagnosis(drafting(seconds=9.8)),
            "recommended: plain decoding, model.generate(): no draft is more than 3% faster",
            id="plain where drafts are hardly faster",
        ),
        pytest.param(
            diagnosis(drafting(seconds=160.0), drafting("tree", 20.0)),
            "recommended: plain decoding, model.generate(): no draft",
            id="plain where drafts are slow",
        ),
        pytest.param(
            diagnosis(drafting(seconds=5.0, accepted=0), drafting("tree", 4.0, depth=0, accepted=0)),
            "recommended: plain decoding, model.generate(): next to nothing of any draft was accepted\n"
            "drafted nothing on these prompts: tree\nnext to nothing of the drafts was accepted: as it comes",
            id="plain where nothing was accepted, however fast",
        ),
    ],
)
def test_one_way_is_advised_by_its_seconds(found, said):
    words = found.summary()
    assert said in words
    assert words.count("recommended: ") == 1


def test_a_way_beside_the_others():
    [line] = [
        line for line in diagnosis(drafting(seconds=5.0)).summary().splitlines() if line.startswith("as it comes  ")
    ]
    assert line.split()[3:] == ["250", "50.0", "2.00x", "2.00", "to", "2.00", "3.0", "2.00", "20.0", "120.0"]


@pytest.mark.parametrize(
    ("method", "means", "speed"),
    [
        # 50 rounds of 2 tokens in 7 seconds; were all 3 drafted tokens accepted, half of them
        pytest.param(
            drafting(depth=3, draft=1.0, verify=6.0), "if all its drafts were accepted", "1.54x", id="accepted"
        ),
        pytest.param(drafting(depth=1, draft=6.0, verify=1.0), "if drafting were free", "2.50x", id="drafting"),
        # 50 passes of 0.1 seconds, as plain decoding's
        pytest.param(
            drafting(depth=1, draft=0.0, verify=8.0),
            "if its target passes were as fast as plain decoding's",
            "1.43x",
            id="passes",
        ),
    ],
)
def test_what_would_help_most_comes_first(method, means, speed):
    found = diagnosis(method)
    assert found.limits()[0].means == means
    lines = found.summary().splitlines()
    assert f"  {means}: {speed}" == next(line for line in lines if line.startswith("  if "))
    assert lines[-1].startswith("The first limits the speed-up most. ")


@pytest.mark.parametrize(
    ("found", "cure"),
    [
        (
            diagnosis(),
            "More is accepted with an EAGLE-3 head trained on text like yours, or a larger draft model, or n-",
        ),
        (
            diagnosis(uses_lookup=True),
            "More is accepted with an EAGLE-3 head trained on text like yours, or a larger draft model.",
        ),
        (diagnosis(uncovered=0.2), "Each token outside of the draft's vocabulary ends a draft"),
        (diagnosis(acceptance=(0.4,), elsewhere=0.8), "Your prompts differ from the draft's training data"),
        (diagnosis(drafting(passes=0), uncovered=0.2, uses_lookup=True), "More is accepted"),
        (diagnosis(drafting(depth=1, draft=6.0, verify=1.0)), "Faster: a smaller draft model"),
        (diagnosis(drafting(depth=1, draft=6.0, verify=1.0), has_head=True), "Faster: a head with a smaller"),
        (
            diagnosis(drafting(depth=1, draft=0.0, verify=8.0)),
            "One of its target passes takes 1.60 times as long as plain decoding's",
        ),
    ],
)
def test_one_cure_is_named(found, cure):
    words = found.summary()
    assert f"The first limits the speed-up most. {cure}" in words
    cures = ("More is accepted", "Each token outside", "Your prompts differ", "Faster: ", "One of its target passes")
    assert sum(words.count(start) for start in cures) == 1


def test_facts_are_said_where_they_were_measured():
    words = diagnosis(acceptance=(0.4, 0.3), elsewhere=0.8, uncovered=0.2).summary()
    assert "acceptance rate of chains by position: 0.40 0.30" in words
    assert "acceptance rate at the first position on specdec's own prompts: 0.80" in words
    assert "20% of the target's tokens are not in the draft's vocabulary" in words
    words = diagnosis().summary()
    assert "by position" not in words
    assert "vocabulary" not in words


def test_where_nothing_can_make_drafts_pay_it_says_so():
    words = diagnosis(drafting(seconds=50.0)).summary()
    assert words.endswith("None of these would make drafting faster than plain decoding here.")


def test_where_nothing_was_drafted_nothing_is_said_of_drafts():
    words = diagnosis(drafting(depth=0, accepted=0)).summary()
    assert words.endswith("drafted nothing on these prompts: as it comes")
    assert "limits" not in words


def test_what_would_spare_nothing_is_not_called_a_limit():
    found = diagnosis(
        drafting(depth=1, accepted=1, draft=0.0, verify=5.0)
    )  # all accepted, for nothing, in plain passes
    assert found.summary().endswith("Neither its drafts nor its target passes slow as it comes down.")


times = st.floats(0.01, 50.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), times, times, times), min_size=1, max_size=4), times, times)
def test_nothing_it_says_contradicts_its_figures(shapes, alone, step):
    """Whatever was measured: the advice is the fastest but for the clock, and no best case is worse than the case."""
    ways_taken = [
        drafting(f"way {i}", draft + verify + 5.0 + rest, 50, depth, min(depth, 1), draft, verify)
        for i, (depth, draft, verify, rest) in enumerate(shapes)
    ]
    found = diagnosis(*ways_taken, seconds=alone, step=step)
    words = found.summary()
    fastest = min(method.pace for method in (found.plain, *ways_taken))
    assert found.best.pace <= max(NEAR, NEAR_DRAFT) * fastest * (1 + 1e-9)
    assert f"recommended: {found.best.name}, " in words
    assert found.best is found.plain or found.best.useful
    best = found.best_draft
    assert all(0 < limit.seconds <= best.seconds * (1 + 1e-9) for limit in found.limits())
    speeds = [float(speed) for speed in re.findall(r"^  if .*: ([0-9.]+)x$", words, re.MULTILINE)]
    assert len(speeds) == sum(limit.seconds < 0.99 * best.seconds for limit in found.limits())
    assert speeds == sorted(speeds, reverse=True)
    pays = found.plain.pace * 100 / found.limits()[0].seconds >= 1
    assert ("would make drafting faster" in words) == bool(speeds and not pays)


# What is measured


def names_of(target, proposer):
    return [method.name for method in methods(target, proposer)]


CHAIN_NAMES = [f"chain of {length}" for length in CHAINS]
TREE_NAMES = [f"tree of {size} nodes" for size in TREE_SIZES]


def test_the_ways_of_each_proposer():
    target, head = tiny.model("llama"), eagle3.head()
    usual = ["plain decoding", "as it comes"]
    assert names_of(target, "ngram") == names_of(target, tiny.Garbage()) == [*usual, *CHAIN_NAMES]
    assert names_of(target, target) == [*usual, *CHAIN_NAMES, *TREE_NAMES]
    alone = ["n-grams alone", "the head alone"]
    assert names_of(target, HybridProposer(Eagle3Proposer(head))) == [*usual, *alone, *CHAIN_NAMES, *TREE_NAMES]
    assert names_of(target, HybridProposer(tiny.Garbage()))[3] == "Garbage alone"


def test_a_target_that_takes_no_trees_is_offered_none(monkeypatch):
    target = tiny.model("llama")
    chains_only = Capability("own", "as if its attention took no masks")
    for module in ("evaluation.methods", "engine.generator"):
        monkeypatch.setattr(f"specdec.{module}.capability", lambda model: chains_only)
    assert names_of(target, Eagle3Proposer(eagle3.head())) == ["plain decoding", "as it comes", *CHAIN_NAMES]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda target: "ngram", id="by name"),
        pytest.param(lambda target: NgramProposer(), id="n-grams"),
        pytest.param(lambda target: DraftModelProposer(target), id="a draft model"),
        pytest.param(lambda target: DraftModelProposer(target, tree=DynamicTree(size=40)), id="a draft model's trees"),
        pytest.param(lambda target: Eagle3Proposer(eagle3.head()), id="a head"),
        pytest.param(lambda target: HybridProposer(Eagle3Proposer(eagle3.head())), id="a hybrid"),
    ],
)
def test_the_code_of_a_way_gives_that_way(make):
    target = tiny.model("llama")
    proposer = make(target)
    for method in methods(target, proposer)[1:]:
        names = {"model": target, "proposer": proposer}
        exec(f"{imports(method.code)}\nspec = {method.code}", names)
        made = names["spec"]
        assert type(made.proposer) is type(method.spec.proposer)
        assert made.draft_length == method.spec.draft_length
        for shape in ("tree", "branching"):
            assert getattr(made.proposer, shape, None) == getattr(method.spec.proposer, shape, None)


@pytest.fixture
def on_disk(tmp_path, files):
    """Sources of proposers as a user names them: a draft model, and a head in a folder."""
    save(eagle3.head(tap_ids=(1, 2, 3)), tmp_path / "head", "sglang")
    return {"DRAFT": str(files / "model"), "HEAD": str(tmp_path / "head")}


@pytest.mark.parametrize("name", ["draft:DRAFT", "ngram+draft:DRAFT", "eagle3:HEAD", "ngram+eagle3:HEAD", "exit:2"])
def test_the_printed_lines_run_as_they_are(name, files, on_disk):
    """With the paths that were given: nothing is left to fill in, and the target is loaded as well."""
    for source, path in on_disk.items():
        name = name.replace(source, path)
    target = load(str(files / "model"))
    for method in methods(target, name)[1:]:
        found = Diagnosis(plain(100.0), (drafting(),), 0.1, loading=loading(target))
        best = replace(found.drafting[0], code=method.code)
        lines = replace(found, drafting=(best,)).summary().splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("from specdec import"))
        names: dict[str, Any] = {}
        exec("\n".join(lines[start : lines.index("", start)]), names)
        made, spec = names["spec"], method.spec
        assert type(made.proposer) is type(spec.proposer)
        assert made.draft_length == spec.draft_length
        assert made.model.config._name_or_path == str(files / "model")
        for shape in ("tree", "branching"):
            assert getattr(made.proposer, shape, None) == getattr(spec.proposer, shape, None)


def test_the_proposer_is_left_as_it_was():
    target, shape = tiny.model("llama"), DynamicTree(size=40)
    proposer = DraftModelProposer(target, tree=shape)
    diagnose(target, proposer, [tiny.prompts(9)["input_ids"][0]], max_new_tokens=8)
    assert (proposer.tree, proposer.branching) == (shape, None)


def by_hand(spec, prompts):
    for prompt in prompts:
        spec.generate(prompt[None], do_sample=False, max_new_tokens=24)
    return spec.report


@pytest.mark.slow
def test_every_way_is_measured_on_every_prompt():
    """Counts are those of calls by hand; the calls before them are not counted."""
    target, prompts = tiny.model("llama"), [tiny.prompts(8, seed=seed)["input_ids"][0] for seed in (50, 51)]
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for weight in draft.parameters():  # so that some drafts are right
            weight += 0.1 * weight.std() * torch.randn_like(weight)
    found = diagnose(target, draft, prompts, usual=prompts[1:], max_new_tokens=24)
    assert found.plain.tokens == 2 * 24
    assert found.plain.seconds > found.step * 2 * 23 > 0
    by_name = {method.name: method for method in found.drafting}
    assert [*by_name] == ["as it comes", *CHAIN_NAMES, *TREE_NAMES]
    for method in found.drafting:
        assert method.tokens == 2 * 24
        assert method.report.num_calls == 2
        assert method.seconds > method.report.round_seconds > 0

    def report(asked, length, shape=None):
        proposer = DraftModelProposer(draft, tree=shape)
        return by_hand(SpeculativeGenerator(target, proposer, draft_length=length), asked)

    for length in CHAINS:
        right = report(prompts, length).num_accepted_tokens_per_pos
        assert by_name[f"chain of {length}"].report.num_accepted_tokens_per_pos == right
    assert found.acceptance == _known(report(prompts, CHAINS[-1]))
    assert found.elsewhere == _known(report(prompts[1:], CHAINS[-1]))[0]
    for size in TREE_SIZES:
        right = report(prompts, 6, DynamicTree(6, DynamicTree().top_k, size)).num_draft_tokens
        assert by_name[f"tree of {size} nodes"].report.num_draft_tokens == right
    assert not found.has_head
    assert not found.uses_lookup


def _known(report):
    return tuple(rate for rate in report.conditional_acceptance_rate_per_pos if rate == rate)


def test_ways_take_turns_after_a_call_each(monkeypatch):
    target, order = tiny.model("llama"), []
    asked = [tiny.prompts(9, seed=i)["input_ids"][0] for i in range(2)]

    def noted(self, prompt, **changed):
        order.append((self.method.name, next(i for i, p in enumerate(asked) if torch.equal(p, prompt)), bool(changed)))
        answer(self, prompt, **changed)

    answer = Runs.answer
    monkeypatch.setattr(Runs, "answer", noted)
    diagnose(target, "ngram", asked, max_new_tokens=8)
    names = ["plain decoding", "as it comes", *CHAIN_NAMES]
    turns = ((0, True, names), (0, False, names), (1, False, names[::-1]))
    assert order == [(name, i, warm) for i, warm, listed in turns for name in listed]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
def test_all_ways_write_the_same_text(sampling, monkeypatch):
    """What they took is compared by the token; at T > 0 by the same seed, and the user's own stays where it was."""
    made, begin = [], Runs.__init__

    def noted(self, *args):
        begin(self, *args)
        made.append(self)

    monkeypatch.setattr(Runs, "__init__", noted)
    target, state = tiny.model("llama"), torch.get_rng_state()
    diagnose(target, copy.deepcopy(target), [tiny.prompts(9)["input_ids"][0]], max_new_tokens=16, **sampling)
    assert torch.equal(torch.get_rng_state(), state)
    texts = {tuple(run.calls[0].texts[0]) for run in made if run.calls}
    assert len(texts) == 1


def test_progress_goes_from_nothing_to_all():
    target, steps = tiny.model("llama"), []
    prompts = [tiny.prompts(9, seed=i)["input_ids"][0] for i in range(3)]
    diagnose(target, target, prompts, usual=prompts[:2], max_new_tokens=8, progress=lambda *step: steps.append(step))
    total = 8 * (1 + 3) + 2  # plain, as it comes, three chains and three trees; ours
    assert steps == [(done, total) for done in range(total + 1)]


def test_a_text_that_ends_at_once():
    target = copy.deepcopy(tiny.model("llama"))
    prompt = tiny.prompts(9)["input_ids"]
    end = int(target.generate(prompt, do_sample=False, max_new_tokens=1)[0, -1])
    found = diagnose(target, "ngram", [prompt[0]], max_new_tokens=8, eos_token_id=end, pad_token_id=0)
    assert found.plain.tokens == 1
    assert "drafted nothing on these prompts" in found.summary()


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `doctor` on a tiny model and a file of five prompts."""
    inner = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate("_abcde")}, unk_token="_"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE)
    monkeypatch.setattr("specdec.cli.doctor.load", lambda target, dtype: (tiny.model("llama"), tokenizer))
    (tmp_path / "mine.txt").write_text("abcab\n" * 5)
    asked = ["doctor", "TARGET", "--prompts", str(tmp_path / "mine.txt"), "--max-new-tokens", "8"]
    return lambda *more: CliRunner().invoke(app, [*asked, *more])


def test_the_command_measures_the_first_prompts_and_says_so(command, monkeypatch):
    lengths = []

    def counted(target, proposer, prompts, **options):
        assert proposer == "auto"  # none was named
        lengths.append(len(prompts))
        return diagnose(target, proposer, prompts, **options)

    monkeypatch.setattr("specdec.evaluation.doctor.diagnose", counted)
    limited, whole = command("--limit", "2"), command()
    assert limited.exit_code == whole.exit_code == 0, limited.output
    assert lengths == [2, 5]
    assert limited.stdout.startswith("measured on 2 of 5 prompts of ")
    assert whole.stdout.startswith("measured on 5 prompts of ")
    assert command("--limit", "0").exit_code == 2


def test_prompts_that_the_template_refuses_are_named(command, monkeypatch):
    def refuse(messages, tokenizer):
        asked.append(messages)
        if len(asked) != 7:
            raise ValueError("System role not supported")
        return [1, 2, 3]

    monkeypatch.setattr("specdec.data.conversations.encode_prompt", refuse)
    asked: list[object] = []
    result = command()
    assert result.exit_code == 2
    assert re.search(r"none of 5 prompts can be used:\s+\S+, prompt 1: System role not supported", result.output)
    assert isinstance(result.exception, SystemExit)
    with pytest.warns(UserWarning, match=r"4 of 5 prompts were left out:\n  .*prompt 1: System role.*\n.*prompt 3: "):
        assert command().stdout.startswith("measured on 1 of 5 prompts of ")


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
