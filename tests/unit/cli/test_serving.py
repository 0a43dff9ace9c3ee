"""transformers' OpenAI-compatible server with specdec inside, asked by the real `openai` client."""

import copy
import socket
import time

import pytest
import torch

from specdec import SpeculativeGenerator
from specdec.cli.server import _speculating, serve
from tests.support import tiny

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

ASKED = [{"role": "user", "content": "abcabcab"}]
NEW = 8


@pytest.fixture
def served(tmp_path, chat_tokenizer):
    """The client, the model's name, the generators that were made, and what plain decoding answers."""
    model = tiny.model("llama")
    model.save_pretrained(tmp_path)
    chat_tokenizer.save_pretrained(tmp_path)
    made = []

    def generator_of(loaded):
        made.append(SpeculativeGenerator(loaded, tiny.model("llama", seed=1), draft_length=3))
        return made[-1]

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = serve(str(tmp_path), generator_of, port=port, non_blocking=True, dtype="float32", device="cpu")
    ids = torch.tensor(
        [chat_tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=True)["input_ids"]]
    )
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
    try:
        _wait_for(port)
        client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=30)
        yield client, str(tmp_path), made, chat_tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
    finally:
        server.kill_server()


def _wait_for(port: int) -> None:
    for _ in range(100):
        try:
            socket.create_connection(("localhost", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the server did not start")


def test_answers_are_plain_decodings(served):
    client, name, made, expected = served
    assert next(iter(client.models.list())).id == name
    whole = client.chat.completions.create(model=name, messages=ASKED, max_tokens=NEW, temperature=0)
    assert whole.choices[0].message.content == expected
    stream = client.chat.completions.create(model=name, messages=ASKED, max_tokens=NEW, temperature=0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == expected
    (spec,) = made
    while spec.report.num_calls < 2:  # a call is counted when it is over, a moment after its last token was sent
        time.sleep(0.01)
    assert spec.report.num_plain_calls == 0
    assert spec.report.num_draft_tokens > 0


def test_only_our_servers_speculate(served):
    from transformers.cli.serving import model_manager

    assert model_manager.ModelManager.__name__ == "ModelManager"


def test_servers_that_overlap(monkeypatch):
    """Each has its own generators, whichever ends first; others have transformers' class meanwhile."""
    from transformers.cli.serving import model_manager

    plain, made = model_manager.ModelManager, {"one": [], "other": []}
    monkeypatch.setattr(plain, "_load_model", lambda self: copy.deepcopy(tiny.model("llama")))

    def speculating(name):
        def generator_of(model):
            made[name].append(SpeculativeGenerator(model, "ngram"))
            return made[name][-1]

        return _speculating(name, generator_of)

    contexts, managers = [speculating(name) for name in made], []
    for context in contexts:
        context.__enter__()
        managers.append(model_manager.ModelManager())
        assert model_manager.ModelManager is plain
    for context in contexts:
        context.__exit__(None, None, None)
    assert model_manager.ModelManager is plain
    for manager, name in zip(managers, made, strict=True):
        model = manager._load_model()
        model.generate(**tiny.prompts(5), max_new_tokens=2, do_sample=False)
        assert made[name][-1].report.num_calls == 1
    assert [len(generators) for generators in made.values()] == [1, 1]


def test_a_server_that_cannot_be_made_leaves_nothing():
    from transformers.cli.serving import model_manager

    def fails():
        with _speculating("one", SpeculativeGenerator):
            assert model_manager.ModelManager is not plain
            raise RuntimeError("no port")

    plain = model_manager.ModelManager
    for _ in range(2):  # the second waits for nobody
        with pytest.raises(RuntimeError, match="no port"):
            fails()
        assert model_manager.ModelManager is plain
