"""A capture leaves other devices, threads, streams and generators alone, on a pretended or a real CUDA device.

python -m pytest --device pretend tests/unit/models/test_graph_capture.py    # or --device cuda
"""

import gc
import threading

import pytest
import torch

from specdec import DraftModelProposer, SpeculativeGenerator
from specdec.models.cuda_graphs import WARM, KnownFunctions, Recorder
from specdec.models.graph_capture import capturing
from specdec.utils.device_copies import sent, uploaded
from tests.support import launches, pretend, tiny

pytestmark = pytest.mark.skipif(tiny.DEVICE == "cpu", reason="pytest --device pretend, or cuda")
PRETENDED = not torch.cuda.is_available()
pretended_only = pytest.mark.skipif(not PRETENDED, reason="the pretended device says more")


def numbers() -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([1.0, 2.0]).to("cuda")}


def recorded(function, recorder: Recorder) -> list[float]:
    return [recorder(0, "key", function, numbers())["y"].tolist() for _ in range(WARM + 3)][-1]


def doubled(x):
    return {"y": x * 2}


def waiting(x):
    return {"y": x + float(x.sum())}


def captured(function, given):
    with capturing(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.Stream("cuda")):
        given.add(1)
        function(given)


# Another device than the current one


@pytest.fixture
def second_device(monkeypatch):
    """All tensors on "cuda" are on cuda:1, while the current device is cuda:0."""
    monkeypatch.setattr(pretend, "DEVICE", torch.device("cuda", 1))
    seen = {"events": [], "captures": []}
    record, begin = pretend.Event.record, pretend.CUDAGraph.capture_begin

    def recording(self, stream=None):
        record(self, stream)
        seen["events"].append(self.device.index)

    def beginning(self, **kwargs):
        begin(self, **kwargs)
        seen["captures"].append((torch.cuda.current_device(), self.stream.device.index))

    monkeypatch.setattr(pretend.Event, "record", recording)
    monkeypatch.setattr(pretend.CUDAGraph, "capture_begin", beginning)
    return seen


@pretended_only
@pytest.mark.parametrize("name", ["ngram", "eagle3 chain"])
def test_a_model_on_another_device_than_the_current_one(name, second_device, monkeypatch):
    """An event of the current device is over before the copy on the model's has begun."""
    monkeypatch.setattr(launches, "models", launches.models.__wrapped__)
    spec, given = launches.generator(name, automatic=False), launches.prompts(1)
    spec.compile = "auto"
    wanted = spec.model.generate(**given, do_sample=False, max_new_tokens=30).tolist()
    assert torch.cuda.current_device() == 0
    assert spec.generate(**given, do_sample=False, max_new_tokens=30).tolist() == wanted
    assert set(second_device["events"]) == {1}
    assert set(second_device["captures"]) == {(1, 1)}
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(PRETENDED or torch.cuda.device_count() < 2, reason="two CUDA devices")
@pytest.mark.parametrize("compile", [False, "auto"])
def test_a_model_on_the_second_device(compile):
    target = tiny.on_host("llama").to("cuda:1")
    given = {name: tensor.to("cuda:1") for name, tensor in tiny.prompts(9).items()}
    spec = SpeculativeGenerator(target, "ngram", draft_length=4, compile=compile)
    settings = {"do_sample": False, "max_new_tokens": 60}
    assert torch.equal(spec.generate(**given, **settings), target.generate(**given, **settings))


@pretended_only
def test_work_that_runs_instead_of_being_captured_is_seen(monkeypatch):
    """As that of another device: the graph is empty, and its replays do nothing."""
    monkeypatch.setattr(pretend.CUDAGraph, "replay", lambda self: None)
    recorder = Recorder()
    with tiny.specdec_warnings() as warned:
        assert recorded(doubled, recorder) == [2.0, 4.0]
    assert "a replay gave different values of y" in warned[0]


# Streams, generators and threads


def test_a_failed_capture_leaves_stream_and_generator_as_they_were():
    before = torch.cuda.current_stream()
    with tiny.specdec_warnings() as warned:
        assert recorded(waiting, Recorder()) == [4.0, 5.0]
    assert len(warned) == 1
    assert torch.cuda.current_stream() == before
    assert torch.rand(1, device="cuda").device.type == "cuda"
    assert recorded(doubled, Recorder()) == [2.0, 4.0]


def test_a_failed_capture_is_ended_for_the_allocator_too(monkeypatch):
    """torch up to 2.12 raises before it does so."""
    end, told = pretend.CUDAGraph.capture_end, []

    def broken(self):
        end(self)
        raise RuntimeError("the capture was invalidated")

    monkeypatch.setattr(pretend.CUDAGraph, "capture_end", broken)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: told.append(given), raising=False)
    with tiny.specdec_warnings():
        assert recorded(waiting, Recorder()) == [4.0, 5.0]
    assert [device for device, _ in told] == [0]


def test_what_could_not_be_captured_is_not_tried_again():
    known, tries = KnownFunctions(), []

    def odd(x):
        tries.append(1)
        return waiting(x)

    with tiny.specdec_warnings() as warned:
        recorded(odd, Recorder(known))
        tries.clear()
        recorded(odd, Recorder(known))
    assert len(warned) == 1
    assert len(tries) == WARM + 3


def test_each_recorder_captures_on_a_stream_of_its_own():
    recorders = [Recorder(), Recorder()]
    for recorder in recorders:
        recorded(doubled, recorder)
    assert recorders[0]._stream != recorders[1]._stream
    assert torch.cuda.current_stream() not in [recorder._stream for recorder in recorders]


