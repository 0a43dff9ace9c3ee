"""`serve`: transformers' OpenAI-compatible server with specdec inside.

Owns the way in: the server loads a model, and what it calls from then on as `model.generate` is ours. Requests, streams
and the chat template are transformers' own (`transformers serve`; read in 5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE
from transformers import PreTrainedModel

from specdec.generator import SpeculativeGenerator
from specdec.hook import Installed


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


@contextmanager
def _speculating(target: str, generator_of: Callable[[PreTrainedModel], SpeculativeGenerator]) -> Iterator[None]:
    """Within this context servers are made whose models generate by specdec, and which name `target` as one of them."""
    from transformers.cli.serving import model_manager

    plain = model_manager.ModelManager

    class Speculating(plain):  # type: ignore[misc, valid-type]
        def _load_model(self, *args: Any, **kwargs: Any) -> PreTrainedModel:
            model = super()._load_model(*args, **kwargs)
            model.generate = Installed(generator_of(model).generate, model)
            return model

        @staticmethod
        def get_gen_models(cache_dir: str | None = None) -> list[dict[str, Any]]:
            """Those in the hub's cache, and before them the one that is served, wherever it lies."""
            served = {"owned_by": "", "id": target, "object": "model", "created": 0}
            return [served, *(model for model in plain.get_gen_models(cache_dir) if model["id"] != target)]

    model_manager.ModelManager = Speculating
    try:
        yield
    finally:
        model_manager.ModelManager = plain
