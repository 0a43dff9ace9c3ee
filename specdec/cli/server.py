"""`serve`: an OpenAI-compatible server for one model, also from Python. `specdec.cli.serving` holds its parts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specdec.cli.common import load
from specdec.cli.serving.sockets import close, listen
from specdec.utils.choices import NumberFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdec.cli.serving.server import Server
    from specdec.engine.generator import SpeculativeGenerator

PACKAGES = ("fastapi", "uvicorn", "openai", "jinja2")
MAX_QUEUE = 64  # requests that wait, by default


def serve(
    target: str,
    generator_of: Callable[[PreTrainedModel], SpeculativeGenerator],
    *,
    non_blocking: bool = False,
    **options: Any,
) -> Server:
    """Serve a model until interrupted.

    Args:
        target: path or hub id.
        generator_of: called once with the loaded model, which it may move and convert.
        non_blocking: return when the server is ready. It runs in a thread.
        options: see `prepared`: name, host, port, default_seed, dtype, device, max_queue, max_length.

    Returns:
        The server; its `kill_server()` ends a server in a thread.

    Raises:
        ImportError: the server's packages are not installed.
        KeyboardInterrupt: Ctrl-C ended a server that is not in a thread.
        ValueError: the port is in use, or the model cannot be served.

    Example:
        ```python
        server = serve(path, lambda model: SpeculativeGenerator(model, "ngram"), port=8000, non_blocking=True)
        server.kill_server()
        ```
    """
    server = prepared(target, generator_of, **options)
    if non_blocking:
        server.start()
    elif server.run():
        raise KeyboardInterrupt
    return server


def prepared(
    target: str,
    generator_of: Callable[[PreTrainedModel], SpeculativeGenerator],
    *,
    name: str | None = None,
    host: str = "localhost",
    port: int = 8000,
    default_seed: int | None = None,
    dtype: NumberFormat | None = None,
    device: str | None = None,
    max_queue: int = MAX_QUEUE,
    max_length: int | None = None,
) -> Server:
    """Open the port, load the model and return a server that does not run yet.

    Args:
        target: path or hub id.
        generator_of: called once with the loaded model.
        name: the model's name in requests; None for `target`.
        host: address to listen on.
        port: port to listen on; 0 for any free one.
        default_seed: seed of requests that name none; None for random seeds.
        dtype: number format, or "auto" for the fastest on this device; None: as saved.
        device: name of the device; None or "auto": the best one available.
        max_queue: most requests that wait.
        max_length: most tokens of a prompt and its answer, if this is less than the model's limit.

    Raises:
        ImportError: the server's packages are not installed.
        ValueError: the port is in use, or the model cannot be served.
    """
    _require_packages()
    sockets = listen(host, port)  # before torch is imported
    try:
        from specdec.cli.serving.app import Service
        from specdec.cli.serving.prompts import PromptReader
        from specdec.cli.serving.server import Server
        from specdec.cli.serving.settings import context_limit
        from specdec.cli.serving.worker import Worker
        from specdec.models.introspection import end_tokens_in, require_decoder_only
        from specdec.models.text_limits import vocab_size

        model, tokenizer = load(target, dtype=dtype, device=None if device == "auto" else device)
        require_decoder_only(model.config, target)
        ends = end_tokens_in(model.generation_config)
        if model.generation_config.pad_token_id is None:  # a single row has no padding, but generate() would warn
            model.generation_config.pad_token_id = ends[0] if ends else 0
        spec = generator_of(model)
        reader = PromptReader(tokenizer, vocab_size(spec.model))
        limit = context_limit(spec, max_length)
        worker = Worker(spec, tokenizer, max_queue)
        return Server(Service(name or target, worker, reader, limit, default_seed), worker, reader, sockets)
    except BaseException:
        close(sockets)
        raise


def _require_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f'serving needs {" and ".join(missing)}: pip install "specdec-hf[serve]", or in a checkout of specdec '
            "pip install -c constraints.txt -e '.[serve]'"
        )
