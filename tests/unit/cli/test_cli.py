"""What the commands say of bad input, before any work is done."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

import specdec
from specdec import SpeculativeGenerator
from specdec.cli import common
from specdec.cli.app import app
from specdec.cli.errors import PACKAGE
from specdec.heads.eagle3.export import save
from specdec.utils import releases
from tests.support import eagle3, tiny


def test_help_is_wrapped_to_the_terminal():
    """Not where the docstring's lines end: they are longer than a terminal of 80 columns."""
    for command in app.registered_commands:
        assert command.help
        assert "\n" not in command.help.replace("\n\n", "")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", "TARGET", "a", "--proposer", "ngrams"], 'proposer must be "ngram"'),
        (["generate", "/no/such/model", "a"], "/no/such/model is neither a folder with a model nor a hub"),
        (["generate", "TARGET", "a", "--dtype", "int3"], "'int3' is not one of 'auto', 'bfloat16'"),
        (["generate", "TARGET", "a", "--rule", "blok"], "'blok' is not one of 'coupled', 'block'"),
        (["generate", "TARGET", "a", "--proposer", "draft:/no/such"], "/no/such is neither a folder with a model"),
        (["doctor", "TARGET", "ngram", "--dtype", "int3"], "'int3' is not one of 'auto', 'bfloat16'"),
        (["bench", "TARGET", "ngram", "ngrams"], 'proposer must be "ngram"'),
        (["bench", "TARGET", "--chart", "OUT.bmp"], "OUT.bmp must end in one of .png, .svg, .pdf"),
        (["bench", "TARGET", "--chart", "/no/such/a.png"], "the folder /no/such for a.png does not exist"),
        (["bench", "TARGET", "--prompts", "TYPO"], "found 'promt'"),
        (["train", "TARGET", "PROMPTS", "OUT", "--loss", "l2"], "'l2' is not one of 'ce', 'lk'"),
        (["export", "/no/such", "OUT"], "/no/such is neither a folder"),
        (["inspect", "/no/such"], "/no/such is neither a folder"),
        (["doctor", "TARGET", "eagle"], 'did you mean "eagle3"?'),
        (["doctor", "TARGET", "draft"], '"draft" needs an argument, "draft:PATH_OR_ID"'),
        (["doctor", "TARGET", "ngram+ngram"], 'one of them is enough ("ngram")'),
        (["doctor", "TARGET", "ngram+suffix"], 'one of them is enough ("suffix")'),
        (["doctor", "TARGET", "ngram+eagel3:a"], 'did you mean "ngram+eagle3:a"?'),
        (["doctor", "TARGET", "exit:x"], 'the argument of "exit" must be a number of layers'),
        (["doctor", "TARGET", "some/model"], 'a prefix for its kind, "draft:some/model" (a model)'),
        (["doctor", "TARGET", "eagle3:OUT/head+ngram"], 'n-grams come first: "ngram+eagle3:OUT/head"'),
        (["doctor", "TARGET", "ngram", "--prompts", "EMPTY"], "empty.txt is empty: one prompt per line"),
        (["doctor", "TARGET", "ngram", "--prompts", "TYPO"], "found 'promt'"),
        (["regenerate", "TARGET", "TYPO", "OUT"], 'line 1: expected {"prompt": ...} or {"messages"'),
        (["regenerate", "TARGET", "NOTHING", "OUT"], 'object per line is expected, {"prompt": ...} or {"messages"'),
        (["regenerate", "TARGET", "BYTES", "OUT"], "bytes.jsonl is not text in UTF-8"),
        (["regenerate", "TARGET", "UNPACKED", "OUT"], "in a complete gzip file, as its name says"),
        (["train", "TARGET", "PROMPTS", "PROMPTS"], "prompts.jsonl is a file: give a folder"),
        (["train", "./nowhere", "PROMPTS", "OUT"], "./nowhere is neither a folder with a model nor a hub repository"),
        (["train", "TARGET", "PROMPTS", "OUT", "--from", "./nowhere"], "./nowhere is neither a folder"),
        (["export", "PROMPTS", "OUT"], "prompts.jsonl is a file: give the folder"),
        (
            ["regenerate", "TARGET", "PROMPTS", "OUT", "--template", '{"a": "\\ud800"}'],
            "--template must be a JSON object",
        ),
        (["regenerate", "PROMPTS", "MODEL", "OUT"], "is a model's folder, not texts: give the target first"),
        (["regenerate", "TARGET", "NESTED", "OUT"], "line 1 cannot be read: its JSON is nested too deeply"),
        (["regenerate", "TARGET", "PROMPTS", "OUT", "--template", "[" * 100_000], "--template must be a JSON object"),
        (["regenerate", "TARGET", "PROMPTS", "OUT", "--seed", str(2**70)], "Invalid value for '--seed': "),
        (["generate", "TARGET", "a", "--seed", str(2**70)], "Invalid value for '--seed': "),
        (["train", "TARGET", "PROMPTS", "OUT", "--seed", str(2**32)], "Invalid value for '--seed': "),
        (["train", "TARGET", "PROMPTS", "OUT", "--epochs", "inf"], "epochs must be a number above 0, got inf"),
        (["train", "TARGET", "PROMPTS", "OUT", "--flex", "--device", "cpu"], "is trained on CUDA devices only"),
        (["generate", "TARGET", "a", "--temperature", "1e-320"], "neither 0, which means greedy, nor at least 0.0001"),
        (["regenerate", "TARGET", "PROMPTS", "OUT", "--temperature", "inf"], "Invalid value for '--temperature': "),
        (["generate", "a" * 300, "a"], "File name too long"),
        (
            ["generate", "TARGET", "a", "--proposer", "exit:" + "9" * 300],
            'layers of at most 6 digits, write "exit:LAYERS"',
        ),
        (["bench", "TARGET", "--chart", "FOLDER"], "folder.png cannot be written: choose another file"),
        (["serve-states", "TARGET", "--port", "99999"], "Invalid value for '--port': "),
        (["serve", "TARGET", "--port", "-1"], "Invalid value for '--port': "),
    ],
)
def test_bad_input_is_said_before_a_model_is_loaded(command, message, tmp_path):
    contents = {
        "prompts.jsonl": b'{"prompt": "a"}',
        "empty.txt": b"\n",
        "nothing.jsonl": b"",
        "typo.jsonl": b'{"promt": "a"}',
        "bytes.jsonl": b"\xff\xff",
        "unpacked.gz": b'{"prompt": "a"}',
        "nested.jsonl": b"[" * 100_000,
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "folder.png").mkdir()
    names = [*contents, "out.jsonl", "model", "folder.png"]
    places = {Path(name).stem.upper(): str(tmp_path / name) for name in names}
    result = CliRunner().invoke(app, [places.get(word, word) for word in command])
    assert result.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", result.output)  # an error may stand in a frame


