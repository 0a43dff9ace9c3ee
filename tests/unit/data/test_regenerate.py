"""`specdec regenerate`: a target answers prompts."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from specdec.cli.app import app
from specdec.data.conversations import encode_prompt, read_texts
from specdec.data.regenerate import regenerate
from specdec.utils.paths import locked
from tests.support import encoded, templated, tiny
from tests.support.ranks import together
from tests.support.training import written


def asked(files, name="prompts.jsonl"):
    two_turns = [{"role": role, "content": text} for role, text in [("user", "a b"), ("assistant", "x"), ("user", "c")]]
    return written(files / name, {"prompt": "a b c"}, {"messages": two_turns}, {"prompt": "d"}, {"prompt": "e " * 90})


def rewrite(files, out, *options):
    command = ["regenerate", str(files / "model"), str(files / "prompts.jsonl"), str(out)]
    limits = ["--max-new-tokens", "6", "--max-prompt-tokens", "60", "--batch-size", "2"]
    return CliRunner().invoke(app, [*command, *limits, *options])


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.txt"])
def test_names_of_other_formats_are_refused(name, files, tmp_path):
    """Training would read these as something else."""
    asked(files)
    result = rewrite(files, tmp_path / name)
    assert result.exit_code == 2
    assert "answers are written as JSON lines" in " ".join(result.output.split())


def test_the_target_answers_all_turns_itself(files, tokenizer, tmp_path):
    asked(files)
    result = rewrite(files, tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.output
    lines = {line["id"]: line for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert set(lines) == {0, 1, 2}  # the last one is too long
    target = tiny.model("llama", num_hidden_layers=4)
    for line in lines.values():
        for i, message in enumerate(line["messages"]):
            if message["role"] != "assistant":
                continue
            prompt = torch.tensor([encode_prompt(line["messages"][:i], tokenizer)])
            plain = target.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
            assert message["content"] == tokenizer.decode(plain)
            assert message["content"] != "x"
    texts = list(read_texts(tmp_path / "out.jsonl", tokenizer, 100))
    assert len(texts) == 3
    for text, line in zip(texts, lines.values(), strict=True):
        start = len(encode_prompt(line["messages"][:1], tokenizer))
        prompt = text.ids[None, :start]
        plain = target.generate(prompt, max_new_tokens=6, do_sample=False)[0]
        assert text.ids.tolist() == plain.tolist()  # it was cut off: there is no end
        assert text.learn.tolist() == [i >= start for i in range(len(plain))]


def scripted(tokenizer, script):
    """In place of `BatchedGenerator`: a target whose answers are known."""

    class Scripted:
        def __init__(self, *arguments):
            self.answers = iter(script)

        def run(self, take):
            while (request := take()) is not None:
                request.answer = templated.ids(tokenizer, next(self.answers))
                request.cut = request.answer[-1] != tokenizer.eos_token_id
                yield request

    return Scripted


ASKED = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
AGAIN = "\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|begin|><|head|>user\n\na<|eot_id|><|head|>assistant\n\n"
FINAL = "<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>x<|end|><|start|>assistant" + FINAL + "b<|return|>"


@pytest.mark.parametrize(
    ("kind", "script", "sequences"),
    [
        ("chatml", ("b<|im_end|>", "e"), [(ASKED + "b<|im_end|>" + AGAIN + "e", "b<|im_end|>e")]),
        (
            "strips earlier thinking",
            ("<think>x</think>b<|im_end|>", "<think>y</think>e<|im_end|>"),
            [
                (ASKED + "<think>x</think>b<|im_end|>", "<think>x</think>b<|im_end|>"),
                (ASKED + "b<|im_end|>" + AGAIN + "<think>y</think>e<|im_end|>", "<think>y</think>e<|im_end|>"),
            ],
        ),
        (
            "r1",
            ("x</think>b<end>", "y</think>e<end>"),
            [
                ("<User>a<Assistant><think>\nx</think>b<end>", "x</think>b<end>"),
                ("<User>a<Assistant>b<end><User>d<Assistant><think>\ny</think>e<end>", "y</think>e<end>"),
            ],
        ),
        (
            "llama 3",
            (" b\n<|eot_id|>", "e<|eot_id|>"),
            [
                (LLAMA + " b\n<|eot_id|>", " b\n<|eot_id|>"),
                (LLAMA + "b<|eot_id|><|head|>user\n\nd<|eot_id|><|head|>assistant\n\ne<|eot_id|>", "e<|eot_id|>"),
            ],
        ),
        ("gpt-oss", (THOUGHT,), [("<|start|>user<|message|>a<|end|><|start|>assistant" + THOUGHT, THOUGHT)]),
    ],
)
def test_what_the_target_read_and_wrote_is_kept_as_token_ids(kind, script, sequences, tmp_path, monkeypatch, recwarn):
    """However its chat template shows its answers: training reads the same ids."""
    tokenizer, out = templated.tokenizer(kind), tmp_path / "out.jsonl"
    monkeypatch.setattr("specdec.data.regenerate.BatchedGenerator", scripted(tokenizer, script))
    prompts = written(tmp_path / "prompts.jsonl", {"messages": templated.turns("a", "", "d")})
    regenerate(tiny.model("llama"), tokenizer, prompts, out, max_new_tokens=30)
    [line] = map(json.loads, lines(out))
    expected = [(templated.ids(tokenizer, whole), templated.ids(tokenizer, own)) for whole, own in sequences]
    for texts in (
        [(torch.tensor(kept["input_ids"]), torch.tensor(kept["loss_mask"]).bool()) for kept in line["sequences"]],
        [(text.ids, text.learn) for text in read_texts(out, tokenizer, 500)],
    ):
        assert [(ids.tolist(), ids[learn].tolist()) for ids, learn in texts] == expected
    said = [message["content"] for message in line["messages"] if message["role"] == "assistant"]
    assert said == [
        tokenizer.decode(templated.ids(tokenizer, answer)).removesuffix(tokenizer.eos_token) for answer in script
    ]
    early = [str(warning.message) for warning in recwarn if "conversations end before" in str(warning.message)]
    assert len(early) == (kind == "gpt-oss")  # its template takes no thinking in a later prompt
    assert all(message.startswith("1 ") and "channel tags" in message for message in early)
    assert not regenerate(tiny.model("llama"), tokenizer, prompts, out, max_new_tokens=30)  # nothing is left to answer


def test_regenerating_goes_on_where_it_stopped(files, tmp_path):
    asked(files)
    out = tmp_path / "out.jsonl"
    assert rewrite(files, out, "--temperature", "0", "--temperature", "1").exit_code == 0
    whole = out.read_text()
    first, *_ = whole.splitlines(keepends=True)
    out.write_text(first + whole[len(first) : len(first) + 20])  # killed in the middle of a line
    assert rewrite(files, out, "--temperature", "0", "--temperature", "1").exit_code == 0
    assert sorted(out.read_text().splitlines()) == sorted(whole.splitlines())
    assert out.read_text().startswith(first)
    assert rewrite(files, out, "--temperature", "0", "--temperature", "1", "--limit", "1").exit_code == 0
    assert sorted(out.read_text().splitlines()) == sorted(whole.splitlines())
    assert (
        "all prompts that can be answered had answers already"
        in rewrite(files, out, "--temperature", "0", "--temperature", "1").output
    )
    for changed in (["--temperature", "0.5"], ["--temperature", "0", "--temperature", "1", "--max-new-tokens", "3"]):
        result = rewrite(files, out, *changed)
        assert result.exit_code == 2
        assert "holds answers with" in result.output
    sliced = tmp_path / "sliced.jsonl"
    for answers in (2, 3):  # a batch at a time, however little time there is
        result = rewrite(files, sliced, "--temperature", "0", "--temperature", "1", "--max-minutes", "0")
        assert "so far: run the same command again to resume" in result.output or answers == 3
        assert 1 <= len(sliced.read_text().splitlines()) <= answers
        assert "had answers already" not in result.output
    assert set(sliced.read_text().splitlines()) <= set(whole.splitlines())
    for foreign in ("these are my notes\n", '{"mine": 1}', "[" * 100_000 + "\n"):
        (tmp_path / "notes.jsonl").write_text(foreign)
        result = rewrite(files, tmp_path / "notes.jsonl")
        assert result.exit_code == 2
        assert "is not a file of answers" in result.output
        assert (tmp_path / "notes.jsonl").read_text() == foreign
    written(files / "prompts.jsonl", {"prompt": "z"})
    result = rewrite(files, out, "--temperature", "0", "--temperature", "1")
    assert result.exit_code == 2
    assert "holds answers to other prompts" in " ".join(result.output.split())


def test_a_folder_may_be_spelled_in_several_ways(files, tmp_path, monkeypatch):
    asked(files)
    assert rewrite(files, tmp_path / "out.jsonl", "--limit", "1").exit_code == 0
    monkeypatch.chdir(files)
    result = rewrite(Path(), tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.output
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_two_runs_do_not_write_one_file(files, tmp_path):
    asked(files)
    out = tmp_path / "out.jsonl"
    with locked(tmp_path / ".out.jsonl.lock", out):
        result = rewrite(files, out)
    assert result.exit_code == 2
    assert f"another run is using {out}" in " ".join(result.output.split())
    assert rewrite(files, out).exit_code == 0


def test_what_comes_before_a_tool_call_is_answered(tokenizer, tmp_path):
    """The target may not make the same calls."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    question, result = {"role": "user", "content": "a"}, {"role": "tool", "content": "b"}
    conversations = [[question, call, result, question], [question, {"role": "assistant", "content": "x"}, question]]
    prompts = written(tmp_path / "prompts.jsonl", *({"messages": messages} for messages in conversations))
    regenerate(tiny.model("llama"), tokenizer, prompts, tmp_path / "out.jsonl", max_new_tokens=4)
    answered = {line["id"]: line["messages"] for line in map(json.loads, lines(tmp_path / "out.jsonl"))}
    assert [message["role"] for message in answered[0]] == ["user", "assistant"]
    assert [message["role"] for message in answered[1]][:2] == ["user", "assistant"]


