"""Ctrl-C, as a real signal to commands in processes of their own: exit code 130, no traceback, the report so far."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from threading import Thread

import pytest

from tests.support import tiny

# A shell may have started the tests with the signal ignored. Marks are printed behind the calls that are measured.
COMMAND = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
def mark(*module_and_name):
    from importlib import import_module
    of = getattr(import_module(module_and_name[0]), module_and_name[1])
    answer = of.answer
    def answered(self, *args, **kwargs):
        answer(self, *args, **kwargs)
        print("answered", file=sys.stderr, flush=True)
    of.answer = answered
if sys.argv[1] in ("bench", "doctor"):
    mark("specdec.evaluation.timing", "Runs")
if os.environ.get("STUCK"):  # the model computes for minutes, as in a long prompt
    from specdec import SpeculativeGenerator
    def generate(self, *args, **kwargs):
        print("computing", file=sys.stderr, flush=True)
        time.sleep(1000)
    SpeculativeGenerator.generate = generate
from specdec.__main__ import main
sys.argv[0] = "specdec"
main()
"""
PATIENCE = 120  # seconds
FOREVER = "100000"  # tokens
REPORT = "output tokens"


class Command:
    """A command that is running; what it prints is collected."""

    def __init__(self, *arguments, **environment):
        pipes = {
            "env": os.environ | environment,
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        self.process = subprocess.Popen([sys.executable, "-c", COMMAND, *map(str, arguments)], text=True, **pipes)
        self.said = {"stdout": "", "stderr": ""}
        self._threads = [Thread(target=self._collect, args=(name,), daemon=True) for name in self.said]
        for thread in self._threads:
            thread.start()

    def _collect(self, name):
        while character := getattr(self.process, name).read(1):
            self.said[name] += character

    def wait_for(self, condition):
        for _ in range(20 * PATIENCE):
            if condition(self):
                return
            assert self.process.poll() is None, self.said
            time.sleep(0.05)
        raise AssertionError(self.said)

    def interrupt(self, number=signal.SIGINT):
        self.process.send_signal(number)

    def end(self):
        """Exit code, and what was printed."""
        code = self.process.wait(PATIENCE)
        for thread in self._threads:
            thread.join()
        assert "Traceback" not in self.said["stderr"], self.said
        return code, self.said["stdout"], self.said["stderr"]


@pytest.fixture
def run():
    """`run(*arguments, **environment)`: a `Command`; those that a failing test leaves are ended."""
    started = []

    def start(*arguments, **environment):
        started.append(Command(*arguments, **environment))
        return started[-1]

    yield start
    for command in started:
        command.process.kill()
        command.process.wait()


@pytest.fixture
def chat_model(tmp_path, chat_tokenizer):
    tiny.model("llama", max_position_embeddings=200_000).save_pretrained(tmp_path / "chat")
    chat_tokenizer.save_pretrained(tmp_path / "chat")
    return tmp_path / "chat"


def words(count):
    return lambda command: len(command.said["stdout"].split()) >= count


def answers(count):
    return lambda command: command.said["stderr"].count("answered") >= count


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id=""),
        pytest.param(["--json"], id="json", marks=pytest.mark.slow),
        pytest.param(["--compare"], id="in plain decoding", marks=pytest.mark.slow),
    ],
)
def test_generate(run, files, options):
    command = run("generate", files / "model", "a b", "--max-new-tokens", FOREVER, "--dtype", "float32", *options)
    if "--compare" in options:  # plain decoding comes first, and prints nothing
        command.wait_for(lambda command: "maximum length" in command.said["stderr"])  # transformers', as it begins
        command.interrupt()
        assert command.end()[0] == 130
        return
    command.wait_for(words(20))
    command.interrupt()
    code, text, said = command.end()
    assert code == 130
    assert said.endswith("stopped\n")
    assert ('"num_failed_calls": 1' if options else REPORT) in said
    tokens = re.search(r'"num_output_tokens": (\d+)' if options else r"output tokens\s+(\d+)", said)
    assert int(tokens[1]) >= 20
    assert REPORT not in text


@pytest.mark.slow
def test_chat_goes_on_from_an_answer_and_ends_at_a_question(run, chat_model):
    command = run("chat", chat_model, "--proposer", "ngram", "--max-new-tokens", FOREVER, "--dtype", "float32")
    command.process.stdin.write("abc\n")
    command.process.stdin.flush()
    command.wait_for(lambda command: len(command.said["stdout"].partition("> ")[2]) > 20)
    command.interrupt()
    command.wait_for(lambda command: "the conversation continues" in command.said["stdout"])
    command.wait_for(lambda command: command.said["stdout"].endswith("> "))
    command.interrupt()
    code, text, _ = command.end()
    assert code == 130
    assert REPORT in text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "methods"), [("bench", 2), ("doctor", 5)])
