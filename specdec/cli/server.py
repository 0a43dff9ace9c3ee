"""`serve`: the OpenAI-compatible server of transformers, with specdec.

When the server has loaded a model, `model.generate` is replaced by specdec's. Requests, streaming and the chat template
are handled by `transformers serve` (checked with 5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE
from transformers import PreTrainedModel

from specdec.engine.generator import SpeculativeGenerator
from specdec.engine.hf.hooks import install


def serve(target: str, generator_of: Callable[[PreTrainedModel], SpeculativeGenerator], **options: Any) -> Any:
    """Serve a model until interrupted.

    Args:
        target: path or hub id.
        generator_of: called once with the loaded model, which it may move and convert.
        options: options of `transformers serve` (host, port, default_seed, ...). With `non_blocking=True` the server
            runs in a thread.

    Returns:
        The server of transformers; its `kill_server()` stops a server in a thread.

    Raises:
        ImportError: the server's packages are not installed.

    Example:
        ```python
        server = serve(path, lambda model: SpeculativeGenerator(model, "ngram"), port=8000, non_blocking=True)
        server.kill_server()
        ```
    """
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError(
            'serving needs more packages: pip install "transformers[serving]", or in a checkout of specdec '
            "pip install -c constraints.txt -e '.[serve]'"
        )
    from transformers.cli.serve import Serve

    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # listing its models fails if the folder does not exist
    with _speculating(target, generator_of):
        return Serve(force_model=target, **options)


_patching = Lock()  # guards the replacement of transformers' class


@contextmanager
def _speculating(target: str, generator_of: Callable[[PreTrainedModel], SpeculativeGenerator]) -> Iterator[None]:
    """Make the models of the next server generate with specdec, and list `target` among them.

    The server runs within this context. transformers' class is replaced only until the server has created its model
    manager, so servers in other threads are not affected.
    """
    from transformers.cli.serving import model_manager

    with ExitStack() as patch:
        patch.enter_context(_patching)
        plain = model_manager.ModelManager
        patch.callback(setattr, model_manager, "ModelManager", plain)
        model_manager.ModelManager = _manager(plain, target, generator_of, patch.close)
        yield


def _manager(
    plain: Any, target: str, generator_of: Callable[[PreTrainedModel], SpeculativeGenerator], made: Callable[[], None]
) -> Any:
    """Class of a model manager whose models generate with specdec. made: called when a manager is created."""

    class Speculating(plain):
        def __init__(self, *args: Any, **kwargs: Any):
            made()
            super().__init__(*args, **kwargs)

        def _load_model(self, *args: Any, **kwargs: Any) -> PreTrainedModel:
            model = super()._load_model(*args, **kwargs)
            install(model, generator_of(model).generate)
            return model

        @staticmethod
        def get_gen_models(cache_dir: str | None = None) -> list[dict[str, Any]]:
            """List the served model first, then the models in the hub's cache."""
            served = {"owned_by": "", "id": target, "object": "model", "created": 0}
            return [served, *(model for model in plain.get_gen_models(cache_dir) if model["id"] != target)]

    return Speculating
