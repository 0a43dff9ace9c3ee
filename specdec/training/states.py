"""The target's states over training texts, computed once and kept in shards: several epochs then cost no target pass.

Owns the files. A shard holds some texts end to end; a half-written one never carries its final name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec.data.texts import Text, end_to_end
from specdec.taps import FINAL, Taps
from specdec.training.dataset import PADDING, packed
from specdec.training.teacher import TargetLogits

SHARD_TOKENS = 50_000


def bytes_per_token(target: PreTrainedModel, taps: Sequence[int]) -> int:
    """Disk that the states of one token take."""
    width = target.config.get_text_config(decoder=True).hidden_size
    return (len(taps) + 1) * width * 2 + 17  # bfloat16; its id, learn flag, and two numbers of its logits


def batch_tokens_of(device: torch.device) -> int:
    """Padded tokens of a target pass; CPUs' caches like fewer."""
    return 1024 if device.type == "cpu" else 16384


@torch.no_grad()
def extract(
    target: PreTrainedModel,
    texts: Sequence[Text],
    taps: Sequence[int],
    folder: Path,
    *,
    batch_tokens: int | None = None,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[int], Any] = lambda tokens: None,
    go_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Write the states of all texts, going on where an earlier run stopped. Returns whether all are there.

    Processes that share the folder, and the work, each call it: the last to be done finds all states there.

    Args:
        taps: see `Taps`; the final state is kept beside them, and of the distributions that drafts of tokens to learn
            are compared with what `TargetLogits.over_all` says. batch_tokens: padded, per target pass;
            None: see `batch_tokens_of`.
        share: which of so many processes this is, whose shards are each their own.
        progress: called with the number of tokens done, as they are. go_on: asked before each shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listener, logits = Taps(target, [*taps, FINAL]), TargetLogits.of(target)
    shards = [
        (folder / f"states-{number:05d}.safetensors", members)
        for number, members in enumerate(packed([len(text.ids) for text in texts], SHARD_TOKENS))
    ]
    mine, processes = share
    for path, members in shards[mine::processes]:
        tokens = sum(len(texts[i].ids) for i in members)
        if not path.exists():
            if not go_on():
                return False
            of_shard = [texts[i] for i in members]
            states = _kept(target, listener, of_shard, batch_tokens)
            over_all = [logits.over_all(state, text.learn) for state, text in zip(states, of_shard, strict=True)]
            _write(path, of_shard, states, over_all)
        progress(tokens)
    if not all(path.exists() for path, _ in shards):
        return False
    partial = folder / f"states.json.{gethostname()}.{mine}.part"
    partial.write_text(json.dumps({"taps": list(taps), "shards": len(shards)}))
    partial.rename(folder / "states.json")
    return True


def _write(path: Path, texts: Sequence[Text], states: Sequence[Tensor], over_all: Sequence[Tensor]) -> None:
    tensors = end_to_end(texts) | {"states": torch.cat(list(states)), "over_all": torch.cat(list(over_all))}
    partial = path.with_suffix(f".{gethostname()}.part")  # several machines may share the folder
    save_file(tensors, partial)
    partial.rename(path)


@torch.no_grad()
def states_of(target: PreTrainedModel, taps: Sequence[int], texts: Sequence[Text]) -> list[Tensor]:
    """(T, C) bfloat16 of each text."""
    return _kept(target, Taps(target, taps), texts, None)


@torch.no_grad()
def states_of_packed(target: PreTrainedModel, listener: Taps, batch: dict[str, Tensor]) -> Tensor:
    """(B, T, C) of rows as `collate` makes them: each document alone, those of like length in one target pass."""
    ids, documents = batch["ids"], batch["documents"]
    places = [
        (row, (documents[row] == number).nonzero()[:, 0])
        for row in range(len(ids))
        for number in documents[row].unique().tolist()
        if number != PADDING
    ]
    found = dict(_states(target, listener, [ids[row, where] for row, where in places]))
    states = ids.new_zeros(*ids.shape, found[0].shape[-1], dtype=found[0].dtype)
    for number, (row, where) in enumerate(places):
        states[row, where] = found[number].to(ids.device)
    return states


def _kept(target: PreTrainedModel, listener: Taps, texts: Sequence[Text], batch_tokens: int | None) -> list[Tensor]:
    """(T, C) bfloat16 of each text, on the CPU."""
    found = _states(target, listener, [text.ids for text in texts], batch_tokens)
    out = {i: states.to("cpu", torch.bfloat16) for i, states in found}
    return [out[i] for i in range(len(texts))]


def _states(
    target: PreTrainedModel, listener: Taps, texts: Sequence[Tensor], batch_tokens: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Which text, and its states (T, C) as the target made them; texts (T,) of like length share a pass."""
    batch_tokens = batch_tokens or batch_tokens_of(target.device)
    ordered = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    while ordered:
        longest = len(texts[ordered[-1]])
        count = max(1, batch_tokens // longest)
        batch = [i for i in ordered[-count:] if 2 * len(texts[i]) >= longest]  # or most of it were padding
        try:
            found = _pass(target, listener, [texts[i] for i in batch])
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
            batch_tokens //= 2
            continue
        yield from zip(batch, found, strict=True)
        ordered = ordered[: -len(batch)]


def _pass(target: PreTrainedModel, listener: Taps, texts: Sequence[Tensor]) -> list[Tensor]:
    """States (T, C) of texts (T,) in one pass of the target, padded on the right, which causal attention ignores."""
    ids = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    with listener.listening() as taken:
        target.get_decoder()(input_ids=ids.to(target.device), use_cache=False)
    return [row[: len(text)] for row, text in zip(listener.features(taken), texts, strict=True)]
