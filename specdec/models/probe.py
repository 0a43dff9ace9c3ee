"""Probes of a model: passes through `ModelRunner`, compared with the logits of the model's own passes.

`capability.probe` runs them and decides what a result means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.models.encoder import declined, stand_in
from specdec.models.introspection import cache_argument, device_of, takes_positions
from specdec.models.runner import ModelRunner
from specdec.sampling.draft_tree import DraftTree


def mismatch(model: PreTrainedModel, run, masks: str, drafts: bool) -> str:
    """Run a probe; return an empty string if its logits agree with the model's own, else what went wrong.

    Args:
        model: the model.
        run: `probe_tree` or `probe_chain`.
        masks: mask format, see `ModelRunner`.
        drafts: True for a draft model, whose logits may be slightly off.
    """
    try:
        ours, reference = run(model, masks)
    except Exception as error:  # a model may reject a mask or a cache with any error: that is the result
        first_line = str(error).partition("\n")[0][:120]
        return f"its forward pass failed with {type(error).__name__}: {first_line}"
    difference = (ours.float() - reference.float()).abs().mean() / reference.float().std().clamp(min=1e-6)
    # Rounding is near 1e-6 in float32 and 1e-2 in bfloat16; a wrong mask or position shows as 0.1 to 1.
    bound = 1e-3 if model.dtype in (torch.float32, torch.float64) and not drafts else 0.1
    return "" if difference <= bound else f"its logits came out wrong by {float(difference):.2g} standard deviations"


def probe_tree(model: PreTrainedModel, masks: str) -> tuple[Tensor, Tensor]:
    """Run a draft tree over two ragged rows; return the runner's and the model's own logits, (N, V) each."""
    runner, device = ModelRunner(model, masks, encoder_outputs=stand_in(model, 2)), device_of(model)
    ids = token_ids(model, 32)
    prompts = [ids[:7], ids[7:11]]
    drafts = torch.stack([ids[11:16], ids[16:21]])
    draft = DraftTree(drafts, torch.tensor([-1, 0, 0, 1, 2], device=device).expand(2, 5))
    padded = torch.stack([prompts[0], torch.cat([ids[:3], prompts[1]])])
    runner.start(2)
    runner.extend(padded, [0, 3])
    tree = runner.grow(drafts, draft.depth, draft.ancestors).logits  # (2, 5, V)
    # Row 0 takes the path root, 2, 4; row 1 its root alone. Then one more token each.
    runner.commit([3, 1], torch.tensor([[0, 2, 4], [0, 1, 2]], device=device))
    last = ids[21:23, None]
    eye = torch.ones(2, 1, 1, dtype=torch.bool, device=device)
    after = runner.grow(last, torch.zeros(2, 1, dtype=torch.long, device=device), eye).logits  # (2, 1, V)

    texts, picks = [], []
    for b in range(2):
        for leaf in ([0, 1, 3], [0, 2, 4]):
            texts.append(torch.cat([prompts[b], drafts[b, leaf]]))
            picks.append(tree[b, leaf])
    for b, path in ((0, [0, 2, 4]), (1, [0])):
        texts.append(torch.cat([prompts[b], drafts[b, path], last[b]]))
        picks.append(after[b])
    reference = [
        logits[len(text) - len(pick) : len(text)]
        for logits, text, pick in zip(_plain_logits(model, texts), texts, picks, strict=True)
    ]
    # One reference uses the model's own cache. Some models drop keys there, and plain decoding does the same.
    reference[0][-1:] = last_logits(model, texts[0])
    return torch.cat(picks), torch.cat(reference)


def probe_chain(model: PreTrainedModel, masks: str) -> tuple[Tensor, Tensor]:
    """Run a chain over one row, with a rejected token; return the runner's and the model's own logits, (N, V) each."""
    runner, device = ModelRunner(model, masks, encoder_outputs=stand_in(model, 1)), device_of(model)
    ids = token_ids(model, 12)
    runner.start(1)
    picks = [runner.extend(ids[None, :6], [0]).logits[0]]
    depth = torch.arange(3, device=device)[None]
    ones = torch.ones(3, 3, dtype=torch.bool, device=device).tril()[None]
    chain = runner.grow(ids[None, 6:9], depth, ones, chain=True).logits[0]
    runner.commit([2])  # the third token is rejected
    after = runner.grow(ids[None, 9:11], depth[:, :2], ones[:, :2, :2], chain=True).logits[0]
    picks += [chain, after]
    text = torch.cat([ids[:8], ids[9:11]])
    whole, drafted = _plain_logits(model, [text, ids[:9]])
    accepted = torch.cat([whole[:-1], last_logits(model, text)])
    reference = [accepted[5:6], drafted[6:9], accepted[8:10]]
    return torch.cat(picks), torch.cat(reference)


def _plain_logits(model: PreTrainedModel, texts: Sequence[Tensor]) -> Tensor:
    """Logits (B, T, V) of texts in one pass without a cache; arbitrary after the end of a shorter text."""
    longest = max(texts, key=len)
    padded = torch.stack([torch.cat([text, longest[len(text) :]]) for text in texts])
    return _run(model, padded, 0, use_cache=False).logits


def last_logits(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Logits (1, V) after a text whose last token is read using the model's own cache, as in plain decoding."""
    past = cache_argument(model)
    read = _run(model, text[None, :-1], 0, use_cache=True)
    return _run(model, text[None, -1:], len(text) - 1, use_cache=True, **{past: read[past]}).logits[0]


def _run(model: PreTrainedModel, texts: Tensor, start: int, **options: Any) -> Any:
    """Run the model's own pass over texts (B, T), whose first token has position `start`."""
    inputs = {"input_ids": texts, "return_dict": True, **declined(model), **options, **_positions(model, texts, start)}
    encoder_outputs = stand_in(model, len(texts))
    return model(**(inputs if encoder_outputs is None else encoder_outputs.read_by(model, inputs)))


def _positions(model: PreTrainedModel, texts: Tensor, start: int) -> dict[str, Tensor]:
    """Position ids as `generate()` passes them, from zero; RoBERTa's own default would start elsewhere."""
    if not takes_positions(model):
        return {}
    positions = torch.arange(start, start + texts.shape[1], device=texts.device)
    return {"position_ids": positions.expand(len(texts), -1)}


def token_ids(model: PreTrainedModel, count: int) -> Tensor:
    """Return fixed token ids spread over the vocabulary, without special tokens."""
    config = model.config.get_text_config(decoder=True)
    ends = getattr(config, "eos_token_id", None)
    special = {getattr(config, "pad_token_id", None), getattr(config, "bos_token_id", None)}
    special |= set(ends) if isinstance(ends, list) else {ends}
    size = config.vocab_size
    ids = [i for i in ((7919 * k + 13) % size for k in range(4 * count)) if i not in special]
    return torch.tensor(ids[:count], device=device_of(model))
