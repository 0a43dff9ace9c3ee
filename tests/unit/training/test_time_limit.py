"""`--max-minutes`: updates, evaluations and checkpoints end before it, by a clock that the tests hold."""

import json
import logging
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import Trainer

from specdec.data.batched_generation import BatchedGenerator, Request
from specdec.engine.generator import SpeculativeGenerator
from specdec.training import evaluation_callback
from specdec.training.checkpoints import checkpoints
from specdec.training.evaluate import Evaluation, evaluate
from specdec.training.objectives.eagle3 import Eagle3Objective
from specdec.training.recipe import Recipe
from specdec.training.run import train
from specdec.training.run_folder import RunFolder
from specdec.training.time_limit import TimedSteps, TimeLimit
from specdec.training.trainer import HeadTrainer
from tests.support import tiny
from tests.support.training import losses, same_heads

UPDATE, DECODING, PASS, SAVE = 10.0, 7.0, 2.0, 5.0  # seconds of an update, a decoded text, a pass, a checkpoint


class Clock:
    def __init__(self):
        self.now, self.done = 0.0, []

    def __call__(self):
        return self.now

    def slow(self, monkeypatch, owner, name, seconds, what):
        """Let each call of a function take so many seconds of this clock."""
        function = getattr(owner, name)

        def slowed(*arguments, **options):
            result = function(*arguments, **options)
            self.now += min(seconds, options.get("max_time", seconds))
            self.done.append(what)
            return result

        monkeypatch.setattr(owner, name, slowed)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    made.slow(monkeypatch, HeadTrainer, "training_step", UPDATE, "update")
    made.slow(monkeypatch, SpeculativeGenerator, "generate", DECODING, "decoding")
    made.slow(monkeypatch, Trainer, "_save_checkpoint", SAVE, "save")
    forward = Eagle3Objective.forward

    def slow_pass(self, *arguments, **options):
        if not torch.is_grad_enabled():
            made.now += PASS
            made.done.append("pass")
        return forward(self, *arguments, **options)

    monkeypatch.setattr(Eagle3Objective, "forward", slow_pass)
    monkeypatch.setattr(evaluation_callback, "evaluate", partial(evaluate, max_new_tokens=4))
    return made


@pytest.fixture
def recipe(files, tmp_path):
    """12 updates, of which every fourth is evaluated by decoding four texts three times."""
    return Recipe(
        str(files / "model"),
        files / "data.jsonl",
        tmp_path / "out",
        draft_vocab=30,
        steps=3,
        length=17,
        batch_size=2,
        epochs=3,
        held_out=4,
        save_every=2,
        evaluate_every=4,
        device="cpu",
    )


def log(recipe):
    return json.loads(RunFolder(recipe.out).evaluation.read_text())["log"]


def decoded(recipe):
    """Updates after which texts were decoded, and how many texts."""
    return [(entry["step"], entry["decoder_texts"]) for entry in log(recipe) if "decoder_texts" in entry]


@pytest.mark.parametrize("seconds", [100, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (45, 181))])
def test_every_part_of_a_run_ends_before_the_limit(recipe, clock, seconds):
    """From slice to slice it goes on, and each of them ends in time."""
    whole = train(replace(recipe, out=recipe.out.with_name("whole")), clock=clock)
    assert whole is not None
    late, update = [], 0
    for _ in range(80):
        clock.done.clear()
        start = clock.now
        found = train(replace(recipe, max_minutes=seconds / 60), clock=clock)
        late.append(clock.now - start - seconds)
        reached = int(checkpoints(RunFolder(recipe.out).checkpoints)[0].name.partition("-")[2])
        assert reached > update or "decoding" in clock.done or "pass" in clock.done, "a slice must come further"
        update = reached
        if found is not None:
            break
    assert found is not None
    assert max(late) <= 0, late
    assert losses(recipe.out) == losses(recipe.out.with_name("whole"))