def test_a_stream_is_used_again_once_its_recorder_is_gone():
    first, second = Recorder(), Recorder()
    for recorder in (first, second):
        recorded(doubled, recorder)
    stream, others = first._stream, second._stream
    first.clear()
    del first, recorder
    gc.collect()
    third = Recorder()
    recorded(doubled, third)
    assert third._stream == stream != others


def test_a_known_function_runs_before_it_is_captured_once_the_models_have_changed():
    known, runs = KnownFunctions(), []
    recorded(doubled, Recorder(known, "before"))

    def counted(x):
        runs.append(torch.cuda.is_current_stream_capturing())
        return doubled(x)

    recorded(counted, Recorder(known, "after"))
    assert runs == [False] * (WARM + 1) + [True]
    runs.clear()
    recorded(counted, Recorder(known, "before"))
    assert runs == [True]


def test_two_threads_capture_one_after_the_other():
    """The second waits for the first, which waits until the second has come to its capture, or a second has passed."""
    begun, arrived, texts, errors = threading.Event(), threading.Event(), {}, []

    def first(x):
        if torch.cuda.is_current_stream_capturing():
            begun.set()
            arrived.wait(timeout=1)
        return doubled(x)

    def second(x):
        if len(runs) == WARM + 1:
            arrived.set()
        runs.append(1)
        return doubled(x)

    runs: list[int] = []

    def run(name, function):
        try:
            recorder = Recorder()
            texts[name] = recorded(function, recorder), len(recorder), recorder.refused
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=("first", first))]
    threads[0].start()
    begun.wait(timeout=60)
    threads.append(threading.Thread(target=run, args=("second", second)))
    threads[1].start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors
    assert texts == dict.fromkeys(("first", "second"), ([2.0, 4.0], 1, ""))


def test_another_thread_runs_a_known_function_before_it_captures_it():
    known, runs = KnownFunctions(), []
    recorded(doubled, Recorder(known))

    def counted(x):
        runs.append(torch.cuda.is_current_stream_capturing())
        return doubled(x)

    thread = threading.Thread(target=lambda: recorded(counted, Recorder(known)))
    thread.start()
    thread.join(timeout=120)
    assert runs == [False] * (WARM + 1) + [True]


def test_another_thread_that_gets_a_kept_recorder_runs_a_known_function_before_it_captures_it():
    recorder, runs = Recorder(), []
    recorded(doubled, recorder)

    def counted(x):
        runs.append(torch.cuda.is_current_stream_capturing())
        return doubled(x)

    def run():
        for _ in range(WARM + 3):
            recorder("other buffers", "key", counted, numbers())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=120)
    assert runs == [False] * (WARM + 1) + [True]


def test_autocast_keeps_no_copies_of_weights_in_a_capture():
    """It frees them when the caller's context ends, and graphs are kept longer."""
    within = []
    before = torch.is_autocast_cache_enabled()
    captured(lambda x: within.append(torch.is_autocast_cache_enabled()), numbers()["x"])
    assert within == [False]
    assert torch.is_autocast_cache_enabled() == before


def test_random_numbers_while_another_thread_captures():
    torch.manual_seed(0)
    wanted = torch.rand(4, device="cuda").tolist()
    torch.manual_seed(0)
    drawn = []

    def drawing(x):
        if torch.cuda.is_current_stream_capturing():
            thread = threading.Thread(target=lambda: drawn.append(torch.rand(4, device="cuda")))
            thread.start()
            thread.join(timeout=60)
        return doubled(x)

    assert recorded(drawing, Recorder()) == [2.0, 4.0]
    assert [numbers.tolist() for numbers in drawn] == [wanted]


def test_copies_between_host_and_device_are_refused_in_a_capture():
    """A device would take an upload into the graph, from memory that is soon used for something else."""
    for copying in (lambda x: uploaded([1, 2], x.device), lambda x: sent({"x": x})()):
        with pytest.raises(RuntimeError, match="not permitted while a CUDA graph is captured"):
            captured(copying, numbers()["x"])
    assert recorded(doubled, Recorder()) == [2.0, 4.0]


# Whole calls


@pytest.mark.parametrize("name", launches.PROPOSERS)
def test_ids_on_the_cpu(name):
    """With the defaults: texts on the host rule captures out."""
    spec, given = launches.generator(name, automatic=False), launches.prompts(1)
    spec.compile = "auto"
    wanted = spec.model.generate(**given, do_sample=False, max_new_tokens=20).tolist()
    on_host = {name: tensor.cpu() for name, tensor in given.items()}
    with tiny.specdec_warnings() as warned:
        assert spec.generate(**on_host, do_sample=False, max_new_tokens=20).tolist() == wanted
    assert not [text for text in warned if "CUDA graphs" in text]


def test_two_threads_on_one_generator():
    target, draft, _ = launches.models()
    spec = SpeculativeGenerator(target, DraftModelProposer(draft), draft_length=3)
    given, settings = launches.prompts(1), {"do_sample": False, "max_new_tokens": 24}
    wanted, texts = target.generate(**given, **settings).tolist(), []

    def call():
        if PRETENDED:
            pretend.in_this_thread()
        texts.extend(spec.generate(**given, **settings).tolist() for _ in range(3))

    threads = [threading.Thread(target=call) for _ in range(2)]
    with tiny.specdec_warnings() as warned:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
    assert texts == [wanted] * 6
    assert not warned
