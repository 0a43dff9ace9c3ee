"""A target that another process runs teaches a head what the same one teaches that is loaded here."""

import copy
import json
import re
import signal
from contextlib import contextmanager
from threading import Thread
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import torch
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM

from specdec.models.loading import load as load_model
from specdec.training import precision, preparation
from specdec.training.initialization.eagle3 import initialize
from specdec.training.teacher import remote
from specdec.training.teacher.base import LocalTeacher, fingerprint
from specdec.training.teacher.remote import ServedTeacher
from specdec.training.teacher.state_server import Handler, StatesServer
from tests.support import tiny
from tests.support.training import losses, process, run

TAPS = (1, 2, 3)
NOT_DECODED = ["--evaluate-every", "0"]


@pytest.fixture(scope="module")
def target(files):
    return AutoModelForCausalLM.from_pretrained(files / "model").eval()


@contextmanager
def served(target, handler=Handler):
    """The address of a server."""
    server = StatesServer(target, ("127.0.0.1", 0))
    server.RequestHandlerClass = handler
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def same_runs(one, two):
    assert len(losses(one)) > 3
    assert losses(one) == losses(two)
    weights = [load_file(out / "head" / "model.safetensors") for out in (one, two)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] | weights[1])


@pytest.mark.parametrize("options", [["--kind", "eagle3"], ["--cache-states"], ["--kind", "dspark"]], ids=" ".join)
@pytest.mark.slow
def test_a_served_target_teaches_what_a_loaded_one_does(files, target, tmp_path, monkeypatch, options):
    """To the last digit; and it is not loaded."""
    options = [*NOT_DECODED, *options]
    assert run(files, tmp_path / "local", *options).exit_code == 0
    placed, load = [], preparation.load_model
    monkeypatch.setattr(preparation, "load_model", lambda name, **more: placed.append(load(name, **more)) or placed[-1])
    with served(target) as address:
        result = run(files, tmp_path / "served", *options, "--teacher", address)
    assert result.exit_code == 0, result.output
    same_runs(tmp_path / "local", tmp_path / "served")
    [here] = placed
    assert all(weight.is_meta for weight in here.parameters())


@pytest.mark.slow
def test_a_run_that_a_loaded_target_began_goes_on_with_a_served_one(files, target, tmp_path):
    """Where the target lies is no part of the recipe."""
    out = tmp_path / "out"
    assert (
        run(files, out, *NOT_DECODED, "--max-minutes", "0")
        .output.strip()
        .endswith("run the same command again to resume")
    )
    with served(target) as address:
        assert run(files, out, *NOT_DECODED, "--teacher", address).exit_code == 0
    assert run(files, tmp_path / "local", *NOT_DECODED).exit_code == 0
    same_runs(tmp_path / "local", out)


@pytest.mark.slow
def test_by_two_processes(files, tmp_path):
    """As they are called."""
    server = process(["-m", "specdec", "serve-states", str(files / "model"), "--port", "0", "--device", "cpu"])
    try:
        for line in server.stdout:
            if found := re.search(r"(http://localhost:\d+), target", line):
                break
        assert run(files, tmp_path / "served", *NOT_DECODED, "--teacher", found[1]).exit_code == 0
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130
    assert run(files, tmp_path / "local", *NOT_DECODED).exit_code == 0
    same_runs(tmp_path / "local", tmp_path / "served")


# What can go wrong


def teacher_of(address, target):
    return ServedTeacher(target, TAPS, address=address, fingerprint=fingerprint(target))


def texts(*lengths):
    return [torch.arange(1, 1 + length) for length in lengths]


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(remote, "RETRY_DELAY", 0.0)


class Faulty(Handler):
    """Answers to the first requests for states are cut off, or missing, or errors."""

    faults = ()

    def _answer(self, status, content, kind="text/plain"):
        fault = Faulty.faults.pop(0) if self.path == "/states" and Faulty.faults else None
        if fault == "cut off":
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
        elif fault == "too short":
            super()._answer(status, content[:20], kind)
        elif fault == "500":
            super()._answer(500, b"no memory is left")
        elif fault is None:
            super()._answer(status, content, kind)


@pytest.mark.slow
def test_a_line_that_drops_is_taken_up_again(files, target, tmp_path, no_pause):
    assert run(files, tmp_path / "local", *NOT_DECODED).exit_code == 0
    Faulty.faults = ["cut off", "no answer", "500", "too short", None, "no answer"]
    with served(target, Faulty) as address:
        result = run(files, tmp_path / "served", *NOT_DECODED, "--teacher", address)
    assert result.exit_code == 0, result.output
    assert Faulty.faults == []
    same_runs(tmp_path / "local", tmp_path / "served")


def test_an_error_that_stays_is_said(target, no_pause):
    Faulty.faults = ["500"] * remote.TRIES
    with served(target, Faulty) as address:
        teacher = teacher_of(address, target)
        with pytest.raises(
            ValueError, match="gives no states .no memory is left.: check that `specdec serve-states TARGET` is running"
        ):
            list(teacher.read(texts(5)))