def test_what_was_measured_is_said(run, files, tmp_path, name, methods):
    (tmp_path / "mine.txt").write_text("a b a b\n" * 50)
    options = ["--prompts", tmp_path / "mine.txt", "--limit", "50", "--max-new-tokens", "400", "--dtype", "float32"]
    command = run(name, files / "model", "ngram", *options)
    command.wait_for(answers(2 * methods))  # a call each that is not counted, and one prompt
    command.interrupt()
    code, text, said = command.end()
    assert code == 130
    assert said.endswith("stopped\n")
    assert re.match(r"measured on \d+ of 50 prompts of ", text)
    assert "\nplain" in text


@pytest.mark.slow
def test_bench_before_anything_was_measured(run, files):
    command = run("bench", files / "model", "ngram", "--max-new-tokens", FOREVER, "--dtype", "float32")
    command.wait_for(answers(1))
    command.interrupt()
    code, text, _ = command.end()
    assert (code, text) == (130, "")


@pytest.mark.slow
def test_regenerate(run, files, tmp_path):
    (tmp_path / "mine.txt").write_text("a b\n" * 5000)
    out = tmp_path / "out.jsonl"
    command = run("regenerate", files / "model", tmp_path / "mine.txt", out, "--max-new-tokens", "20")
    command.wait_for(lambda command: out.exists() and out.read_text().count("\n") > 2)
    command.interrupt()
    code, _, said = command.end()
    assert code == 130
    assert "run the same command again to resume" in said
    assert out.read_text().endswith("}\n")


@pytest.mark.slow
def test_train(run, files, tmp_path):
    options = ["--length", "32", "--epochs", "5000", "--held-out", "2", "--draft-vocab", "20", "--device", "cpu"]
    command = run("train", files / "model", files / "data.jsonl", tmp_path / "out", *options)
    command.wait_for(lambda command: "loss" in command.said["stdout"] + command.said["stderr"])
    command.interrupt()
    code, _, said = command.end()
    assert code == 130
    assert "run the same command again to resume from the last checkpoint" in said


@pytest.fixture
def serve(run, chat_model):
    """`serve(**environment)`: the command, ready, and a client; `ask(client)` asks it."""
    pytest.importorskip("fastapi")
    openai = pytest.importorskip("openai")

    def start(**environment):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        options = ["--proposer", "ngram", "--port", port, "--dtype", "float32", "--device", "cpu"]
        command = run("serve", chat_model, *options, **environment)
        command.wait_for(lambda command: "Uvicorn running" in command.said["stderr"])
        command.port = port
        return command, openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(client, **fields):
        fields = {"max_tokens": 4, "temperature": 0} | fields
        messages = [{"role": "user", "content": "abc"}]
        return client.chat.completions.create(model=str(chat_model), messages=messages, **fields)

    return start, ask


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_serve(serve, number, expected):
    start, ask = serve
    command, client = start()
    ask(client)
    stream = ask(client, stream=True, max_tokens=100_000)
    next(stream)
    command.interrupt(number)
    code, text, _ = command.end()
    assert code == expected
    assert text.count(REPORT) == 1
    stream.close()


def test_serve_on_a_port_in_use(run, chat_model):
    """It ends before torch is imported."""
    pytest.importorskip("fastapi")
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        code, text, said = run("serve", chat_model, "--proposer", "ngram", "--port", port).end()
    assert (code, text) == (2, "")
    assert said == f"error: port {port} of localhost is in use: choose another one with --port\n"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_serve_while_the_model_computes(serve, number, expected):
    """The process does not wait for a long prompt, or for the clients of it."""
    openai = pytest.importorskip("openai")
    start, ask = serve
    command, client = start(STUCK="1")

    def fail():
        with suppress(openai.APIError):
            ask(client)

    asked = Thread(target=fail, daemon=True)
    asked.start()
    command.wait_for(lambda command: "computing" in command.said["stderr"])
    command.interrupt(number)
    code, text, _ = command.end()
    assert code == expected
    assert text.count(REPORT) == 1
    asked.join(PATIENCE)


def test_while_the_commands_are_imported(monkeypatch):
    """As where the first import, of rich or typer, is interrupted."""
    from specdec.__main__ import main

    class Interrupted:
        def find_spec(self, name, *rest):
            if name == "specdec.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "specdec.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
