"""The queue of `specdec serve`: turns, its bound, clients that hang up, and many requests with faults."""

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event

import pytest
import torch

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from specdec.cli.serving.fair_queue import FairQueue, Full  # noqa: E402
from specdec.cli.serving.job import Job  # noqa: E402
from specdec.cli.serving.prefill import Cancelled, interruptible  # noqa: E402
from specdec.cli.serving.processors import Penalties  # noqa: E402
from specdec.cli.serving.text import StopStrings  # noqa: E402
from tests.support import tiny  # noqa: E402
from tests.support.served import Served, soon, streamed  # noqa: E402


def test_clients_take_turns():
    queue = FairQueue(5)
    for entry in ("a1", "a2", "a3", "b1", "c1"):
        queue.put(entry[0], entry)
    with pytest.raises(Full):
        queue.put("d", "d1")
    assert (queue.get(), queue.get()) == ("a1", "b1")
    assert queue.put_back("b", "b1")  # not finished
    queue.put("d", "d1")
    assert queue.remove("a", "a3")
    assert not queue.remove("a", "a3")
    assert [queue.get() for _ in range(4)] == ["c1", "a2", "b1", "d1"]
    assert len(queue) == 0
    queue.put("a", "a4")
    assert queue.close() == ["a4"]
    assert queue.get() is None
    assert not queue.put_back("a", "a4")
    with pytest.raises(Full):
        queue.put("a", "a5")


@pytest.mark.parametrize("seed", range(30))
def test_stop_strings_in_parts(seed):
    """However a text is cut into parts, the stop strings are found, and the text before them is all there is."""
    random.seed(seed)
    text = "".join(random.choices("ab", k=30))
    wanted = ["".join(random.choices("abc", k=random.randint(1, 5))) for _ in range(3)]
    stops, out, place = StopStrings(wanted), "", 0
    while place < len(text) and not stops.found:
        size = random.randint(0, 4)
        out, place = out + stops.add(text[place : place + size]), place + size
    seen = text[:place]
    ends = [seen.index(stop) for stop in wanted if stop in seen]
    assert stops.found == bool(ends)
    assert out + stops.end() == (seen[: min(ends)] if ends else seen)


def test_penalties_at_the_nodes_of_a_draft(models):
    """specdec asks at drafted nodes, in a batch as well: the text is plain decoding's."""
    from specdec import SpeculativeGenerator

    model = models("llama")
    spec = SpeculativeGenerator(model, tiny.Garbage(), on_unsupported="error")
    for inputs in (tiny.prompts(9), tiny.prompts(9, 4)):
        arguments = {"max_new_tokens": 16, "logits_processor": [Penalties(9, 1.5, 0.8)]}
        for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9}):
            torch.manual_seed(3)
            expected = model.generate(**inputs, **arguments, **sampling)
            torch.manual_seed(3)
            assert spec.generate(**inputs, **arguments, **sampling).tolist() == expected.tolist()


def test_a_prefill_ends_at_the_next_module():
    model, cancelled, ran = tiny.on_host("llama", num_hidden_layers=3), Event(), []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda module, arguments, i=i: ran.append(i))
    hook = model.model.layers[1].register_forward_hook(lambda *arguments: cancelled.set())
    with pytest.raises(Cancelled), interruptible(cancelled):
        model(**tiny.prompts(5))
    assert ran == [0, 1]
    hook.remove()
    with interruptible(cancelled) as begun:
        begun()
        model(**tiny.prompts(5))  # after the prefill the criterion decides
    model(**tiny.prompts(5))
    assert ran == [0, 1, 0, 1, 2, 0, 1, 2]


def test_a_full_queue(served):
    with served.spec.hold.on() as hold, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(served.chat, temperature=0)]
        assert hold.arrived.wait(60)
        running += [pool.submit(served.chat, temperature=0, stream=i > 0) for i in range(3)]
        soon(lambda: served.health == {"status": "ok", "queue": 3, "busy": True})
        with pytest.raises(openai.RateLimitError, match="the queue is full: 3 requests are waiting") as error:
            served.chat()
        assert (error.value.code, error.value.type) == ("queue_full", "rate_limit_error")
        assert int(error.value.response.headers["Retry-After"]) >= 1
        hold.released.set()
        found = [each.result() for each in running]
    texts = [whole.choices[0].message.content for whole in found[:2]] + [streamed(each)[0][0] for each in found[2:]]
    assert texts == [served.plain_text()] * 4


