"""`specdec bench`: plain decoding and proposers in turns, and what is said of it."""

import json

import pytest
import torch
from typer.testing import CliRunner

import specdec
from specdec import DraftModelProposer, HybridProposer, NgramProposer, Report, SpeculativeGenerator
from specdec.cli.app import app
from specdec.evaluation.bench import Bench, MethodResult, bench
from specdec.evaluation.measured import Measured
from specdec.evaluation.methods import PROPOSERS
from specdec.evaluation.timing import Runs
from specdec.proposers.factory import as_proposers
from tests.support import tiny

NEW = 12
PROMPTS = [tiny.prompts(9, seed=seed)["input_ids"][0] for seed in (1, 2)]


def test_the_table_by_hand():
    report = Report()
    report.record_round([3], [3], [1], seconds=0.1)
    plain = Measured("plain", "<plain>", 100, 8.0, 0.5, paces=((0.08, 0.08), (0.08, 0.08)))
    fast = Measured("ngram", "<ngram>", 100, 4.0, 0.25, report, ((0.04, 0.04), (0.01, 0.01)))
    methods = [MethodResult(one, one.speed_up(plain), same) for one, same in ((plain, 4), (fast, 3))]
    found = Bench(tuple(methods), 2, 2)
    head, first, ngram, note, _, verdict = [line.split("  ") for line in found.summary().splitlines()]
    assert [cell.strip() for cell in head if cell][-1] == "same text"
    cells = [cell.strip() for cell in ngram if cell]
    figures = ["25.0", "4.00x", "4.00 to 4.00", "2.00 to 8.00", "250", "40.0", "2.00", "3 of 4"]
    assert cells == ["ngram", *figures]
    assert [cell.strip() for cell in first if cell][2:5] == ["1.00x", "-", "1.00 to 1.00"]
    assert note == ["speed-up: geometric mean over prompts and turns"]
    assert verdict == ["recommended: ngram, 4.00x plain decoding's speed (4.00 to 4.00): the fastest"]
    listed = found.to_dict()["ways"][1]
    assert [listed["speed_up"], *listed["speed_up_interval"]] == pytest.approx([4, 4, 4])
    assert found.speed_ups["ngram"] == pytest.approx((2.0, 8.0))


@pytest.mark.slow
def test_the_chart_shows_the_speed_ups_of_the_table(llama):
    """The table once divided sums, and the chart averaged prompts."""
    plots = pytest.importorskip("specdec.evaluation.plots")
    pytest.importorskip("matplotlib").use("Agg")
    found = bench(llama, {"ngram": NgramProposer(), "itself": DraftModelProposer(llama)}, PROMPTS, repeats=2)
    table = [f"{method.speed_up.value:.2f}x" for method in found.methods[1:]]
    assert [line.split()[2] for line in found.summary().splitlines()[2:4]] == table
    for drawn in (found.speed_up_of, found.speed_ups):
        assert [text.get_text().split()[0] for text in plots.speed_ups(drawn).texts] == table


def test_each_answers_each_prompt_in_turn(llama, monkeypatch):
    """After a call each that is not counted; counts are those of calls by hand, and the text is plain decoding's."""
    order, answer, steps = [], Runs.answer, []

    def noted(self, prompt, **changed):
        order.append(
            (self.method.name, next(i for i, p in enumerate(PROMPTS) if torch.equal(p, prompt)), bool(changed))
        )
        answer(self, prompt, **changed)

    monkeypatch.setattr(Runs, "answer", noted)
    proposers = {"ngram": NgramProposer(), "itself": DraftModelProposer(llama)}
    options = {"max_new_tokens": NEW, "repeats": 2, "progress": lambda *step: steps.append(step)}
    found = bench(llama, proposers, PROMPTS, **options)
    there, back = ("plain", "ngram", "itself"), ("itself", "ngram", "plain")
    turns = ((0, True, there), (0, False, there), (1, False, back), (0, False, back), (1, False, there))
    assert order == [(name, i, warm) for i, warm, names in turns for name in names]
    assert steps == [(done, 15) for done in range(16)]
    assert (found.prompts, found.repeats, found.stopped) == (2, 2, False)
    for method in found.methods:
        assert (method.measured.tokens, method.same, len(method.speed_ups)) == (4 * NEW, 4, 2)
    assert found.methods[0].speed_ups == (1.0, 1.0)
    assert [len(turns) for turns in found.methods[1].measured.paces] == [2, 2]
    spec = SpeculativeGenerator(llama, NgramProposer())
    for prompt in PROMPTS:
        spec.generate(prompt[None], do_sample=False, max_new_tokens=NEW)
    assert found.methods[1].measured.report.num_calls == 4
    assert found.methods[1].measured.report.num_output_tokens == 2 * spec.report.num_output_tokens


