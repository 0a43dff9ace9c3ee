"""The server of `specdec serve`: faults, limits, ports, and its end."""

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from specdec import SpeculativeGenerator  # noqa: E402
from specdec.cli import server as server_module  # noqa: E402
from specdec.cli.server import serve  # noqa: E402
from specdec.cli.serving.sockets import close, listen  # noqa: E402
from tests.support import tiny  # noqa: E402
from tests.support.served import Served, soon  # noqa: E402


def test_an_error_of_the_model_fails_one_request(served, caplog):
    served.spec.failure = RuntimeError("out of memory")
    try:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="the model failed: RuntimeError: out of memory"):
                served.chat(stream=stream)
    finally:
        served.spec.failure = None
    assert "Traceback" in caplog.text
    assert served.chat(temperature=0).choices[0].message.content == served.plain_text()


def test_a_model_of_positions_and_a_smaller_limit(tmp_path, chat_tokenizer):
    """Without max_position_embeddings, the tables of positions count."""
    made = Served(
        tmp_path, chat_tokenizer, tiny.on_host("gpt2", n_positions=48), "ngram", max_length=40, default_seed=3
    )
    try:
        assert made.complete(prompt=[1] * 30, max_tokens=10).usage.total_tokens == 40
        with pytest.raises(openai.BadRequestError, match="limit|maximum context length is 40"):
            made.complete(prompt=[1] * 30, max_tokens=11)
        expected = made.plain_text(made.prompt(), seed=3, do_sample=True, temperature=1.0)
        assert made.chat(temperature=1).choices[0].message.content == expected
    finally:
        made.server.kill_server()


def test_a_port_in_use_is_noticed_before_the_model_is_loaded(served, monkeypatch):
    monkeypatch.setattr(server_module, "load", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=f"port {served.server.port} of localhost is in use: choose another"):
        serve(served.name, SpeculativeGenerator, port=served.server.port)
    with pytest.raises(ValueError, match="is not an address of this machine"):
        serve(served.name, SpeculativeGenerator, host="no such host.invalid", port=0)


def test_connections_do_not_delay_small_packets():
    """asyncio sets TCP_NODELAY only where a socket names its protocol; without it each answer takes 40 ms longer."""

    async def options():
        done = asyncio.get_running_loop().create_future()
        sockets = listen("localhost", 0)
        server = await asyncio.start_server(lambda reader, writer: done.set_result(writer), sock=sockets[0])
        _, writer = await asyncio.open_connection(*sockets[0].getsockname()[:2])
        accepted = (await done).get_extra_info("socket")
        found = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        server.close()
        close(sockets)
        return found

    assert asyncio.run(options())


def test_a_server_that_ends_fails_what_waits(tmp_path, chat_tokenizer):
    made = Served(tmp_path, chat_tokenizer)
    with made.spec.hold.on() as hold, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(made.chat, made.of(f"key {i}")) for i in range(3)]
        soon(lambda: made.health["queue"] == 2)
        made.server._worker.stop()
        for each in asked:
            with pytest.raises(openai.APIStatusError, match="the server is shutting down") as error:
                each.result()
            assert error.value.status_code == 503
        hold.released.set()
    made.server.kill_server()
    assert not made.server._worker.is_alive
    with pytest.raises(openai.APIConnectionError):
        made.chat()


def test_health(served):
    assert served.get("/health")[0] == 200
    assert json.loads(json.dumps(served.health)) == {"status": "ok", "queue": 0, "busy": False}


def test_a_name_in_place_of_the_folder(tmp_path, chat_tokenizer):
    made = Served(tmp_path, chat_tokenizer, proposer="ngram", name="coder")
    try:
        assert [model.id for model in made.client.models.list()] == ["coder"]
        assert made.chat(model="coder").model == "coder"
        with pytest.raises(openai.NotFoundError, match="this server has 'coder'"):
            made.chat()  # the folder
    finally:
        made.server.kill_server()
