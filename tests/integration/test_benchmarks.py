"""The benchmarks: their bookkeeping by hand, and a run of each on a tiny random model."""

import copy
import dataclasses
import json
import math
import re
import shutil
from importlib import import_module

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from benchmarks import chart, compare, spec_bench
from benchmarks.harness import peers
from benchmarks.harness.identity import compare_texts
from benchmarks.harness.measure import Measurement, Record, take_turns
from benchmarks.harness.methods import assisted, catalogue, select
from benchmarks.harness.options import Bench, Options
from benchmarks.harness.prompts import Job, choose, cut_into_jobs, encode, left_padded, read
from benchmarks.harness.store import Store
from benchmarks.harness.summary import best_of_transformers, spread, summarise
from benchmarks.regression import (
    adaptation,
    compile_seconds,
    kernels,
    long_prompts,
    long_texts,
    lookups,
    overhead,
    repeated,
    row_bits,
    second_turn,
    second_turn_drafts,
    shapes,
    small_pair,
    teacher_forcing,
)
from specdec import Report
from specdec.evaluation.methods import PLAIN, Method
from specdec.heads.eagle3.checkpoint import load
from specdec.heads.eagle3.export import save
from specdec.models.compat import ASSISTED_STATIC
from specdec.models.kernels.launch import available
from specdec.training.evaluate import accepted_lengths
from specdec.training.initialization.eagle3 import initialize
from tests.support.tiny import randomised