@pytest.mark.parametrize(("at", "answered"), [(4, 1), (5, 1), (6, 2), (7, 2)])
def test_interrupted_it_gives_what_all_have_answered(llama, monkeypatch, at, answered):
    """Two ways, a call each that is not counted, and three prompts: the call numbered `at`, from 0, is interrupted."""
    calls, answer = [], Runs.answer

    def interrupted(self, prompt, **changed):
        calls.append(self)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        answer(self, prompt, **changed)

    monkeypatch.setattr(Runs, "answer", interrupted)
    found = bench(llama, {"ngram": NgramProposer()}, [*PROMPTS, PROMPTS[0]], max_new_tokens=NEW)
    assert found.stopped
    assert found.prompts == answered
    assert [method.measured.tokens for method in found.methods] == [answered * NEW] * 2


def test_interrupted_before_any_was_answered(llama, monkeypatch):
    def interrupted(self, prompt, **changed):
        raise KeyboardInterrupt

    monkeypatch.setattr(Runs, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(llama, {"ngram": NgramProposer()}, PROMPTS)


def test_what_two_proposers_draft_with_is_loaded_once(llama, tmp_path):
    tiny.model("llama", seed=1).save_pretrained(tmp_path)
    names = [f"ngram+draft:{tmp_path}", "ngram", f"draft:{tmp_path}"]
    made = as_proposers(names, llama)
    assert [*made] == names
    assert isinstance(made[names[0]], HybridProposer)
    assert made[names[0]].other is made[names[2]]


@pytest.fixture
def command(files, tmp_path):
    """Runs `bench` on a tiny model and a file of three prompts."""
    (tmp_path / "mine.txt").write_text("a b a b\nc d\ne f e f\n")
    model = str(files / "model")
    asked = ["bench", model, "ngram", f"draft:{model}", "--prompts", str(tmp_path / "mine.txt")]
    asked += ["--max-new-tokens", "8", "--dtype", "float32"]
    return lambda *more: CliRunner().invoke(app, [*asked, *more])


def test_the_table_and_a_chart(command, tmp_path):
    pytest.importorskip("matplotlib")
    result = command("--limit", "2", "--repeat", "2", "--chart", str(tmp_path / "speed.png"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(
        f"measured on 2 of 3 prompts of {tmp_path / 'mine.txt'} in 2 turns, up to 8 new tokens each"
    )
    assert [line.split()[0] for line in lines[3:6]] == ["plain", "ngram", "draft:model"]
    assert all(line.endswith("4 of 4") for line in lines[3:6])
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_json_alone_on_standard_output(command):
    result = command("--json", "--repeats", "2")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["prompts"], found["repeats"], found["max_new_tokens"]) == (3, 2, 8)
    assert [method["tokens"] for method in found["ways"]] == [6 * 8] * 3
    assert found["ways"][2]["report"]["num_calls"] == 6


def test_every_proposer_has_words_and_code():
    """Else tables name its class, and the code to copy has dots."""
    public = [getattr(specdec, name) for name in specdec.__all__]
    proposers = {kind for kind in public if isinstance(kind, type) and issubclass(kind, specdec.Proposer)}
    assert proposers - {specdec.Proposer, specdec.HybridProposer} == PROPOSERS.keys()