ASKED = ["inspect", "some/head"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("a head's config is wrong: correct it"), 2, "error: a head's config is wrong: correct it\n"),
        (PermissionError(13, "Permission denied", "/x"), 2, "error: [Errno 13] Permission denied: '/x'\n"),
        (
            KeyError("layers"),
            70,
            "unexpected error, KeyError: 'layers' (`specdec --debug inspect ...`, or SPECDEC_DEBUG=1,",
        ),
    ],
)
@pytest.mark.parametrize("debug", ["", "option", "environment"])
def test_an_error_ends_with_a_sentence(error, code, said, debug, monkeypatch):
    """Its traceback is for who asks for it."""

    def fails(*args):
        raise error

    monkeypatch.setattr("specdec.cli.heads.require_folder_or_id", fails)
    asked = ["--debug", *ASKED] if debug == "option" else ASKED
    result = CliRunner().invoke(app, asked, env={"SPECDEC_DEBUG": "1"} if debug == "environment" else {})
    assert result.exit_code == code
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert said in result.stderr
    assert ("Traceback" in result.stderr and "in fails" in result.stderr) == bool(debug)
    assert debug or len(result.stderr.splitlines()) == 1


def test_what_python_says_of_a_line_of_ours_is_unexpected(monkeypatch):
    """A ValueError that nobody raised on purpose is a fault of specdec's, not of the input."""
    ours = compile("def fails(*args): first, second = [1]", str(PACKAGE / "paths.py"), "exec")
    exec(ours, scope := {})
    monkeypatch.setattr("specdec.cli.heads.require_folder_or_id", scope["fails"])
    result = CliRunner().invoke(app, ASKED)
    assert result.exit_code == 70
    assert "unexpected error, ValueError: not enough values to unpack (expected 2, got 1)" in result.stderr