def test_turns_between_requests_and_choices(served):
    """A client with many requests, or with many choices, does not make the others wait for all of them."""
    order, run = [], served.server._worker._run_choice

    def noted(job):
        order.append((job.client[0].removeprefix("Bearer "), job.position))
        run(job)

    served.server._worker._run_choice = noted
    try:
        with served.spec.hold.on() as hold, ThreadPoolExecutor(4) as pool:
            asked = []
            for key, fields in (("a", {}), ("a", {"n": 3}), ("a", {}), ("b", {})):
                asked.append(pool.submit(served.chat, served.of(key), **fields))
                soon(lambda: served.health["queue"] == len(asked) - 1 and served.health["busy"])
            hold.released.set()
            for each in asked:
                each.result()
    finally:
        del served.server._worker._run_choice
    assert order == [("a", 0), ("a", 0), ("b", 0), ("a", 1), ("a", 2), ("a", 0)]


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_the_model(served, stream, after):
    """Before the first token, and within a text of 900."""
    cancelled, cancel = Event(), served.server._worker.cancel

    def noted(job):
        cancel(job)
        cancelled.set()

    served.server._worker.cancel = noted
    try:
        with served.spec.hold.on(after) as hold:
            with suppress(openai.APITimeoutError):  # a stream that has begun is closed instead
                found = served.chat(served.of("impatient", timeout=0.5), max_tokens=900, stream=stream)
                next(found)
                found.close()
            assert cancelled.wait(60)
            hold.released.set()
            served.settle()
    finally:
        served.server._worker.cancel = cancel
    assert served.spec.last_report.num_output_tokens <= after + 4  # a round has four
    assert served.chat(temperature=0).choices[0].message.content == served.plain_text()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_in_the_queue(served, stream):
    calls = served.spec.report.num_calls
    with served.spec.hold.on() as hold, ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.chat, temperature=0)
        assert hold.arrived.wait(60)
        with pytest.raises(openai.APITimeoutError):
            served.chat(served.of("impatient", timeout=0.5), stream=stream)
        soon(lambda: served.health["queue"] == 0)
        hold.released.set()
        assert running.result().choices[0].message.content == served.plain_text()
    assert served.spec.report.num_calls == calls + 1


@pytest.fixture
def busy(tmp_path, chat_tokenizer):
    made = Served(tmp_path, chat_tokenizer, tiny.on_host("llama", num_hidden_layers=1), "ngram")
    yield made
    made.server.kill_server()


FAULTS = ("bad", "hang up", "time out")
KINDS = ("whole", "whole", "stream", "stream", "choices", *FAULTS)


@pytest.mark.slow
def test_many_requests_with_faults(busy):
    """200 requests of 8 clients: none is lost, and each text is that of a lone request."""
    prompts = ["abc", "cabcab", "bbbb"]
    expected = {}
    for text in prompts:
        for seed in range(3):
            ids = busy.prompt([{"role": "user", "content": text}])
            expected[text, seed] = busy.plain_text(ids, seed=seed, do_sample=True, temperature=1.0, max_new_tokens=4)

    def ask(client, text, seed, kind):
        fields = {"messages": [{"role": "user", "content": text}], "seed": seed, "temperature": 1, "max_tokens": 4}
        if kind == "bad":
            with pytest.raises(openai.BadRequestError):
                busy.chat(client, **fields | {"temperature": "hot"})
        elif kind == "time out":
            with pytest.raises(openai.APITimeoutError):
                busy.chat(client.with_options(timeout=1e-4), **fields | {"max_tokens": 500})
        elif kind == "hang up":
            stream = busy.chat(client, **fields | {"max_tokens": 500}, stream=True)
            next(stream)
            stream.close()
        elif kind == "stream":
            assert streamed(busy.chat(client, **fields, stream=True))[0] == {0: expected[text, seed]}
        else:
            n = 2 if kind == "choices" and seed < 2 else 1
            texts = [choice.message.content for choice in busy.chat(client, **fields, n=n).choices]
            assert texts == [expected[text, seed + i] for i in range(n)]
        return kind

    def requests(number):
        rng, client = random.Random(number), busy.of(f"key {number}")
        return [ask(client, rng.choice(prompts), rng.randrange(3), rng.choice(KINDS)) for _ in range(25)]

    with ThreadPoolExecutor(8) as pool:
        requests(100)
        before = _tensors(busy)
        done = [kind for kinds in pool.map(requests, range(8)) for kind in kinds]
    assert len(done) == 200
    assert {*done} == {*KINDS}
    assert _tensors(busy) <= before
    assert busy.server._worker.is_alive
    assert busy.chat(temperature=0).choices[0].message.content == busy.plain_text()


def _tensors(busy):
    """Number of tensors that are alive when the model is free; no job is left."""
    busy.settle()
    gc.collect()
    alive = gc.get_objects()
    assert not [each for each in alive if isinstance(each, Job)]
    return sum(isinstance(each, torch.Tensor) for each in alive)