QUESTIONS = [
    ("81", "writing", "ab ab ab"),
    ("121", "coding", "def ab ab"),
    ("161", "translation", "x y x y x y"),
    ("241", "qa", "who is who"),
]
NAMES = (
    "plain hf-lookup-10 hf-assistant hf-assistant-static hf-assistant-2 hf-assistant-static-2 hf-assistant-4 "
    "hf-assistant-static-4 specdec-ngram specdec-ngram-10 specdec-draft "
    "specdec-draft-2 specdec-draft-4 specdec-draft-vocab100"
).split()
NAMES = [name for name in NAMES if ASSISTED_STATIC or "static" not in name]
COUNT = len(QUESTIONS) * len(NAMES)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    vocab = {character: i for i, character in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])}
    inner = Tokenizer(models.BPE(vocab, merges=[("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.fixture(scope="module")
def pair():
    """Target, and a draft that is the target with noise on its weights."""
    made = []
    for noise in (0.0, 0.05):
        config = LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = randomised(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.add_(noise * weight.std() * torch.randn_like(weight))
        made.append(model)
    return made


@pytest.fixture(scope="module")
def files(pair, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    for name, model in zip(("target", "draft"), pair, strict=True):
        model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / "target")
    lines = [json.dumps({"question_id": int(i), "category": c, "turns": [text]}) for i, c, text in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def run(files, out, *arguments):
    command = f"--target {files}/target --draft {files}/draft --prompts {files}/questions.jsonl --out {out} --threads 1"
    command += " --max-new-tokens 6 --repeats 1 --draft-vocab 100"
    return CliRunner().invoke(compare.app, [*command.split(), *arguments])


def test_rules_side_by_side(files, tmp_path):
    """Sampled: the default rule's texts are plain decoding's with the same seed, another's are counted, too."""
    methods = ["--methods", "specdec-ngram*", "--rule", "block", "--temperature", "1"]
    result = run(files, tmp_path, *methods)
    assert result.exit_code == 0, result.output
    report = (tmp_path / "results.md").read_text()
    assert "| specdec-ngram:block " in report
    assert f"specdec-ngram {len(QUESTIONS)} of {len(QUESTIONS)}" in report
    assert "specdec-ngram-10:block " in report


@pytest.fixture(scope="module")
def finished(files):
    out = files / "out"
    result = run(files, out)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture
def copied(finished, tmp_path):
    """The finished results, to be tampered with."""
    for file in finished.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def first_cells(text):
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]


def proposers_of(job, text):
    return [line.split("|")[2].strip() for line in text.splitlines() if line.startswith(f"| {job}")]


def lines_of(out):
    return (out / "results.jsonl").read_text().splitlines()


class TestCompare:
    def test_measures_every_method_on_every_prompt(self, finished):
        keys = [(r["method"], r["job"], r["repeat"]) for r in map(json.loads, lines_of(finished))]
        assert sorted(keys) == sorted((name, question[0], 0) for name in NAMES for question in QUESTIONS)
        assert [method for method, _, _ in keys[: len(NAMES)]] == NAMES  # taking turns on each prompt

    def test_tables_have_a_row_per_method_and_a_column_per_group(self, finished):
        text = (finished / "results.md").read_text()
        cells = first_cells(text)
        assert cells.count("plain") == 2
        assert all(cells.count(name) == (3 if name.startswith("specdec") else 2) for name in NAMES[1:])
        assert "| all questions | mean of groups | mt_bench" in text
        assert "Best of transformers' assisted settings" in text

    def test_json_says_what_was_measured_and_on_what(self, finished):
        content = json.loads((finished / "results.json").read_text())
        assert [row["name"] for row in content["methods"]] == NAMES
        assert {"cpu", "torch", "transformers", "specdec", "threads", "dtype"} <= content["machine"].keys()
        draft = content["methods"][NAMES.index("specdec-draft-4")]
        assert draft["report"]["num_draft_tokens"] > 0
        assert draft["tokens_per_pass"] > 1
        assert all(
            identity["compared"] == 4 and not identity["differences"] for identity in content["identity"].values()
        )

    def test_a_finished_run_measures_nothing_again(self, files, copied):
        before = lines_of(copied)
        result = run(files, copied)
        assert result.exit_code == 0, result.output
        assert f"{COUNT} measurements, {COUNT} of them finished" in result.output
        assert lines_of(copied) == before

    def test_goes_on_behind_a_half_written_line(self, files, copied):
        before = lines_of(copied)
        (copied / "results.jsonl").write_text("\n".join(before[:-2]) + "\n" + before[-2][:50])
        result = run(files, copied)
        assert result.exit_code == 0, result.output
        after = lines_of(copied)
        assert after[:-2] == before[:-2]
        assert [json.loads(line)["method"] for line in after[-2:]] == NAMES[-2:]
        assert "2 sessions" in result.output

    @pytest.mark.parametrize("argument", ["--temperature", "--max-new-tokens", "--seed"])
    def test_refuses_results_of_other_settings(self, files, finished, argument):
        result = run(files, finished, argument, "1")
        assert result.exit_code == 2
        assert f"{argument.lstrip('-').replace('-', '_')} was" in result.output

    def test_a_differing_text_in_float32_is_an_error(self, files, copied):
        lines = [json.loads(line) for line in lines_of(copied)]
        lines[-1]["measurement"]["tokens"][0][3] = 256 - lines[-1]["measurement"]["tokens"][0][3]
        (copied / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = run(files, copied)
        assert result.exit_code == 1
        assert "3 of 4" in result.output

    def test_names_the_methods_when_one_is_unknown(self, files, tmp_path):
        result = run(files, tmp_path, "--methods", "eagle")
        assert result.exit_code == 2
        assert "specdec-draft-2" in result.output

    def test_batches_run_without_transformers_assistants_but_with_single_calls(self, files, tmp_path):
        result = run(files, tmp_path, "--batch-size", "3", "--temperature", "1", "--methods", "plain*,specdec-ngram")
        assert result.exit_code == 0, result.output
        records = [json.loads(line) for line in lines_of(tmp_path)]
        assert [r["method"] for r in records] == ["plain", "plain:singles", "specdec-ngram"]
        assert all(len(r["measurement"]["tokens"]) == 3 for r in records)
        assert [r["measurement"]["passes"] for r in records[:2]] == [6, 18]

    def test_pass_costs(self, files, tmp_path):
        result = run(files, tmp_path, "--pass-costs")
        assert result.exit_code == 0, result.output
        assert list(json.loads((tmp_path / "pass_costs.json").read_text())["seconds"]["target"])[-1] == "32"

    @pytest.mark.slow
    def test_memory_of_fresh_processes(self, files, tmp_path):
        result = run(files, tmp_path, "--memory", "--methods", "plain,specdec-ngram")
        assert result.exit_code == 0, result.output
        assert first_cells(result.output)[2:] == ["plain", "specdec-ngram"]


def record(method, job="q", group="g", seconds=1.0, tokens=((1, 2, 3, 4),), repeat=0):
    counts = {"time_to_first_token": 0.1, "decode_seconds": 0.9 * seconds, "decode_tokens": 3, "passes": 4}
    tokens = [list(row) for row in tokens]
    return Record("f", "s", method, job, group, repeat, Measurement(tokens=tokens, seconds=seconds, **counts))


class TestSummary:
    def test_speed_up_is_the_ratio_of_mean_tokens_per_second(self):
        times = [("plain", "a", 1.0), ("plain", "b", 4.0), ("x", "a", 0.5), ("x", "b", 4.0)]
        rows = summarise([record(method, job, job, seconds) for method, job, seconds in times], ["plain", "x"])
        assert rows[1].by_group == {"a": 2.0, "b": 1.0}
        assert rows[1].overall == pytest.approx((8 + 1) / (4 + 1))
        assert rows[1].mean == 1.5

    def test_repeats_count_as_their_median(self):
        records = [record("plain", seconds=1.0, repeat=i) for i in range(3)]
        records += [record("x", seconds=seconds, repeat=i) for i, seconds in enumerate((9.0, 0.5, 0.1))]
        assert summarise(records, ["plain", "x"])[1].overall == 2

    def test_only_prompts_that_plain_was_measured_on_count(self):
        records = [record("plain", "a"), record("x", "a", seconds=0.5), record("x", "b", seconds=0.001)]
        assert summarise(records, ["plain", "x"])[1].overall == 2

    def test_a_peer_may_leave_the_targets_forward_pass_uncalled(self):
        silent = record("x", seconds=0.5)
        silent = dataclasses.replace(silent, measurement=dataclasses.replace(silent.measurement, passes=0))
        row = summarise([record("plain"), silent], ["plain", "x"])[1]
        assert (row.overall, math.isnan(row.tokens_per_pass)) == (2, True)

    def test_best_of_transformers_is_one_setting_or_one_per_group(self):
        speeds = {"plain": (1, 1), "hf-a": (2, 1), "hf-b": (1, 1.5), "specdec-c": (9, 9)}
        records = [record(n, str(i), str(i), 1 / s) for n, pair in speeds.items() for i, s in enumerate(pair)]
        best = best_of_transformers(summarise(records, list(speeds)))
        assert (best.single, best.single_mean) == ("hf-a", pytest.approx(1.5))
        assert best.per_group == {"0": "hf-a", "1": "hf-b"}
        assert best.per_group_mean == pytest.approx(1.75)

    def test_files_of_others_stay_as_they_are(self, tmp_path):
        lines = tmp_path / "results.jsonl"
        lines.write_text('{"mine": 1}\n{"mine": 2}')
        with pytest.raises(ValueError, match="choose another --out"):
            Store(tmp_path, {"a": 1})
        (tmp_path / "settings.json").write_text('{"a": 1}')
        with pytest.raises(ValueError, match="line 1 cannot be read"):
            Store(tmp_path, {"a": 1})
        assert lines.read_text() == '{"mine": 1}\n{"mine": 2}'

    def test_a_record_survives_the_file(self, tmp_path):
        report = Report()
        report.record_round([3], [3], [2], 0.5)
        measurement = Measurement([[1]], 1.0, 0.1, 0.9, 0, 1, report)
        store = Store(tmp_path, {"a": 1})
        store.append(Record(store.fingerprint, "s", "m", "j", "g", 0, measurement))
        [again] = Store(tmp_path, {"a": 1}).records
        assert again.measurement.report.mean_acceptance_length == 3
        assert again.measurement.report.time_per_output_token == report.time_per_output_token


class TestIdentity:
    def test_says_where_texts_part_and_how_close_it_was(self, pair):
        target, prompt = pair[0], torch.tensor([5, 6, 7])
        text = target.generate(prompt[None], max_new_tokens=5, do_sample=False)[0, 3:].tolist()
        logits = target(torch.cat([prompt, torch.tensor(text[:2])])[None]).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        changed = [*text[:2], int(logits.topk(2).indices[1]), *text[3:]]
        records = [record(PLAIN, tokens=[text]), record("same", tokens=[text]), record("other", tokens=[changed])]
        found = compare_texts(records, [Job("q", "g", (prompt,))], target)
        assert str(found["same"]) == "1 of 1"
        [difference] = found["other"].differences
        assert difference.divergence.index == 2
        assert difference.divergence.gap == pytest.approx(first - second, abs=1e-4)
        assert str(found["other"]).startswith("0 of 1; ")


class TestPrompts:
    def test_groups_are_spec_benchs(self, files):
        path = files / "questions.jsonl"
        assert [q.group for q in read(path)] == ["mt_bench", "mt_bench", "translation", "qa"]
        assert [q.group for q in read(path, coding_apart=True)] == ["mt_bench", "coding", "translation", "qa"]
        assert [q.id for q in choose(read(path), 1)] == ["81", "161", "241"]

    def test_a_line_that_is_no_question_is_named(self, tmp_path):
        (tmp_path / "q.jsonl").write_text('{"title": "hello"}\n')
        with pytest.raises(ValueError, match="line 1: expected .*question_id"):
            read(tmp_path / "q.jsonl")

    @pytest.mark.parametrize(
        ("entry", "text", "name"),
        [
            ({"question": "How many?", "answer": "9"}, "How many?", "q-1"),  # GSM8K
            ({"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": ""}, "def f():", "HumanEval/0"),
            ({"task_id": 7, "text": "Write f.", "code": ""}, "Write f.", "7"),  # MBPP
            ({"instruction": "Sort.", "input": "c a b", "output": ""}, "Sort.\n\nc a b", "q-1"),  # Alpaca
            ({"instruction": "Sing.", "input": "", "output": ""}, "Sing.", "q-1"),
        ],
    )
    def test_other_data_sets_are_a_group_each(self, tmp_path, entry, text, name):
        (tmp_path / "q.jsonl").write_text(json.dumps(entry) + "\n")
        [question] = read(tmp_path / "q.jsonl")
        assert (question.id, question.group, question.turns) == (name, "q", (text,))

    def test_long_prompts_lose_their_middle(self, files, tokenizer):
        question = read(files / "questions.jsonl")[2]
        [ids] = encode(question, tokenizer, max_tokens=4).prompts
        assert tokenizer.decode(ids) == "x  y"

    def test_batches_take_from_each_group_in_turn(self):
        questions = [Job(name, name[0], (torch.tensor([1]),)) for name in ("a1", "a2", "a3", "b1", "b2")]
        assert [job.id for job in cut_into_jobs(questions, 2)] == ["a1+b1", "a2+b2"]
        padded = left_padded([torch.tensor([1]), torch.tensor([2, 3])], 9, torch.device("cpu"))
        assert padded["input_ids"].tolist() == [[9, 1], [2, 3]]
        assert padded["attention_mask"].tolist() == [[0, 1], [1, 1]]


class TestSpecBench:
    @pytest.fixture
    def asked(self, files, tmp_path):
        """A conversation of two turns, a question of one."""
        lines = [
            {"question_id": 81, "category": "writing", "turns": ["abab", "ab"]},
            {"question_id": 241, "category": "qa", "turns": ["xyxyx"]},
        ]
        path = tmp_path / "question.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def run(self, files, asked, out, *more):
        command = (
            f"--target {files}/target --draft {files}/draft --data {asked} --out {out} --threads 1 --max-new-tokens 6"
        )
        methods = "--methods specdec-ngram,specdec-draft,hf-lookup*"
        return CliRunner().invoke(spec_bench.app, [*command.split(), *methods.split(), *more])

    def test_the_board(self, files, asked, tmp_path):
        out = tmp_path / "board"
        result = self.run(files, asked, out, "--batch-size", "1", "--batch-size", "2")
        assert result.exit_code == 0, result.output
        page = (out / "board.md").read_text()
        assert "| Models" in page
        assert "| Multi-turn Conversation | Question Answering | #MAT" in page
        assert page.count("| plain ") == 2  # in each table, and ours beside the best of transformers' behind it
        assert page.count("| specdec-draft ") == 4
        assert "## question: T = 0, batch 1" in page
        assert "## question: T = 0, batch 2" in page
        jobs = [json.loads(line)["job"] for line in lines_of(out / "question-t0-b1")]
        assert list(dict.fromkeys(jobs)) == ["81", "241", "81 turn 2"]
        before = lines_of(out / "question-t0-b1")
        assert self.run(files, asked, out).exit_code == 0
        assert lines_of(out / "question-t0-b1") == before

    def test_a_further_turn_has_what_plain_decoding_answered(self, files, asked):
        bench = Bench(Options(target=f"{files}/target", prompts=asked, all_turns=True))
        bench.tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
        [job] = bench.next_turns({"81": bench.tokenizer("zz")["input_ids"], "241": [1]}, 1)
        assert bench.tokenizer.decode(job.prompts[0]) == "u:abab;a:zz;u:ab;"
        assert bench.next_turns({}, 2) == []

    def test_thinking_reaches_the_template(self, files, asked):
        said = {}
        for thinking in (None, True, False):
            bench = Bench(Options(target=f"{files}/target", prompts=asked, thinking=thinking))
            bench.tokenizer.chat_template = "{{ enable_thinking if enable_thinking is defined else 'unsaid' }}"
            said[thinking] = bench.tokenizer.decode(bench.jobs[0].prompts[0])
        assert said == {None: "unsaid", True: "True", False: "False"}

    def test_what_it_refuses(self, files, asked, tmp_path):
        result = self.run(files, asked, tmp_path / "out", "--thinking", "maybe")
        assert result.exit_code == 2
        assert "on or off" in result.output

    def test_methods_that_some_combination_lacks_are_named_before_anything_is_measured(self, files, asked, tmp_path):
        result = self.run(
            files, asked, tmp_path / "out", "--batch-size", "1", "--batch-size", "2", "--methods", "hf-assistant"
        )
        assert result.exit_code == 2
        assert "no method is called 'hf-assistant'" in result.output
        assert not (tmp_path / "out").exists()

    def test_spread_holds_the_mean(self):
        def record(method, job, seconds):
            return Record("", "", method, job, "g", 0, Measurement([[1] * 10], seconds, 0.1, 0.1, 9, 10))

        records = [record("plain", str(i), 1.0) for i in range(8)]
        records += [record("fast", str(i), 0.4 + 0.02 * i) for i in range(8)]
        low, high = spread(records, "fast")
        assert low < summarise(records, ["plain", "fast"])[1].overall < high
        assert spread(records, "plain") == (1.0, 1.0)


class TestMethods:
    def test_other_libraries_where_they_are_installed(self, files, monkeypatch):
        prompts = files / "questions.jsonl"
        monkeypatch.setattr(peers, "find_spec", lambda name: name == "flashspec" or None)
        alone, pair = Options("target", prompts), Options("target", prompts, draft="draft")
        assert set(catalogue(Bench(alone))) - {"plain"} == {
            "hf-lookup-10",
            "specdec-ngram",
            "specdec-ngram-10",
            "specdec-ngram:exact",
            "specdec-ngram-10:exact",
            "flashspec-lookup-10",
        }
        theirs = {name for name in catalogue(Bench(pair)) if name.startswith("flashspec-")}
        assert theirs == {"flashspec-lookup-10", "flashspec-composite-g4", "flashspec-composite-g6-f2"}
        assert not theirs & set(select(list(catalogue(Bench(pair))), []))  # on demand
        assert theirs <= set(select(list(catalogue(Bench(pair))), ["flashspec-*"]))
        for changed in ({"temperature": 1.0}, {"batch_size": 2}, {"full_length": True}):  # which it does not take
            assert not peers.peers(Bench(dataclasses.replace(pair, **changed)))
        monkeypatch.setattr(peers, "find_spec", lambda name: None)
        assert not peers.peers(Bench(pair))

    def test_plain_is_always_among_them(self):
        assert select(["plain", "hf-a", "specdec-b"], ["spec*"]) == ["plain", "specdec-b"]

    def test_single_calls_of_transformers_are_on_demand(self):
        names = ["plain", "plain:singles", "hf-a:singles", "specdec-b"]
        assert select(names, []) == ["plain", "plain:singles", "specdec-b"]
        assert select(names, ["hf-*"]) == ["plain", "hf-a:singles"]

    def test_exact_methods_are_on_demand(self):
        names = ["plain", "specdec-ngram", "specdec-ngram:exact"]
        assert select(names, []) == select(names, ["specdec-*"]) == ["plain", "specdec-ngram"]
        assert select(names, ["specdec-*:exact"]) == ["plain", "specdec-ngram:exact"]

    def test_assistant_drafts_the_constant_number(self, pair):
        """What `num_assistant_tokens` given to `generate()` would not do."""
        target, draft = pair
        before, passes = draft.generation_config, []
        hook = draft.register_forward_pre_hook(lambda *_: passes.append(1))
        try:
            job = Job("q", "g", (torch.tensor([5, 6, 7, 5, 6]),))
            arguments = {"max_new_tokens": 40, "do_sample": False}
            records = take_turns([Method("m", assisted(target, draft, 3))], target, [job], arguments, 1)
        finally:
            hook.remove()
        rounds = 2 * records[0].measurement.passes  # the warm-up call was the same
        assert 3 * rounds - 2 * 4 <= len(passes) <= 3 * rounds  # the last rounds have room for fewer
        assert draft.generation_config is before


def test_small_pair_agrees_without_disagreement():
    target, draft = small_pair.small_pair(disagreement=0.0)
    tokens = torch.arange(1, 20)[None]
    with torch.no_grad():
        assert torch.equal(target(tokens).logits.argmax(-1), draft(tokens).logits.argmax(-1))
    assert 4e6 < sum(weight.numel() for weight in target.parameters()) < 6e6


def test_small_pair_runs():
    result = CliRunner().invoke(small_pair.app, "--prompts 1 --repeats 1 --max-new-tokens 12 --threads 1".split())
    assert result.exit_code == 0, result.output
    assert "specdec over assistant_model" in result.output


def test_overhead_runs(files, tmp_path):
    command = f"--target {files}/target --max-new-tokens 6 --repeats 1 --out {tmp_path}/o.md --threads 1"
    result = CliRunner().invoke(overhead.app, command.split())
    assert result.exit_code == 0, result.output
    assert (tmp_path / "o.md").read_text().strip() == result.stdout.strip()
    assert first_cells(result.output)[2:4] == ["plain", "specdec, draft length 0"]


def test_calls_that_repeat_each_other(files, tokenizer, monkeypatch):
    monkeypatch.setitem(repeated.JOBS, "words", lambda: iter(["ab " * 9, "ab " * 9]))
    command = f"--target {files}/target --job words --max-new-tokens 8"
    result = CliRunner().invoke(repeated.app, command.split())
    assert result.exit_code == 0, result.output
    assert proposers_of("words", result.output) == ["plain", "ngram", "suffix"]
    assert result.output.count("2 of 2") == 3
    for name in ("edits", "queries", "questions"):
        texts = list(repeated.JOBS[name]())
        assert len(set(texts)) == len(texts) >= 10


@pytest.mark.slow
class TestLookups:
    """Four calls: a text, the same again, one that ends differently, and one of its own."""

    CALLS = (([1, 2], [3, 4, 5, 6]), ([9, 2], [3, 4, 5, 6]), ([8, 2], [3, 4, 7, 7]), ([1], [11, 12, 13, 14]))

    def test_what_a_lookup_could_bring_at_most(self):
        """Behind the first token: 3 passes; 1; 2, where the first finds the 4; 3."""
        assert lookups.at_most(self.CALLS[:1]) == 3 / 3
        assert lookups.at_most(self.CALLS[:2]) == 6 / 4
        assert lookups.at_most(self.CALLS) == 12 / 9

    def test_the_memory_finds_what_n_grams_cannot(self):
        calls = [([30 + i, 2], [3, *range(4, 28)]) for i in range(6)]
        (ngram, suffix) = lookups.counted("job", calls, lookups.curve("1:1 32:1.5"))
        assert ngram[:4] == ["job", "ngram", "6", "1.00"]
        assert 2 < float(suffix[3]) <= float(suffix[4])

    def test_what_matches_are_worth(self):
        """The answer goes along with the prompt's `2 3 4 5` from its second token on, and says `9` where that ends."""
        counts = {
            name: (tokens, right) for name, tokens, right in lookups.by_match([([2, 3, 4, 5, 7, 2], [3, 4, 5, 9])])
        }
        # Behind `2 3`: 4, 5 and, in vain, 7; behind `2 3 4`: 5 and, in vain, 7.
        assert counts["to 2"] == ("1", "1.00")
        assert counts["to 3"] == ("2", "1.00")
        assert counts["to 5"] == ("2", "0.00")
        assert counts["longer"] == ("0", "-")

    def test_costs_between_those_given(self):
        seconds = lookups.curve("1:1 3:2 4:2.5")
        assert [seconds(n) for n in (1, 2, 3, 4, 8)] == [1, 1.5, 2, 2.5, 5]

    def test_it_runs(self, files, monkeypatch):
        monkeypatch.setitem(lookups.JOBS, "words", lambda: iter(["ab " * 9, "ab " * 9]))
        command = f"--target {files}/target --dtype float32 --job words --max-new-tokens 8"
        result = CliRunner().invoke(lookups.app, command.split())
        assert result.exit_code == 0, result.output
        assert proposers_of("words", result.output) == ["ngram", "suffix"]

    def test_texts_that_are_there(self, files, tmp_path):
        entries = [
            {"source": "code", "prompt": "ab", "response": "ab ab ab"},
            {"source": "code", "prompt": "ab", "response": "x y", "temperature": "0.7"},
            {"source": "math", "prompt": "x", "response": "x y x y"},
        ]
        (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, entries)))
        command = f"--target {files}/target --texts {tmp_path}/texts.jsonl"
        result = CliRunner().invoke(lookups.app, command.split())
        assert result.exit_code == 0, result.output
        rows = [line.split("|")[1:4] for line in result.output.splitlines()[2:]]
        assert [[cell.strip() for cell in row] for row in rows] == [
            ["code", "ngram", "1"],
            ["code", "suffix", "1"],
            ["math", "ngram", "1"],
            ["math", "suffix", "1"],
        ]


@pytest.mark.slow
def test_seconds_of_compiling_are_measured(files, monkeypatch):
    monkeypatch.setattr("specdec.models.static_forward.BACKEND", "eager")
    torch.compiler.reset()
    assert min(compile_seconds.measured(str(files / "target"), 4, "float32", "cpu")) > 0


@pytest.mark.slow
def test_long_prompts_measure_in_a_process_of_their_own(files):
    command = f"--target {files}/target --lengths 40 --rows 2 --max-new-tokens 2"
    result = CliRunner().invoke(long_prompts.app, command.split())
    assert result.exit_code == 0, result.output
    assert first_cells(result.output)[2] == "2"
    assert "2 x full" in result.output


def test_a_second_turn_runs(files):
    command = f"--target {files}/target --prompt-tokens 30 --max-new-tokens 4 --repeats 1 --dtype float32"
    result = CliRunner().invoke(second_turn.app, command.split())
    assert result.exit_code == 0, result.output
    assert first_cells(result.output)[2:] == ["plain", "plain", "specdec, ngram", "specdec, ngram"]
    assert result.output.count("| yes          |") == 4  # all wrote plain decoding's text


@pytest.fixture(scope="module")
def head(files, pair):
    torch.manual_seed(0)
    save(initialize(pair[0], torch.arange(257)), files / "head")
    return files / "head"


def test_drafts_of_second_turns_run(files, head, chat_tokenizer, tmp_path):
    shutil.copytree(files / "target", tmp_path / "target")
    chat_tokenizer.save_pretrained(tmp_path / "target")
    lines = [json.dumps({"turns": turns}) for turns in (["abc", "de"], ["only one"], ["fgh", "ij"])]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    command = f"--target {tmp_path}/target --head {head} --prompts {tmp_path}/questions.jsonl --max-new-tokens 8"
    result = CliRunner().invoke(second_turn_drafts.app, [*command.split(), "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert first_cells(result.output)[2:] == list(second_turn_drafts.READ)
    assert result.output.count("| 2 of 2") == 3  # all wrote the same texts


def test_drafts_after_long_texts_run(files, head, tmp_path):
    (tmp_path / "text").write_text("ab x y " * 10)
    command = f"--target {files}/target --head {head} --text {tmp_path}/text --lengths 20,40 --windows 0,30"
    arguments = [*command.split(), "--dtype", "float32", "--max-new-tokens", "8"]
    result = CliRunner().invoke(long_texts.app, arguments)
    assert result.exit_code == 0, result.output
    assert first_cells(result.output)[2:] == ["20", "40"]
    assert [line.count(" ms)") for line in result.output.splitlines() if line.startswith(("| 20 ", "| 40 "))] == [1, 2]
    assert CliRunner().invoke(long_texts.app, [*arguments, "--lengths", "4000"]).exit_code == 2


def test_the_target_as_its_own_draft_model_is_right_after_long_texts_without_a_window(files, tmp_path):
    (tmp_path / "text").write_text("ab x y " * 10)
    command = f"--target {files}/target --draft-model {files}/target --text {tmp_path}/text --lengths 20,40"
    arguments = [*command.split(), "--windows", "0,4", "--dtype", "float32", "--max-new-tokens", "16"]
    result = CliRunner().invoke(long_texts.app, [*arguments, "--plot", str(tmp_path / "chart.png")])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith(("| 20 ", "| 40 "))]
    assert all(line.split("|")[2].strip().startswith("5.00 ") for line in lines)
    assert not all(line.split("|")[3].strip().startswith("5.00 ") for line in lines)
    assert (tmp_path / "chart.png").stat().st_size > 1000
    assert CliRunner().invoke(long_texts.app, [*arguments, "--sinks", "2"]).exit_code == 2


class TestShapes:
    @staticmethod
    def run(files, head, out, *arguments):
        command = f"--target {files}/target --head {head} --prompts {files}/questions.jsonl --out {out} --threads 1"
        return CliRunner().invoke(shapes.app, [*command.split(), "--max-new-tokens", "8", *arguments])

    def test_every_shape_has_a_line_and_every_group_a_column(self, files, head, tmp_path):
        result = self.run(files, head, tmp_path, "--temperature", "1")
        assert result.exit_code == 0, result.output
        names = [name for name, _, _ in shapes.shapes(load(head), 1.0)]
        assert [cell for cell in first_cells(result.stdout) if cell in names] == names
        assert "mt_bench 1, coding 1, translation 1, qa 1" in result.stdout

    def test_goes_on_where_it_was_stopped(self, files, head, tmp_path):
        whole = self.run(files, head, tmp_path, "--only", "chain")
        lines = lines_of(tmp_path)
        assert len(lines) == len(QUESTIONS)
        (tmp_path / "results.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:50])
        again = self.run(files, head, tmp_path, "--only", "chain")
        assert lines_of(tmp_path)[:2] == lines[:2]
        assert "1/2  chain" in again.stderr
        assert "2/2  chain" in again.stderr
        cells = [[cell.strip() for cell in run.stdout.splitlines()[-1].split("|")][1:7] for run in (whole, again)]
        assert cells[0] == cells[1]  # greedy: the same acceptance

    def test_what_does_not_fit_is_said(self, files, head, tmp_path):
        for options, said in (
            (("--only", "forest"), "tree of 24, tree of 60, chain"),
            (("--head", "no/such/head"), "no/"),
        ):
            result = self.run(files, head, tmp_path, *options)
            assert result.exit_code == 2
            assert said in result.stderr

    def test_another_head_is_refused(self, files, head, pair, tmp_path):
        assert self.run(files, head, tmp_path, "--only", "chain").exit_code == 0
        save(initialize(pair[0], torch.arange(100)), tmp_path / "head")
        other = self.run(files, tmp_path / "head", tmp_path, "--only", "chain")
        assert other.exit_code == 2
        assert "choose another --out" in other.stderr


def test_a_bench_without_a_draft_says_so(files):
    options = type("O", (), {"draft": None, "threads": None})()
    with pytest.raises(ValueError, match="--draft"):
        _ = Bench(options).draft


def test_a_chart_shows_what_the_tables_say(tmp_path):
    pytest.importorskip("matplotlib")
    table = chart.read(chart.RESULTS / f"{chart.PAIR}.md")
    written = (chart.RESULTS / f"{chart.PAIR}.md").read_text(encoding="utf-8")
    gain = table.by_method["specdec-draft"]["coding"]
    assert re.search(rf"\| specdec-draft +\|.*\| {gain:.2f}x ", written)
    figure = chart.draw([table])
    said = {text.get_text() for text in figure.axes[0].texts}
    assert f"{gain:.2f}" in said
    assert CliRunner().invoke(chart.app, [str(tmp_path / "a" / "chart.svg")]).exit_code == 0
    assert "AMD EPYC" in (tmp_path / "a" / "chart.svg").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="no table of speed-ups"):
        chart.read(chart.RESULTS / "coupling.md")


class TestTeacherForcing:
    @pytest.fixture
    def head(self, pair, tmp_path):
        save(initialize(pair[0], torch.arange(60)), tmp_path / "head")
        return tmp_path / "head"

    def test_lengths_behind_all_positions_of_answers(self, pair, head):
        """Those that have a whole chain's tokens behind them: 9 - 3 of a text, and of another 12 - 3."""
        target, steps = pair[0].eval(), 3
        jobs = [Job(name, "words", (torch.tensor(prompt),)) for name, prompt in (("a", [5, 9, 2]), ("b", [7, 7]))]
        answers, whole = {}, []
        for job, n in zip(jobs, (9, 12), strict=True):
            prompt = job.prompts[0]
            text = target.generate(prompt[None], max_new_tokens=n, min_new_tokens=n, do_sample=False)[0]
            answers[job.id] = text[len(prompt) :].tolist()
            whole += accepted_lengths(load(head), target, text, steps, len(prompt) - 1)[len(prompt) - 1 : -1 - steps]
        assert len(whole) == 6 + 9
        found = teacher_forcing.of_groups(load(head), target, jobs, answers, steps)["words"]
        assert found[0] == pytest.approx(1 + sum(whole) / len(whole))
        assert 1 < found[1] < 2  # random weights

    @pytest.mark.parametrize(("known", "expected"), [(1.0, 4), (0.5, 1.875)])
    def test_what_is_accepted_at_temperature_one(self, pair, head, monkeypatch, known, expected):
        """What the target says is accepted whole; where a head has half of it alone, 1/2 of it each time."""
        target, prompt = pair[0].eval(), torch.tensor([5, 9, 2])
        text = target.generate(prompt[None], max_new_tokens=9, min_new_tokens=9, do_sample=False)[0]
        logits = target(text[None]).logits[0].detach()
        p = torch.cat([known * logits.softmax(-1), torch.full((len(text), 1), 1 - known)], -1)
        told = [p[1 + step : -1].log() for step in range(3)]
        head, vocabulary = load(head), torch.tensor([*range(logits.shape[-1]), 0])
        monkeypatch.setattr(type(head), "draft_to_target", vocabulary)
        monkeypatch.setattr(teacher_forcing, "drafted_logits", lambda *rest: iter(told))
        jobs, answers = [Job("a", "words", (prompt,))], {"a": text[3:].tolist()}
        found = teacher_forcing.of_groups(head, target, jobs, answers, 3)["words"]
        assert found[1] == pytest.approx(expected, rel=1e-2)
        assert known < 1 or found[0] == 4

    def test_it_runs_and_keeps_the_answers(self, files, head, tmp_path):
        command = f"--target {files}/target --prompts {files}/questions.jsonl --answers {tmp_path}/answers.jsonl"
        command += f" --head eagle3:{head} --max-new-tokens 12 --draft-length 3"
        first, again = (CliRunner().invoke(teacher_forcing.app, command.split()) for _ in range(2))
        assert first.exit_code == 0, first.output
        assert first.stdout == again.stdout
        assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == len(QUESTIONS)


class TestAdaptation:
    """Learning from answers, one after the other."""

    def test_a_head_learns_what_comes_again(self, pair, head):
        first = load(head).float()
        session = adaptation.Session(adaptation.LocalTeacher.of(pair[0].eval(), first), first, 3)
        answers = session.read([(torch.tensor([5, 9, 2]), [7, 8] * 8)] * 6)
        before, _ = session.run(answers, None)
        after, seconds = session.run(answers, adaptation.Learning(1e-2, updates=4))
        assert torch.equal(before[0], before[1])
        assert seconds > 0
        assert after[1, 1] > max(before[1, 1], after[0, 1])  # at T = 1, which the target's distribution decides
        assert torch.equal(session.run(answers, None)[0], before)  # each run starts with the head as it is

    def test_it_runs(self, files, head, tmp_path):
        questions = [{"question_id": number, "category": "qa", "turns": ["abc"]} for number in range(2)]
        (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
        command = f"--target {files}/target --head {head} --prompts {tmp_path}/questions.jsonl --methods 1e-05"
        command += f" --answers {tmp_path}/answers.jsonl --max-new-tokens 12 --draft-length 3"
        result = CliRunner().invoke(adaptation.app, [*command.split(), "--groups", "qa"])
        assert result.exit_code == 0, result.output
        assert first_cells(result.output)[2:] == ["no learning", "all weights, 1e-05"]
        result = CliRunner().invoke(adaptation.app, [*command.split(), "--groups", "poems"])
        assert result.exit_code == 2
        assert "no two questions of the group poems" in result.stderr


@pytest.mark.slow
def test_kernels_against_modules():
    """Every case runs and differs in few last bits; a case that fails is a row that says so."""
    pytest.importorskip("triton")
    if not available(torch.device("cpu")):
        pytest.skip("Triton compiles its kernels here")
    result = CliRunner().invoke(kernels.app, ["--small"])
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.output.splitlines() if "|" in line][2:]
    assert len(rows) == 2 * (5 + 5 + 6)
    assert all(float(row[3]) < 0.01 and float(row[4].rstrip("%")) < 1 for row in rows)
    assert result.output.count("DecoderLayer") == 3


def test_json_by_grammar(files, tokenizer, tmp_path):
    pytest.importorskip("xgrammar", reason="xgrammar has no wheel for this platform")
    grammar = import_module("benchmarks.regression.grammar")
    shutil.copytree(files / "target", tmp_path / "target")
    ending = copy.deepcopy(tokenizer)
    ending.eos_token = "ab"
    ending.save_pretrained(tmp_path / "target")
    command = (
        f"--target {tmp_path}/target --proposer ngram --proposer draft:{files}/draft --texts 1 --max-new-tokens 24"
    )
    result = CliRunner().invoke(grammar.app, command.split())
    assert result.exit_code == 0, result.output
    methods = ["plain", "ngram, grammar unknown", "ngram", "draft, grammar unknown", "draft"]
    assert first_cells(result.output)[2:] == methods
    assert result.output.count("| 1 of 1 ") == len(methods)  # all wrote plain decoding's text


def test_products_whose_bits_depend_on_the_rows_are_counted(monkeypatch):
    weight, rows = torch.randn(8, 16), 3 * len(row_bits.ROWS) - 1  # three of each product, but of the first two
    assert row_bits.differing(weight, None, 3)[0] == 8 * rows
    right = row_bits.together
    monkeypatch.setattr(row_bits, "together", lambda x, *layer: right(x, *layer) + (x.shape[1] > 3))
    compared, alone, padded = row_bits.differing(weight, None, 3)
    assert compared - min(alone, padded) <= 8 * 5  # of the products of two and three rows
    assert min(alone, padded) >= 8 * 3 * (len(row_bits.ROWS) - 2)
