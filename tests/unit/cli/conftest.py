import pytest


@pytest.fixture(scope="module")
def served(tmp_path_factory, chat_tokenizer):
    """A server of a tiny model, shared by the tests of a file; see `tests.support.served`."""
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    from tests.support.served import Served

    made = Served(tmp_path_factory.mktemp("served"), chat_tokenizer, max_queue=3)
    yield made
    made.server.kill_server()