def test_targets_that_cannot_answer(tokenizer, tmp_path):
    prompts, out = written(tmp_path / "prompts.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match="is an encoder-decoder model"):
        regenerate(encoded.model("t5"), tokenizer, prompts, out)
    with pytest.raises(ValueError, match="but the model has 4: use the model's own tokenizer"):
        regenerate(tiny.model("llama", vocab_size=4), tokenizer, prompts, out)


MINE = {"id": 0, "messages": [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "mine"}]}


@pytest.mark.parametrize("beside", ["", ".0.part"])
@pytest.mark.parametrize(
    "foreign",
    [
        json.dumps(MINE) + "\n" + json.dumps(MINE | {"id": 1}),  # no end of the last line
        json.dumps(MINE),
        json.dumps({"id": "one"} | MINE) + "\n",
        json.dumps(MINE | {"id": "one"}) + "\n",
        json.dumps(MINE | {"target": "another"}) + "\n" + '{"id": 1, "target": "anoth',
        json.dumps(MINE)[:-20],
    ],
)
def test_files_of_others_stay_as_they_are(files, tmp_path, foreign, beside):
    asked(files)
    path = tmp_path / f"out.jsonl{beside}"
    path.write_text(foreign)
    result = rewrite(files, tmp_path / "out.jsonl")
    assert result.exit_code == 2, result.output
    assert "choose another output file" in result.output.replace("\n", " ")
    assert path.read_text() == foreign
    assert [path.name] == [found.name for found in tmp_path.iterdir()]


