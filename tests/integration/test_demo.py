"""The demo on a tiny random model, through the real code path."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from examples.demo import __main__ as command
from examples.demo import room, weights
from examples.demo import show as show_module
from examples.demo.divergence import Divergence, diverge, first_difference
from examples.demo.loading import load, locate
from examples.demo.show import Run, Show, summary
from specdec import SpeculativeGenerator
from specdec.cli.streamer import ColourStreamer
from specdec.data.prompts import LIGHTHOUSE, PROMPTS, Prompt
from specdec.evaluation.methods import PLAIN
from specdec.evaluation.timing import Call, Speed
from specdec.models import hardware
from specdec.models.hardware import DTYPES, best_device, number_format
from specdec.utils.paths import located, require_folder_or_id


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, and one merge: every character that is not ASCII takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate([*alphabet, "ab", "<end>"])}
    inner = Tokenizer(models.BPE(vocab, merges=[("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        eos_token_id=257,
        pad_token_id=257,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def screen(colours=False):
    system = "standard" if colours else None
    console = Console(file=io.StringIO(), width=120, force_terminal=colours, color_system=system, highlight=False)
    return console, lambda: console.file.getvalue()


def stream(tokenizer, tokens, accepted=None, colours=False):
    console, text = screen(colours)
    streamer = ColourStreamer(tokenizer, console)
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for index, token in enumerate(tokens):
        if accepted is not None:
            streamer.on_accept(accepted[index])
        streamer.put(torch.tensor([token]))
    streamer.end()
    return text(), streamer


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("plain words\n  and lines", id="ascii"),
        pytest.param("Überraschung, naïve", id="two bytes"),
        pytest.param("漢字 and 🙂🙃", id="three and four bytes"),
        pytest.param("[bold]not markup[/bold] :smile:", id="markup"),
        pytest.param("", id="nothing"),
    ],
)
def test_the_streamed_text_is_the_decoded_text(tokenizer, text):
    assert stream(tokenizer, tokenizer(text).input_ids)[0] == text + "\n"


def test_the_streamer_hides_the_prompt_and_special_tokens_and_times_each_token(tokenizer):
    tokens = [*tokenizer("xyz").input_ids, tokenizer.eos_token_id]
    text, streamer = stream(tokenizer, tokens)
    assert text == "xyz\n"
    assert len(streamer.times) == 4
    assert streamer.times == sorted(streamer.times)


def test_an_unfinished_character_is_shown_at_the_end(tokenizer):
    assert stream(tokenizer, tokenizer("x🙂").input_ids[:-1])[0] == "x\ufffd\n"


@pytest.mark.parametrize(
    ("text", "accepted", "expected"),
    [
        pytest.param("xyz", [False, True, False], "x\x1b[32my\x1b[0mz\n", id="one of three"),
        pytest.param("xy", None, "xy\n", id="plain generate says nothing"),
        pytest.param("é", [True, True], "\x1b[32mé\x1b[0m\n", id="both bytes of a character"),
        pytest.param("é", [True, False], "é\n", id="one byte of a character"),
    ],
)
def test_accepted_tokens_are_coloured(tokenizer, text, accepted, expected):
    assert stream(tokenizer, tokenizer(text).input_ids, accepted, colours=True)[0] == expected


def test_specdec_tells_the_streamer_of_accepted_tokens(model, tokenizer):
    spec = SpeculativeGenerator(model, model, draft_length=3)  # its own draft: every draft is right
    inputs = tokenizer("hello", return_tensors="pt")
    console, text = screen(colours=True)
    streamer = ColourStreamer(tokenizer, console)
    output = spec.generate(**inputs, max_new_tokens=24, do_sample=False, streamer=streamer)
    assert len(streamer.times) == output.shape[1] - inputs.input_ids.shape[1]
    assert "\x1b[32m" in text()


@pytest.mark.parametrize(
    ("plain", "speculative", "expected"),
    [
        pytest.param([1, 2, 3], [1, 2, 3], None, id="same"),
        pytest.param([1, 2, 3], [1, 4, 3], 1, id="second differs"),
        pytest.param([1, 2], [1, 2, 3], 2, id="one is longer"),
        pytest.param([], [], None, id="both empty"),
    ],
)
def test_first_difference(plain, speculative, expected):
    assert first_difference(plain, speculative) == expected


def test_divergence_measures_the_gap_where_texts_part(model, tokenizer):
    prompt = tokenizer("hello", return_tensors="pt").input_ids
    assert diverge(model, prompt, [5, 6], [5, 6]) is None
    difference = diverge(model, prompt, [5, 6, 7], [5, 8, 7])
    logits = model(torch.cat([prompt, torch.tensor([[5]])], dim=1)).logits[0, -1]
    best = logits.topk(2).values
    assert (difference.index, difference.plain, difference.speculative) == (1, 6, 8)
    assert difference.top == pytest.approx(best[0].item(), rel=1e-5)
    assert difference.gap == pytest.approx((best[0] - best[1]).item(), rel=1e-3)


@pytest.mark.parametrize(
    ("gap", "near", "words"),
    [
        pytest.param(0.125, True, "in bfloat16 a pass over several tokens rounds differently", id="near tie"),
        pytest.param(3.0, False, "more than rounding in bfloat16 explains. Please report this", id="no tie"),
    ],
)
def test_divergence_explains_itself_in_one_line(tokenizer, gap, near, words):
    plain, other = tokenizer("xy").input_ids
    difference = Divergence(index=4, plain=plain, speculative=other, top=20.0, gap=gap)
    line = difference.explain(tokenizer, torch.bfloat16)
    assert difference.near_tie(torch.bfloat16) == near
    assert not difference.near_tie(torch.float32)
    assert line.startswith("texts diverge at token 5 ('x' or 'y')")
    assert words in line
    assert "\n" not in line
    assert "the end" in Divergence(4, None, other, 20.0, gap).explain(tokenizer, torch.bfloat16)


def test_speed_pools_runs():
    one = Call([[1, 2, 3]], seconds=4.0, times=[1.0, 2.0, 3.0])
    two = Call([[1]], seconds=2.0, times=[2.0])
    assert Speed.of([one, two]) == Speed(time_to_first_token=1.5, time_per_token=1.5, time_per_output_token=1.0)


def test_prompts_are_three_kinds_and_fit_any_tokenizer(tokenizer):
    assert [prompt.name for prompt in PROMPTS] == ["code", "explain", "rewrite"]
    assert 120 <= len(LIGHTHOUSE.split()) <= 180
    assert tokenizer.decode(PROMPTS[1].encode(tokenizer)["input_ids"][0]) == PROMPTS[1].text
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:"
    try:
        assert tokenizer.decode(Prompt("x", "hi").encode(tokenizer)["input_ids"][0]) == "<user>hi:"
    finally:
        tokenizer.chat_template = None


def test_show_compares_every_method_on_every_prompt(model, tokenizer):
    console, text = screen()
    generators = {"ngram": SpeculativeGenerator(model, "ngram"), "draft": SpeculativeGenerator(model, model)}
    prompts = (Prompt("one", "hello hello hello"), Prompt("two", "ab ab ab"))
    runs = Show(model, tokenizer, generators, console, max_new_tokens=16).run(prompts)
    assert [(run.prompt, run.method) for run in runs] == [
        (prompt, method) for prompt in ("one", "two") for method in (PLAIN, "ngram", "draft")
    ]
    for first in (0, 3):  # float32: the same tokens
        assert runs[first].tokens == runs[first + 1].tokens == runs[first + 2].tokens
    table = [line.split() for line in text().splitlines()]
    pooled = next(index for index, words in enumerate(table) if words[:2] == ["all", PLAIN])
    assert [words[:2] for words in table[pooled + 1 : pooled + 3]] == [["ngram", "yes"], ["draft", "yes"]]
    assert "please report" not in text().lower()


@pytest.mark.parametrize("finished", [0, 1, 2, 4])
def test_ctrl_c_ends_with_the_table_of_what_was_finished(model, tokenizer, monkeypatch, finished):
    """Two prompts, three methods; the call that is interrupted has shown some of its text."""
    console, text = screen()
    generators = {"ngram": SpeculativeGenerator(model, "ngram"), "draft": SpeculativeGenerator(model, model)}
    time_call, done = show_module.time_call, []

    def interrupted(method, inputs, streamer=None, **rest):
        if streamer is not None and len(done) == finished:
            streamer.put(inputs["input_ids"])
            streamer.put(torch.tensor([104]))
            raise KeyboardInterrupt
        call = time_call(method, inputs, streamer, **rest)
        done.extend([] if streamer is None else [call])
        return call

    monkeypatch.setattr(show_module, "time_call", interrupted)
    prompts = (Prompt("one", "hello hello hello"), Prompt("two", "ab ab ab"))
    with pytest.raises(KeyboardInterrupt):
        Show(model, tokenizer, generators, console, max_new_tokens=16).run(prompts)
    _, stopped, rest = text().partition(f"\nstopped after {finished} of 6 texts\n")
    assert stopped
    pooled = re.split(r"^ *all ", rest, flags=re.M)[1:]
    assert len(pooled) == bool(finished)
    assert [method for method in (PLAIN, "ngram", "draft") if pooled and method in pooled[0].split()] == [
        PLAIN,
        "ngram",
        "draft",
    ][:finished]


def test_the_demo_says_how_long_it_takes(model, tokenizer):
    console, text = screen()
    Show(model, tokenizer, {"ngram": SpeculativeGenerator(model, "ngram")}, console, max_new_tokens=9).run(PROMPTS[:1])
    assert re.search(r"^2 texts of 9 tokens, up to \d+ (seconds|minutes)\. Ctrl-C", text(), re.M)


@pytest.mark.parametrize(
    ("first", "later", "tokens"),
    [
        pytest.param(1.0, 0.05, 128, id="fast"),
        pytest.param(2.6, 0.25, 56, id="slow"),
        pytest.param(40.0, 9.0, 24, id="hopeless: long enough to see something"),
    ],
)
def test_a_slow_machine_writes_shorter_texts(first, later, tokens):
    assert show_module._fitting(300 / 18, Speed(first, 9.0, later)) == tokens


def test_the_demo_writes_what_fits_unless_told(model, tokenizer, monkeypatch):
    monkeypatch.setattr(show_module, "_fitting", lambda seconds, plain: 24)
    console, text = screen()
    runs = Show(model, tokenizer, {"ngram": SpeculativeGenerator(model, "ngram")}, console).run(PROMPTS[:1])
    assert all(len(run.tokens) <= 24 for run in runs)
    assert "2 texts of 24 tokens" in text()


def test_the_table_fits_a_terminal():
    runs = [
        Run(method, "explain", Call([[1, 2]], 4.0, [1.0, 1.2])) for method in (PLAIN, "ngram+eagle3", "ngram+draft")
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary(runs))
    shown = console.export_text()
    assert "ngram+eagle3" in shown
    assert "…" not in shown


def test_a_difference_is_shown_and_explained(model, tokenizer):
    show = Show(model, tokenizer, {}, screen()[0], max_new_tokens=8)
    prompt = Prompt("one", "hello")
    plain = Run(PLAIN, "one", Call([[5, 6]], 1.0, [0.5, 1.0]))
    other = Run("ngram", "one", Call([[5, 7]], 1.0, [0.5, 1.0]))
    (line,) = show._explain([prompt], [plain, other])
    assert line.startswith("one, ngram: texts diverge at token 2")


def test_near_ties_are_explained_once_and_before_the_table(model, tokenizer, monkeypatch):
    monkeypatch.setattr(show_module, "diverge", lambda *texts: Divergence(3, 5, 6, 20.0, 0.0))
    console, text = screen()
    generators = {"ngram": SpeculativeGenerator(model, "ngram"), "draft": SpeculativeGenerator(model, model)}
    Show(model, tokenizer, generators, console, max_new_tokens=8).run((Prompt("one", "hello"), Prompt("two", "ab ab")))
    shown = " ".join(text().split())
    assert shown.count("near tie") == 1
    assert shown.index('"no" under "same tokens": 4 texts differ') < shown.index("Plain and speculative decoding")


def test_a_pipe_is_told_nothing_of_colours(model, tokenizer):
    for colours in (True, False):
        console, text = screen(colours)
        Show(model, tokenizer, {}, console, max_new_tokens=4).run(PROMPTS[:1])
        assert ("Accepted draft tokens are" in text()) == colours


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            ("", "", True),
            (
                weights.TARGET,
                ["ngram+eagle3", f"ngram+draft:{weights.DRAFT}", "eagle3", f"draft:{weights.DRAFT}", "ngram"],
            ),
            id="pair",
        ),
        pytest.param(("", "", False), (weights.DRAFT, ["ngram+eagle3", "eagle3", "ngram"]), id="default"),
        pytest.param(("some/model", "", False), ("some/model", ["ngram"]), id="another target"),
        pytest.param(("", "ngram", False), (weights.DRAFT, ["ngram"]), id="one proposer"),
        pytest.param(("some/model", "eagle3:x", False), ("some/model", ["eagle3:x"]), id="both"),
    ],
)
def test_choose(options, expected):
    assert command.choose(*options) == expected


def test_only_our_own_weights_are_fetched(monkeypatch, tmp_path):
    drafts = [f"ngram+draft:{weights.DRAFT}", f"draft:{weights.DRAFT}", "ngram"]
    assert command.own_weights(weights.TARGET, *drafts) == [weights.TARGET, weights.DRAFT]
    assert command.own_weights("some/model", "draft:other/model") == []
    monkeypatch.setattr(weights, "fetch", lambda name: tmp_path / name)
    assert locate(weights.DRAFT) == str(tmp_path / weights.DRAFT)
    assert locate("some/model") == "some/model"


@pytest.mark.parametrize(
    ("exact", "half", "best", "why"),
    [
        pytest.param(
            {1: 2.0, 8: 2.4},
            {1: 1.0, 8: 5.0},
            torch.float32,
            "faster than bfloat16 here (a test layer takes 4.4 ms, in bfloat16 6)",
            id="drafts are dear in bfloat16",
        ),
        pytest.param(
            {1: 2.0, 8: 2.0},
            {1: 1.0, 8: 1.0},
            torch.bfloat16,
            "faster than float32 here (a test layer takes 2 ms, in float32 4)",
            id="bfloat16 hardware",
        ),
        pytest.param(
            {1: 0.98, 8: 0.98},
            {1: 1.0, 8: 1.0},
            torch.bfloat16,
            "as fast as float32 here, in half the memory (a test layer takes 2 ms, in float32 1.96)",
            id="not worth its memory",
        ),
    ],
)
def test_the_number_format_is_the_one_measured_to_be_fastest(monkeypatch, exact, half, best, why):
    table = {torch.float32: exact, torch.bfloat16: half}
    monkeypatch.setattr(hardware, "product_seconds", lambda dtype, rows: table[dtype][rows] / 1e3)
    cpu = torch.device("cpu")
    assert hardware.best_dtype(cpu) == hardware.computed_in(torch.bfloat16, cpu) == best
    assert hardware.computed_in(torch.float16, cpu) == torch.float16
    assert hardware.summary(cpu) == why


def test_other_programs_do_not_decide_the_number_format(monkeypatch):
    """They interrupt most products for the same time, next to which the formats look alike."""
    quiet = {torch.float32: 2e-3, torch.bfloat16: 1e-3}
    monkeypatch.setattr(hardware, "product_times", lambda dtype, rows: [[quiet[dtype], 8e-3], [9e-3, 8e-3]])
    hardware.product_seconds.cache_clear()
    try:
        assert hardware.product_seconds(torch.bfloat16, 1) == 1e-3
        assert hardware.best_dtype(torch.device("cpu")) == torch.bfloat16
    finally:
        hardware.product_seconds.cache_clear()


def test_the_number_format_is_found_by_the_clock_or_given():
    assert hardware.best_dtype(torch.device("cpu")) in (torch.bfloat16, torch.float32)
    assert number_format("float16", best_device()) == DTYPES["float16"]
    with pytest.raises(ValueError, match="dtype must be one of 'auto', 'bfloat16', 'float16', 'float32', got 'int3'"):
        number_format("int3", best_device())


@pytest.mark.parametrize(
    ("asked", "saved", "numbers", "chosen", "why"),
    [
        pytest.param("auto", "bfloat16", 10, "float32", "faster than bfloat16 here", id="the clock's"),
        pytest.param(
            "auto", "bfloat16", 10**9, "bfloat16", "as saved: float32 takes 2.0 GB more, 1.0 GB", id="no room"
        ),
        pytest.param("auto", "float32", 10, "float32", "as saved", id="saved in another"),
        pytest.param("auto", "float16", 10, "float16", "as saved", id="in half precision"),
        pytest.param("bfloat16", "float32", 10, "bfloat16", "as asked for", id="asked for"),
    ],
)
def test_the_number_format_for_weights_and_why(monkeypatch, asked, saved, numbers, chosen, why):
    table = {torch.float32: 0.002, torch.bfloat16: 0.004}
    monkeypatch.setattr(hardware, "product_seconds", lambda dtype, rows: table[dtype])
    monkeypatch.setattr(hardware, "available_memory", lambda: 10**9)
    found = hardware.format_for(asked, DTYPES[saved], torch.device("cpu"), numbers)
    assert found[0] == DTYPES[chosen]
    assert re.match(why, found[1])


def test_load_gives_the_asked_number_format(folder):
    loaded, tokenizer = load(folder, "float32")
    assert loaded.dtype == torch.float32
    assert not loaded.training
    assert tokenizer("ab").input_ids == [256]


@pytest.mark.parametrize("kind", ["draft", "ngram+draft"])
def test_the_command_runs_on_any_folder(folder, kind):
    arguments = ["--target", folder, "--proposer", f"{kind}:{folder}", "--max-new-tokens", "8", "--dtype", "float32"]
    result = CliRunner().invoke(command.app, arguments)
    assert result.exit_code == 0, result.output
    assert "float32 on" in result.output
    assert "Plain and speculative decoding" in result.output


def test_a_picture_has_long_lines_whole(tokenizer):
    console = Console(file=io.StringIO(), width=10, record=True, highlight=False)
    streamer = ColourStreamer(tokenizer, console)
    streamer.put(torch.tensor([[1]]))  # the prompt
    for token in tokenizer("one line of 25 characters\nand the next").input_ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    shown = console.export_text().splitlines()
    assert shown == ["one line o", "f 25 chara", "cters", "and the ne", "xt"]


def test_the_command_keeps_a_picture_of_one_prompt(folder, tmp_path):
    picture = tmp_path / "a" / "demo.svg"
    arguments = ["--target", folder, "--proposer", "ngram", "--max-new-tokens", "8", "--dtype", "float32"]
    result = CliRunner().invoke(command.app, [*arguments, "--prompt", "rewrite", "--svg", str(picture)])
    assert result.exit_code == 0, result.output
    shown = picture.read_text(encoding="utf-8")
    assert "</svg>" in shown
    assert "rewrite:&#160;specdec,&#160;ngram" in shown
    assert "explain" not in shown
    assert f"specdec:&#160;{Path(folder).name}" in shown


def test_the_command_says_what_is_missing_before_it_downloads(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(room, "free_disk", lambda folder: 10**9)
    monkeypatch.setattr(weights, "fetch", lambda *arguments: pytest.fail("a download was begun"))
    result = CliRunner().invoke(command.app, ["--pair"])
    assert result.exit_code == 1
    assert "missing" in result.output
    assert "make demo`, without PAIR=1" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        pytest.param(["--proposer", "nonsense"], "nonsense", 2, id="proposer"),
        pytest.param(["--dtype", "int3"], "int3", 1, id="dtype"),
    ],
)
def test_the_command_names_a_wrong_option(folder, arguments, words, code):
    result = CliRunner().invoke(command.app, ["--target", folder, *arguments])
    assert result.exit_code == code
    assert words in result.output


@pytest.mark.slow
def test_the_demo_as_a_program(folder):
    arguments = ["--target", folder, "--max-new-tokens", "8", "--dtype", "float32"]
    result = subprocess.run(
        [sys.executable, "-m", "examples.demo", *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "ngram" in result.stdout


@pytest.mark.slow
@pytest.mark.model
def test_the_small_model_writes_the_same_text():
    path = weights.cached(weights.DRAFT)
    if path is None:
        pytest.skip(f"needs `python -m examples.demo.weights {weights.DRAFT}`")
    loaded, tokenizer = load(str(path), "float32")
    spec = SpeculativeGenerator(loaded, "ngram")
    inputs = PROMPTS[2].encode(tokenizer)
    arguments = {**inputs, "max_new_tokens": 24, "do_sample": False}
    assert torch.equal(loaded.generate(**arguments), spec.generate(**arguments))
    assert spec.last_report.num_accepted_tokens > 0


def test_a_machine_that_others_use_is_told_from_a_free_one(monkeypatch):
    """Threads that wait for a taken core make every product slow; one thread is not slowed."""
    before = torch.get_num_threads()
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
    torch.set_num_threads(2)
    try:
        for with_both, said in ((8e-3, True), (4e-4, False)):
            taken = {2: with_both, 1: 6e-4}
            monkeypatch.setattr(
                hardware, "product_times", lambda dtype, rows, taken=taken: [[taken[torch.get_num_threads()]]]
            )
            words = hardware.crowded(torch.device("cpu"))
            assert ("OMP_NUM_THREADS=1" in words) == said
            assert torch.get_num_threads() == 2
        assert not hardware.crowded(torch.device("meta"))
        torch.set_num_threads(1)
        assert not hardware.crowded(torch.device("cpu"))
        torch.set_num_threads(3)  # its own threads, of which `warn_of_excess_threads` warns
        assert not hardware.crowded(torch.device("cpu"))
    finally:
        torch.set_num_threads(before)


def test_models_that_were_fetched_go_by_their_names(monkeypatch, tmp_path):
    for folder in (tmp_path / "cache" / "fetched", tmp_path / "home" / "mine"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert located("fetched") == str(tmp_path / "cache" / "fetched")
    assert located("~/mine") == str(tmp_path / "home" / "mine")
    require_folder_or_id("~/mine")
    for name in ("other", "org/fetched", "./mine"):
        assert located(name) == name
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fetched").mkdir()  # a folder here goes first
    assert located("fetched") == "fetched"