def test_a_finished_run_that_ended_within_an_epoch_stays_as_it_is(recipe):
    """The trainer's own loop looks for the last update only after one more."""
    recipe = replace(recipe, epochs=1.5, evaluate_every=0)
    whole = train(recipe)
    evaluation, kept = RunFolder(recipe.out).evaluation.read_text(), checkpoints(RunFolder(recipe.out).checkpoints)
    assert train(recipe) == whole
    assert RunFolder(recipe.out).evaluation.read_text() == evaluation
    assert checkpoints(RunFolder(recipe.out).checkpoints) == kept
    sliced = replace(recipe, out=recipe.out.with_name("sliced"), max_minutes=0.0)
    found = next(found for _ in range(40) if (found := train(sliced)) is not None)
    assert found == whole


def test_texts_for_which_nothing_is_drafted_measure_no_head(recipe, monkeypatch, capsys):
    """Answers of one token: the newest head is kept, and the files are JSON."""
    unmeasured = Evaluation(math.nan, math.nan, (), math.nan, math.nan, 4)
    monkeypatch.setattr(evaluation_callback, "evaluate", lambda *given, **options: unmeasured)
    found = train(recipe)
    assert math.isnan(found.tree_length)
    assert "nothing was drafted for the held-out texts" in capsys.readouterr().out
    folder = RunFolder(recipe.out)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    content = json.loads(folder.evaluation.read_text(), parse_constant=refuse)
    assert content["best"]["tree_length"] is None
    assert content["best_update"] == 12


def test_a_slice_that_ends_in_an_evaluation_is_where_the_next_begins(recipe, clock, capsys):
    """An evaluation of four texts takes 84 seconds here, four updates and their checkpoints take 50."""
    limited = replace(recipe, max_minutes=1)
    assert train(limited, clock=clock) is None
    said = capsys.readouterr().out
    assert "update 4: no time is left for 4 held-out texts (decoding): the next run evaluates them first" in said
    assert "time is up at update 4 of" in said
    assert clock.now <= 60
    clock.done.clear()
    assert train(limited, clock=clock) is None
    said = capsys.readouterr().out
    assert "the time limit cut the evaluation to 2 of 4 held-out texts (decoding)" in said
    assert clock.done.count("decoding") == 6
    assert "update" not in clock.done  # no time was left for one
    assert decoded(recipe) == [(4, 2)]
    clock.done.clear()
    assert train(limited, clock=clock) is None
    assert clock.done[0] == "update"  # an evaluation that was cut does not hold up the next run again