def test_a_whole_answer_that_lacks_the_end_of_its_line_is_kept(files, tmp_path):
    asked(files)
    out = tmp_path / "out.jsonl"
    assert rewrite(files, out).exit_code == 0
    whole = out.read_text()
    out.write_text(whole[:-1])
    assert "all prompts that can be answered had answers already" in rewrite(files, out).output
    assert out.read_text() == whole


def test_parts_are_joined_beside_files_of_others_and_under_any_name(files, tmp_path):
    prompts, out, theirs = seven(tmp_path), tmp_path / "out[1].jsonl", tmp_path / "out[1].jsonl.joined"
    theirs.write_text("mine")
    for rank in (1, 0):
        in_part(files, out, rank, 2, prompts)
    assert [json.loads(line)["id"] for line in lines(out)] == list(range(7))
    assert theirs.read_text() == "mine"
    assert not list(tmp_path.glob("*.part"))


def seven(folder):
    """Prompts, some in several turns."""
    turns = [{"role": role, "content": text} for role, text in [("user", "a b"), ("assistant", "x"), ("user", "c")]]
    return written(folder / "prompts.jsonl", *({"prompt": "a " * n} for n in (5, 2, 9, 1)), *3 * [{"messages": turns}])


def in_part(files, out, rank, size, prompts, **more):
    """One process' part, in this one, where nobody else is waited for."""
    target, tokenizer = (
        AutoModelForCausalLM.from_pretrained(files / "model"),
        AutoTokenizer.from_pretrained(files / "model"),
    )
    options = {"temperatures": (0.0, 1.0), "max_new_tokens": 4, "batch_size": 2} | more
    return regenerate(target, tokenizer, prompts, out, share=(rank, size), **options)


def lines(path):
    return path.read_text().splitlines()