def test_a_server_that_is_not_there_is_said_before_anything_is_read(files, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "load_model", lambda name, **more: 1 / 0)
    result = run(files, tmp_path / "out", *NOT_DECODED, "--teacher", "http://127.0.0.1:9")
    assert result.exit_code == 2
    assert re.search(
        r"http://127.0.0.1:9 gives no states \(.*refused.*\): check that `specdec serve-states", result.output
    )


def test_another_server_is_said(files, target, tmp_path):
    class Other(Handler):
        def do_GET(self):
            self._answer(200, b'["models"]')

    with served(target, Other) as address:
        result = run(files, tmp_path / "out", *NOT_DECODED, "--teacher", address)
    assert result.exit_code == 2
    assert "is not a server of states: it answers \"['models']\" to /target" in result.output.replace("\n", " ")


def test_another_target_is_said(files, target, tmp_path):
    other = tiny.model("llama", num_hidden_layers=4, seed=1)
    with served(other) as address:
        result = run(files, tmp_path / "out", *NOT_DECODED, "--teacher", address)
        teacher = teacher_of(address, other)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert f"serves another target than {files / 'model'}" in said
    assert f"weights is {fingerprint(other)}, here it is {fingerprint(target)}. Start `specdec serve-states" in said
    with served(target) as teacher._address, pytest.raises(ValueError, match="refuses .* is for another target"):
        list(teacher.read(texts(5)))  # it was started anew, with another one


def test_other_layers_are_said(target):
    class Fixed(Handler):
        """That gives the states of two layers, whatever is asked for."""

        def do_POST(self):
            self._parse_request()
            self._answer(200, save({"states": torch.zeros(5, 3 * 32)}))

    with served(target, Fixed) as address, pytest.raises(ValueError, match=r"gave states \(5, 96\), .* \(5, 128\)"):
        list(teacher_of(address, target).read(texts(5)))
    with served(target) as address:
        teacher = teacher_of(address, target)
        teacher.taps = (1, 9)
        with pytest.raises(
            ValueError, match="refuses to give states: LlamaForCausalLM has 4 layers: there is no tap 9"
        ):
            list(teacher.read(texts(5)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --evaluate-every 0 too"),
        ([*NOT_DECODED, "--kind", "mtp"], "--kind mtp needs the target here"),
        ([*NOT_DECODED, "--rounded-states", "--cache-states"], "--rounded-states needs the target here"),
        ([*NOT_DECODED, "--shard", "devices"], "--shard devices needs the target here"),
        (
            [*NOT_DECODED, "--teacher", "host:8100"],
            "--teacher must be an address such as http://host:8100; got 'host:8100'",
        ),
    ],
)
def test_what_wants_the_target_here_is_said(files, tmp_path, options, message):
    result = run(files, tmp_path / "out", "--teacher", "http://host:8100", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (b"{", "line 1 column"),
        (b"[]", 'expected {"taps": [1, 2], "texts": [[5, 6, 7]]}'),
        (b'{"taps": [1], "texts": []}', "no texts"),
        (b'{"taps": [1], "texts": [[]]}', "a text must have 1 to 1024 tokens"),
        (b'{"taps": [1], "texts": [[64]]}', "each from 0 to 63"),
        (b'{"taps": [1], "texts": [[-1]]}', "each from 0 to 63"),
        (b'{"taps": [9], "texts": [[1]]}', "there is no tap 9"),
    ],
)
def test_the_server_says_what_is_wrong(target, asked, message):
    with served(target) as address:
        with pytest.raises(HTTPError, match="400") as error:
            urlopen(f"{address}/states", asked)
        assert message in error.value.read().decode()
        assert json.loads(urlopen(f"{address}/target").read())["fingerprint"] == fingerprint(target)


def test_texts_are_asked_for_in_parts_and_come_in_their_order(target, monkeypatch):
    monkeypatch.setattr(remote, "TOKENS", 12)
    lengths = [5, 6, 20, 3, 9]
    with served(target) as address:
        found = dict(teacher_of(address, target).read(texts(*lengths)))
    expected = dict(LocalTeacher(target, TAPS).read(texts(*lengths)))
    assert sorted(found) == sorted(expected)
    for i, states in expected.items():
        torch.testing.assert_close(found[i], states)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_a_head_starts_out_from_weights_on_the_disk(target, tmp_path, monkeypatch, saved):
    """As it does from those in memory; where the CPU only emulates bfloat16, from both in float32."""
    monkeypatch.setattr(precision, "bfloat16_is_faster", lambda device: False)
    copy.deepcopy(target).to(saved).save_pretrained(tmp_path)
    heads = []
    for placed in ({}, {"device_map": {"": "disk"}}):
        model = precision.in_fastest_dtype(load_model(str(tmp_path), **placed), torch.device("cpu"))
        torch.manual_seed(0)
        heads.append(initialize(model, torch.arange(30)).state_dict())
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