def test_nobody_reads_standard_output():
    """As in `specdec ... | head -1`: neither a traceback nor a word of it."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run([sys.executable, "-m", "specdec", "--version"], stdout=closed, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("proposer", ["draft", "ngram+draft"])
def test_target_and_draft_compute_in_the_format_asked_for(proposer, dtype, files, monkeypatch):
    """It is said in one line, beside the text."""
    made, begin = [], SpeculativeGenerator.__init__

    def noted(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(SpeculativeGenerator, "__init__", noted)
    model = str(files / "model")
    asked = ["generate", model, "a b", "--proposer", f"{proposer}:{model}", "--max-new-tokens", "4", "--dtype", dtype]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    [line] = [line for line in result.stderr.splitlines() if line.startswith("computing in ")]
    assert line == f"computing in {dtype} on {made[0].model.device}: as asked for"
    assert "computing in" not in result.stdout
    drafts = getattr(made[0].proposer, "other", made[0].proposer)
    assert str(made[0].model.dtype) == str(drafts.model.dtype) == f"torch.{dtype}"


def test_a_prompt_from_standard_input_and_a_report_as_json(files):
    """The text on standard output, all else on standard error."""
    asked = ["generate", str(files / "model"), "--json", "--compare", "--max-new-tokens", "8", "--dtype", "float32"]
    result = CliRunner().invoke(app, asked, input="a b a b")
    assert result.exit_code == 0, result.output
    report = next(json.loads(line) for line in result.stderr.splitlines() if line.startswith("{"))
    assert report["num_output_tokens"] == 8
    assert "num_output_tokens" not in result.stdout
    assert re.search(r"\dx plain decoding, .* tokens/s: (from one call each it is too noisy|next to)", result.stderr)
    assert "yes, token for token" in result.stderr


def test_a_comparison_stands_in_the_report(files):
    asked = ["generate", str(files / "model"), "a b a b", "--max-new-tokens", "8", "--dtype", "float32"]
    for options, rows in ([], 0), (["--compare"], 1), (["--compare", "--temperature", "1", "--seed", "3"], 1):
        lines = CliRunner().invoke(app, [*asked, *options]).stderr.splitlines()
        assert [line.split()[2:3] for line in lines if line.startswith("same text ")] == [["yes,"]] * rows
        assert len([line for line in lines if line.startswith("speed-up ")]) <= 1
        assert sum(line.startswith("output tokens ") for line in lines) == 1
    assert "drafts come from n-grams" in lines
    unseeded = CliRunner().invoke(app, [*asked, "--compare", "--temperature", "1"]).stderr
    assert "speed-up " in unseeded
    assert "same text " not in unseeded


def test_all_figures_are_printed_on_request(files):
    asked = ["generate", str(files / "model"), "a b a b", "--max-new-tokens", "8", "--dtype", "float32"]
    assert "mean acceptance length" not in CliRunner().invoke(app, asked).stderr
    assert "mean acceptance length" in CliRunner().invoke(app, [*asked, "--details"]).stderr


def test_an_answer_without_text_is_said(files, monkeypatch):
    """An empty line and an acceptance rate of 1.000, and nothing else, was once all there was."""
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.decode", lambda *args, **kwargs: "")
    asked = ["generate", str(files / "model"), "a b", "--max-new-tokens", "8", "--dtype", "float32"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "warning: the answer has no text: its 8 new tokens are special ones or decode to nothing" in result.stderr


@pytest.mark.parametrize("broken", [b"a \xff b", b"a \xed\xa0\x80"])  # the second is half of a character
@pytest.mark.parametrize("strict", [True, False])
def test_a_prompt_that_is_no_text_is_said_before_a_model_is_loaded(broken, strict, tmp_path):
    """Standard input takes any byte in the locale "C"."""
    environment = {"PYTHONIOENCODING": "utf-8" if strict else "utf-8:surrogateescape"}
    done = subprocess.run(
        [sys.executable, "-m", "specdec", "generate", "some/target"],
        input=broken,
        env=os.environ | environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
    )
    assert done.returncode == 2
    assert b"error: the prompt is not text in UTF-8: " in done.stderr


def test_the_same_seed_gives_the_same_text(files):
    def text(seed):
        asked = [
            "generate",
            str(files / "model"),
            "a b",
            "--temperature",
            "1",
            "--seed",
            str(seed),
            "--dtype",
            "float32",
        ]
        return CliRunner().invoke(app, [*asked, "--max-new-tokens", "24"]).stdout

    assert text(1) == text(1) != text(2)


def test_an_answer_of_one_token_has_no_passes_to_divide_by(tmp_path, chat_tokenizer):
    tiny.model("llama").save_pretrained(tmp_path)
    chat_tokenizer.save_pretrained(tmp_path)
    asked = ["chat", str(tmp_path), "--proposer", "ngram", "--max-new-tokens", "1", "--dtype", "float32"]
    result = CliRunner().invoke(app, asked, input="ab\n")
    assert "1 tokens in " in result.stdout
    assert "nan" not in result.stdout


def test_a_conversation(tmp_path, chat_tokenizer):
    tiny.model("llama").save_pretrained(tmp_path)
    chat_tokenizer.save_pretrained(tmp_path)
    asked = ["chat", str(tmp_path), "--proposer", "ngram", "--max-new-tokens", "5", "--dtype", "float32"]
    result = CliRunner().invoke(app, asked, input="abc\n\nno\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("5 tokens in ") == 2
    assert "10 in 2 calls" in result.stdout  # of the report at the end


def test_a_message_that_the_chat_template_refuses_ends_no_conversation(tmp_path, chat_tokenizer):
    tiny.model("llama").save_pretrained(tmp_path)
    strict = copy.deepcopy(chat_tokenizer)
    refusal = "{% if messages[-1]['content'] == 'abc' %}{{ raise_exception('not that') }}{% endif %}"
    strict.chat_template = refusal + strict.chat_template
    strict.save_pretrained(tmp_path)
    asked = ["chat", str(tmp_path), "--proposer", "ngram", "--max-new-tokens", "5", "--dtype", "float32"]
    result = CliRunner().invoke(app, asked, input="abc\nno\n")
    assert result.exit_code == 0, result.output
    assert "not that" in result.stderr
    assert result.stdout.count("5 tokens in ") == 1


@pytest.mark.parametrize("errors", ["surrogateescape", "strict"])
def test_a_line_that_is_no_text_ends_no_conversation(errors, tmp_path, chat_tokenizer, monkeypatch):
    tiny.model("llama").save_pretrained(tmp_path)
    chat_tokenizer.save_pretrained(tmp_path)
    lines = iter([b"abc", b"\xff", b"no"])

    def typed(console, prompt):
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line.decode(errors=errors)

    monkeypatch.setattr("rich.console.Console.input", typed)
    result = CliRunner().invoke(
        app, ["chat", str(tmp_path), "--proposer", "ngram", "--max-new-tokens", "5", "--dtype", "float32"]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.count("5 tokens in ") == 2
    assert (
        result.stderr.count("error: the text contains" if errors == "surrogateescape" else "bytes that are not text")
        == 1
    )


@pytest.fixture
def short(tmp_path, chat_tokenizer):
    """A model with 40 learned positions, and a tokenizer with a token that it lacks."""
    tiny.model("gpt2", max_position_embeddings=40).save_pretrained(tmp_path)
    longer = copy.deepcopy(chat_tokenizer)
    longer.add_tokens(["zebra"])
    longer.save_pretrained(tmp_path)
    return tmp_path


def said(result):
    return " ".join((result.output + result.stderr).split())


def test_a_text_that_the_model_cannot_read_is_an_error_before_it_is_run(short):
    usual = ["--proposer", "ngram", "--dtype", "float32", "--max-new-tokens"]
    for text, tokens, message in (
        ("ab", "60", "use --max-new-tokens 34 or less"),
        ("a" * 50, "4", "the model reads 40 at most: use a shorter one"),
        ("zebra", "4", f"it has token {tiny.VOCAB}, but the model has {tiny.VOCAB}"),
    ):
        result = CliRunner().invoke(app, ["generate", str(short), text, *usual, tokens])
        assert result.exit_code == 2, result.output
        assert message in said(result)


def test_a_turn_that_the_model_cannot_read_ends_no_conversation(short):
    asked = ["chat", str(short), "--proposer", "ngram", "--max-new-tokens", "30", "--dtype", "float32"]
    result = CliRunner().invoke(app, asked, input="ab\n" + "c" * 50 + "\nzebra\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("tokens in ") == 1
    assert "the model reads 40 at most" in said(result)
    assert f"it has token {tiny.VOCAB}" in said(result)


def test_an_error_of_the_model_ends_no_conversation(tmp_path, chat_tokenizer, monkeypatch):
    tiny.model("llama").save_pretrained(tmp_path)
    chat_tokenizer.save_pretrained(tmp_path)
    generate, calls = SpeculativeGenerator.generate, []

    def out_of_memory_at_first(self, *given, **options):
        calls.append(given)
        if len(calls) == 1:
            raise RuntimeError("not enough memory")
        return generate(self, *given, **options)

    monkeypatch.setattr(SpeculativeGenerator, "generate", out_of_memory_at_first)
    asked = ["chat", str(tmp_path), "--proposer", "ngram", "--max-new-tokens", "5", "--dtype", "float32"]
    result = CliRunner().invoke(app, asked, input="abc\nno\n")
    assert result.exit_code == 0, result.output
    assert "error: RuntimeError: not enough memory" in said(result)
    assert result.stdout.count("5 tokens in ") == 1


def test_prompts_that_the_model_cannot_read_are_not_measured(short):
    (short / "prompts.txt").write_text("ab\n" + "c" * 50 + "\n")
    for command in (["bench", str(short), "ngram"], ["doctor", str(short), "ngram"]):
        options = ["--prompts", str(short / "prompts.txt"), "--max-new-tokens", "8", "--repeats", "1"]
        with pytest.warns(UserWarning, match="1 of 2 prompts were left out"):
            result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 0, said(result)


def test_the_doctor_takes_so_many_of_its_own_prompts(files):
    asked = ["doctor", str(files / "model"), "ngram", "--max-new-tokens", "8", "--repeats", "1", "--limit", "1"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "measured on 1 prompts of the built-in ones" in said(result)


def test_a_model_that_cannot_chat(tmp_path, chat_tokenizer):
    tiny.model("llama").save_pretrained(tmp_path)
    untuned = copy.deepcopy(chat_tokenizer)
    untuned.chat_template = None
    untuned.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["chat", str(tmp_path), "--proposer", "ngram"])
    assert result.exit_code == 2
    assert "no chat template" in result.output


def test_version():
    said = CliRunner().invoke(app, ["--version"]).stdout
    assert said == f"specdec {specdec.__version__}, {releases.summary()}\n"
    assert f"torch {releases.installed('torch')} (tested: " in said


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("specdec re", {"regenerate"}),
        ("specdec doctor MODEL n", {"ngram", "ngram+dflash", "ngram+eagle3", "ngram+mtp", "ngram+draft:"}),
        ("specdec generate MODEL --proposer e", {"eagle3"}),
        ("specdec generate MODEL --rule t", {"token", "typical"}),
    ],
)
def test_a_shell_completes(words, offered, monkeypatch):
    monkeypatch.setenv("_SPECDEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    result = CliRunner().invoke(app, prog_name="specdec")
    assert {*result.stdout.split()} == offered


def test_completion_can_be_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # whatever runs the tests
    result = CliRunner().invoke(app, ["--install-completion"], prog_name="specdec")
    assert result.exit_code == 0, result.output
    assert "_SPECDEC_COMPLETE" in (tmp_path / ".bash_completions" / "specdec.sh").read_text()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"[]"),
        ("config.json", b"[" * 100_000),
        ("config.json", None),  # a field of another kind
        ("model.safetensors", b""),
        ("model.safetensors", b"\x10" + bytes(100)),
        ("tokenizer.json", b"[]"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("generation_config.json", b"3"),
    ],
)
def test_damaged_files_of_a_target_are_named(name, content, files, tmp_path):
    model = shutil.copytree(files / "model", tmp_path / "model")
    if content is None:
        content = (model / name).read_bytes().replace(b'"silu"', b"7")
    (model / name).write_bytes(content)
    result = CliRunner().invoke(app, ["generate", str(model), "a", "--proposer", "ngram"])
    assert result.exit_code == 2
    assert f"{model} cannot be read (" in result.stderr
    assert "it is damaged, or not of the expected type" in result.stderr


def test_export_keeps_what_lies_there(tmp_path):
    save(eagle3.head(), tmp_path / "head")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    asked = ["export", str(tmp_path / "head"), str(tmp_path / "out")]
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 2
    assert "is not empty: choose another folder, or overwrite the head in it with --force" in " ".join(
        refused.output.split()
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    assert CliRunner().invoke(app, [*asked, "--force"]).exit_code == 0
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_what_takes_long_is_said_a_line_each(files):
    asked = ["generate", str(files / "model"), "a b", "--proposer", f"draft:{files / 'model'}", "--max-new-tokens", "4"]
    result = CliRunner().invoke(app, asked)
    lines = result.stderr.splitlines()
    assert lines.count(f"loading {files / 'model'}") == 2  # the target, and the draft model
    assert any(line.startswith("probing whether LlamaForCausalLM can run draft trees") for line in lines)
    assert "loading" not in result.stdout


def test_a_generators_warning_is_one_line_without_the_place_in_a_library():
    """typer calls the command, so its file was named, with the warning's category."""
    assert common.summary("specdec: nothing was drafted", UserWarning, warnings.__file__, 1) == (
        "warning: nothing was drafted\n"
    )