def test_processes_answer_their_parts_and_another_number_goes_on(files, tmp_path):
    """And one file is made of them, in the order of the prompts; whoever is killed on the way."""
    prompts, whole, out = seven(tmp_path), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    in_part(files, whole, 0, 1, prompts)
    for rank in (2, 1):
        in_part(files, out, rank, 3, prompts)
        assert len(lines(tmp_path / f"out.jsonl.{rank}.part")) == 2
    part = tmp_path / "out.jsonl.1.part"
    part.write_text(part.read_text()[:-20])  # killed in the middle of a line
    assert not out.exists()
    assert in_part(files, out, 0, 2, prompts, agree=lambda yes: False)  # not all were through: nothing is joined
    assert sorted(path.name for path in tmp_path.glob("out*")) == [f"out.jsonl.{rank}.part" for rank in (0, 1, 2)]
    assert in_part(files, out, 1, 2, prompts)
    assert not in_part(files, out, 0, 1, prompts)  # nothing is left to answer but the joining
    assert lines(out) == sorted(lines(whole), key=lambda line: json.loads(line)["id"])
    assert [path.name for path in tmp_path.glob("out*")] == ["out.jsonl"]


def test_no_more_prompts_are_read_than_are_answered_together(files, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.data.regenerate.AHEAD", 1)
    read, ahead = [], []

    class Prompts(list):
        def __iter__(self):
            for entry in super().__iter__():
                read.append(entry)
                yield entry

    prompts = Prompts({"prompt": "a b"} for _ in range(9))
    in_part(
        files, tmp_path / "out.jsonl", 0, 1, prompts, progress=lambda done, *rest: ahead.append(len(read) - 9 - done)
    )
    assert max(ahead) <= 4  # behind the 9 that were checked


def worker(rank, folder):
    files = Path((folder / "files.txt").read_text())
    return in_part(files, folder / "out.jsonl", rank, 2, folder / "prompts.jsonl", agree=_all_agree)


def _all_agree(yes):
    said = [None, None]
    torch.distributed.all_gather_object(said, yes)
    return all(said)


@pytest.mark.slow
def test_two_processes_write_the_answers_of_one(files, tmp_path):
    prompts = seven(tmp_path)
    in_part(files, tmp_path / "whole.jsonl", 0, 1, prompts)
    (tmp_path / "files.txt").write_text(str(files))
    assert all(together("tests.unit.data.test_regenerate:worker", tmp_path))
    assert lines(tmp_path / "out.jsonl") == sorted(lines(tmp_path / "whole.jsonl"), key=lambda x: json.loads(x)["id"])
    assert not list(tmp_path.glob("*.part"))


def test_prompts_of_about_one_length_are_answered_together(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.data.regenerate.AHEAD", 3)
    prompts = written(tmp_path / "prompts.jsonl", *({"prompt": "a " * n} for n in (5, 2, 9, 1, 8, 4, 7)))
    target = tiny.model("llama", num_hidden_layers=4)
    regenerate(target, tokenizer, prompts, tmp_path / "out.jsonl", batch_size=1, max_new_tokens=2)
    lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert [line["id"] for line in lines] == [1, 0, 2, 4, 5, 3, 6]  # three at a time, up, down, up


@pytest.mark.parametrize(("hardware", "computed"), [(False, torch.float32), (True, torch.bfloat16)])
def test_bfloat16_is_computed_in_only_where_the_cpu_can(tokenizer, tmp_path, monkeypatch, hardware, computed):
    asked(tmp_path)
    for part in (copy.deepcopy(tiny.model("llama")).to(torch.bfloat16), tokenizer):
        part.save_pretrained(tmp_path / "model")
    half = 1.0 if hardware else 10.0
    monkeypatch.setattr(
        "specdec.models.hardware.product_seconds", lambda dtype, rows: 2.0 if dtype == torch.float32 else half
    )
    monkeypatch.setattr("specdec.models.hardware.best_device", lambda: torch.device("cpu"))
    seen = []

    def answer(target, *arguments, **options):
        seen.append(target.dtype)
        return regenerate(target, *arguments, **options)

    monkeypatch.setattr("specdec.data.regenerate.regenerate", answer)
    assert rewrite(tmp_path, tmp_path / "out.jsonl", "--limit", "1").exit_code == 0
    assert seen == [computed]


def test_what_cannot_be_asked_is_named_and_the_rest_is_answered(files, tmp_path):
    """Also by a template that says so only when it is that conversation's turn; and nothing is asked twice."""
    strict = AutoTokenizer.from_pretrained(files / "model")
    strict.chat_template = "{% if messages[-1].content == 'z' %}{{ raise_exception('no z') }}{% endif %}" + (
        strict.chat_template
    )
    target = AutoModelForCausalLM.from_pretrained(files / "model")
    later = [{"role": "user", "content": "a"}, {"role": "user", "content": "z"}]
    prompts = written(
        tmp_path / "prompts.jsonl",
        {"prompt": "a b"},
        {"prompt": "\ud83d"},
        {"prompt": "z"},
        {"messages": later},
        {"prompt": "c " * 40},
        "null",
        {"prompt": "d"},
        "[]",
    )
    out = tmp_path / "out.jsonl"

    def again(**more):
        done = []
        with pytest.warns(UserWarning, match="were left out") as said:
            tokens = regenerate(
                target, strict, prompts, out, max_new_tokens=3, max_prompt_tokens=30,
                progress=lambda *counts: done.append(counts), **more
            )  # fmt: skip
        return tokens, [str(warning.message) for warning in said], done[-1]

    tokens, said, done = again()
    assert len(said) == 2
    assert re.fullmatch(
        r"3 of 8 prompts were left out:\n  .*line 2: it holds '\\ud83d', .*\n  .*line 6: .*\n  .*line 8: .*", said[0]
    )
    assert re.fullmatch(r"2 of 5 conversations were left out:\n  .*line 3: .*no z\n  .*line 5: .* 30 tokens", said[1])
    written_now = {line["id"]: len(line["messages"]) for line in map(json.loads, lines(out))}
    assert written_now == {0: 2, 3: 2, 6: 2}  # of the fourth the second question is refused
    assert tokens
    assert done[0] == done[1]
    before = out.read_text()
    assert again()[0] == 0
    assert out.read_text() == before
    out.unlink()
    with pytest.raises(ValueError, match=r"none of 1 conversations can be used:\n  .*line 1: .*no z"):
        regenerate(target, strict, written(prompts, {"prompt": "z"}), out)


def test_stop_strings_of_the_generation_config_end_answers(chat_tokenizer, tmp_path):
    target, prompts = copy.deepcopy(tiny.model("llama")), written(tmp_path / "prompts.jsonl", {"prompt": "abc"})

    def answer(name):
        regenerate(target, chat_tokenizer, prompts, tmp_path / name, max_new_tokens=9)
        return json.loads((tmp_path / name).read_text())["messages"][1]["content"]

    usual = answer("usual.jsonl")
    target.generation_config.stop_strings = usual[2]
    with pytest.warns(UserWarning, match="one at a time with plain .* StopStringCriteria"):
        assert answer("stopped.jsonl") == usual[: usual.index(usual[2]) + 1]


def test_the_template_is_told_what_entries_and_the_command_say(files, tmp_path):
    told = AutoTokenizer.from_pretrained(files / "model")
    whole = told.chat_template
    told.chat_template = "{% if think %}z {% endif %}" + whole
    told.save_pretrained(files / "model")
    own = {"chat_template_kwargs": {"think": False}, "tools": [{"name": "t"}]}
    written(files / "prompts.jsonl", {"prompt": "a b c"}, {"prompt": "a b c"} | own)
    out = tmp_path / "out.jsonl"
    try:
        result = rewrite(files, out, "--template", '{"think": true}')
        assert result.exit_code == 0, result.output
        lines = {line["id"]: line for line in map(json.loads, out.read_text().splitlines())}
        assert lines[0]["chat_template_kwargs"] == {"think": True}
        assert {name: lines[1][name] for name in own} == own
        first, second = (next(read_texts([lines[number]], told, 100)).ids.tolist() for number in (0, 1))
        assert first[0] == told.convert_tokens_to_ids("z") != second[0]
        assert (
            "all prompts that can be answered had answers already"
            in rewrite(files, out, "--template", '{"think": true}').output
        )
        result = rewrite(files, out)
        assert result.exit_code == 2
        assert "other chat template arguments" in result.output
        result = rewrite(files, out, "--template", "think")
        assert result.exit_code == 2
        assert "must be a JSON object" in result.output
    finally:
        told.chat_template = whole
        told.save_pretrained(files / "model")


@pytest.mark.parametrize("place", ["specdec.cli.data.load", "specdec.data.regenerate.regenerate"])
def test_ctrl_c_says_in_one_line_what_is_kept(files, tmp_path, monkeypatch, place):
    """While the model is loaded, and while it answers."""
    asked(files)
    out = tmp_path / "out.jsonl"

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(place, interrupted)
        first = rewrite(files, out)
    assert first.exit_code == 130
    assert first.stderr.splitlines()[-1] == (
        "stopped before the first answer, so nothing is kept: run the same command again to start over"
    )
    assert rewrite(files, out).exit_code == 0
    monkeypatch.setattr(place, interrupted)
    second = rewrite(files, out)
    assert second.exit_code == 130
    assert second.stderr.splitlines()[-1] == (
        f"stopped: the answers in {out} are kept, run the same command again to resume"
    )