@pytest.mark.slow
def test_a_checkpoint_comes_before_the_evaluation(recipe, clock, monkeypatch):
    """A kill in an evaluation loses no update, and the next run evaluates first."""
    with monkeypatch.context() as patch:
        patch.setattr(evaluation_callback, "evaluate", lambda *rest, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(replace(recipe, save_every=100), clock=clock)
    folder = RunFolder(recipe.out)
    assert folder.last_checkpoint() == str(folder.checkpoints / "checkpoint-4")
    clock.done.clear()
    assert train(replace(recipe, save_every=100), clock=clock) is not None
    assert clock.done.index("decoding") < clock.done.index("update")
    assert [step for step, _ in decoded(recipe)] == [4, 8, 12]
    assert train(replace(recipe, save_every=100, out=recipe.out.with_name("whole")), clock=clock) is not None
    assert same_heads(recipe.out, recipe.out.with_name("whole"))
    state = json.loads((folder.checkpoints / "checkpoint-12" / "trainer_state.json").read_text())
    assert any("decoder_texts" in entry and entry["step"] == 12 for entry in state["log_history"])


@pytest.mark.slow
def test_the_last_evaluation_is_made_up_for(recipe, clock):
    """A run is finished when its last head is evaluated, over all texts if the time allows it."""
    limited = replace(recipe, epochs=2, evaluate_every=100)  # 8 updates
    assert train(replace(limited, max_minutes=118 / 60), clock=clock) is None
    assert RunFolder(recipe.out).last_checkpoint().endswith("checkpoint-8")
    assert not RunFolder(recipe.out).head.exists()
    cut = train(replace(limited, max_minutes=50 / 60), clock=clock)
    assert cut.texts == 2
    assert decoded(recipe) == [(8, 2)]
    clock.done.clear()
    whole = train(limited, clock=clock)
    assert whole.texts == 4
    assert "update" not in clock.done
    assert decoded(recipe) == [(8, 2), (8, 4)]


@pytest.mark.slow
def test_without_decoding_the_loss_is_cut_too(recipe, clock, capsys):
    limited = replace(recipe, epochs=2, evaluate_every=0, held_out=6, batch_size=2)
    for _ in range(20):
        if (found := train(replace(limited, max_minutes=31 / 60), clock=clock)) is not None:
            break
    assert found.rows > 0
    assert "held-out rows (loss)" in capsys.readouterr().out


def test_an_interval_that_does_not_fit_is_ended_within(recipe, clock, capsys):
    """Ten updates of a log line would take 100 seconds."""
    slow = replace(recipe, save_every=10, evaluate_every=0)
    assert train(replace(slow, max_minutes=41 / 60), clock=clock) is None
    assert clock.now <= 41
    assert "time is up at update 3 of 12" in capsys.readouterr().out


def test_progress_of_evaluations_is_shown(recipe, clock, monkeypatch):
    bars = []

    class Bar:
        def __init__(self, total, desc, **options):
            self.total, self.title, self.done = total, desc, 0
            assert not options["disable"]
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def update(self, count):
            self.done += count

    monkeypatch.setattr(evaluation_callback, "tqdm", Bar)
    monkeypatch.setattr("transformers.training_args.logger.level", logging.WARNING)  # whatever other tests have set
    train(replace(recipe, epochs=1), clock=clock)
    assert {bar.title for bar in bars} == {"held-out rows (loss)", "held-out texts (decoding)"}
    assert all(bar.done == bar.total > 0 for bar in bars)


def test_a_cut_evaluation_replaces_no_whole_one(recipe, clock, monkeypatch):
    """Fewer texts may be easier ones: only evaluations of the same texts compare."""
    found, saved = {"tree_length": 2.0, "texts": 4}, []
    monkeypatch.setattr(HeadTrainer, "save_head", lambda self, folder: saved.append(dict(found)))
    monkeypatch.setattr(evaluation_callback, "draw", lambda *arguments: None)
    recipe.out.mkdir()
    trainer = type("T", (), {"train_dataset": type("D", (), {"num_tokens": 1})()})()
    trainer.save_head = partial(HeadTrainer.save_head, trainer)
    options = {"every": 1, "held_out": [], "held_out_every": 1}
    callback = evaluation_callback.EvaluationCallback(trainer, [None] * 4, RunFolder(recipe.out), **options)
    state = type("S", (), {"global_step": 1, "log_history": []})()
    for length, texts, replaces in [(2.0, 2, True), (1.5, 4, True), (3.0, 2, False), (1.4, 4, False), (1.6, 4, True)]:
        found |= {"tree_length": length, "texts": texts}
        before = len(saved)
        callback._write(dict(found), state)
        assert (len(saved) > before) == replaces, (length, texts)


def test_steps_begin_only_if_they_fit():
    clock = Clock()
    steps, counts = TimedSteps(TimeLimit(1, clock), progress=lambda count: counts.append(count)), []
    while steps.may_begin():
        clock.now += 25
        steps.done(3)
    assert clock.now == 50
    assert counts == [3, 3]
    assert not TimedSteps(TimeLimit(1, clock, started=0), expected=11).may_begin()
    assert TimedSteps(TimeLimit(0, clock), unlimited=True).may_begin()
    late = TimedSteps(TimeLimit(0, clock), at_least=1)
    assert [late.may_begin(), late.may_begin()] == [True, False]
    assert TimeLimit(None, clock).allows(1e9)


def test_answers_stop_at_the_next_token():
    """Of `regenerate`: a batch that writes long answers is not waited for."""
    model, tokens = tiny.model("llama"), 0

    def go_on():
        nonlocal tokens
        tokens += 1
        return tokens < 4

    requests = iter([Request([5, 6, 7]), Request([8, 9])])
    generator = BatchedGenerator(model, 2, 50, None, go_on)
    generator._ends = []
    assert list(generator.run(lambda: next(requests, None))) == []
    assert tokens == 4
