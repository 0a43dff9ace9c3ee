"""`serve`: transformers' OpenAI-compatible server with specdec inside.

Owns the way in: the server loads a model, and what it calls from then on as `model.generate` is ours. Requests, streams
and the chat template are transformers' own (`transformers serve`; read in 5.23).
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
        target: path or hub id. generator_of: called once with the loaded model, which it may move and convert.
        options: of `transformers serve` (host, port, default_seed, ...); with non_blocking=True the server runs in a
            thread, and `kill_server()` of what is returned ends it.

    Raises:
        ImportError: the server's packages are not installed.
    """
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError(
            'serving needs more packages: pip install "transformers[serving]", or in a checkout of specdec '
            "pip install -c constraints.txt -e '.[serve]'"
        )
    from transformers.cli.serve import Serve

    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # its list of models fails where there is none
    with _speculating(target, generator_of):
        return Serve(force_model=target, **options)


_patching = Lock()  # of transformers' name for the class


@contextmanager
def _speculating(target: str, generator_of: Callable[[PreTrainedModel], SpeculativeGenerator]) -> Iterator[None]:
    """Make the next server's models generate by specdec, and the server name `target` as one of them.

    A server runs within this context, but transformers' class is replaced only until the server has made its manager:
    others, of any thread, have their own.
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
    """Class of a manager whose models generate by specdec. made: called as soon as there is one."""

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
            """Those in the hub's cache, and before them the one that is served, wherever it lies."""
            served = {"owned_by": "", "id": target, "object": "model", "created": 0}
            return [served, *(model for model in plain.get_gen_models(cache_dir) if model["id"] != target)]

    return Speculating
