"""`convert` makes a fresh head for a target; `Eagle3Trainer` is transformers' Trainer with EAGLE-3's objective."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from specdec.eagle3.checkpoint import save
from specdec.eagle3.config import Eagle3Config, default_taps
from specdec.eagle3.head import Eagle3Head
from specdec.eagle3.objective import Objective
from specdec.eagle3.states import collate
from specdec.taps import decoder_layers

RECENT = 50  # batches whose accuracies are averaged for the log


def convert(target: PreTrainedModel, draft_vocab: Tensor, **changes: Any) -> Eagle3Head:
    """A fresh head for a target.

    Args:
        draft_vocab: (K,) int64 ascending, the target's ids that the head can draft.
        changes: of `Eagle3Config`'s fields; by default the layer is like one of the target's.
    """
    text = target.config.get_text_config(decoder=True)
    H, heads = text.hidden_size, text.num_attention_heads
    config = Eagle3Config(
        **{
            "hidden_size": H,
            "target_hidden_size": H,
            "vocab_size": text.vocab_size,
            "draft_vocab_size": len(draft_vocab),
            "intermediate_size": getattr(text, "intermediate_size", 4 * H),
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", heads),
            "head_dim": getattr(text, "head_dim", None) or H // heads,
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "max_position_embeddings": getattr(text, "max_position_embeddings", 4096),
            "tap_ids": default_taps(len(decoder_layers(target))),
        }
        | changes
    )
    head = Eagle3Head(config)
    lm_head = target.get_output_embeddings().weight.detach()[draft_vocab.to(target.device)]
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        head.d2t.copy_(draft_vocab.cpu() - torch.arange(len(draft_vocab)))
        assert head.lm_head is not None
        head.lm_head.weight.copy_(lm_head)  # the target's own rows: a head starts out knowing what tokens mean
        if head.embed_tokens is not None:
            head.embed_tokens.weight.copy_(_embedding(target))
    return head


class Eagle3Trainer(Trainer):
    """Args as `Trainer`'s; `train_dataset` is a `states.StateDataset`."""

    def __init__(
        self, head: Eagle3Head, target: PreTrainedModel, args: TrainingArguments, *, steps: int = 5, **kwargs: Any
    ):
        embedding = _embedding(target)
        _require_plain_lm_head(target)
        objective = Objective(head, embedding, target.get_output_embeddings().weight, steps=steps)
        super().__init__(model=objective, args=args, data_collator=collate, **kwargs)
        self.head = head
        self._accuracies: deque[Tensor] = deque(maxlen=RECENT)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        outputs = model(**inputs)
        self._accuracies.append(outputs["accuracy"].detach())
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """With the accuracy of each step, and the length of the drafts accepted if steps were independent."""
        if "loss" in logs and self._accuracies:
            accuracy = torch.stack([a for a in self._accuracies if len(a) == len(self._accuracies[-1])]).mean(0)
            logs |= {f"accuracy_{step}": round(float(a), 4) for step, a in enumerate(accuracy)}
            logs["simulated_length"] = round(1 + float(accuracy.cumprod(-1).sum()), 4)
        super().log(logs, *args, **kwargs)

    def save_head(self, folder: str | Path, target: str = "") -> None:
        """Write the head alone, in bfloat16."""
        state = {name: tensor.clone() for name, tensor in self.head.state_dict().items()}
        copy = Eagle3Head(self.head.config).bfloat16()
        copy.load_state_dict(state)
        save(copy, folder, "sglang", target)


@torch.no_grad()
def _require_plain_lm_head(target: PreTrainedModel) -> None:
    """The loss takes the target's logits for `lm_head.weight @ state`: some models add a bias, a scale or a cap."""
    ids = torch.arange(1, 9, device=target.device)[None]
    state = target.get_decoder()(input_ids=ids, use_cache=False)[0]
    ours = (state @ target.get_output_embeddings().weight.T).float()
    theirs = target(input_ids=ids, use_cache=False).logits.float()
    if (ours - theirs).abs().mean() > 0.05 * theirs.std():
        raise ValueError(
            f"{type(target).__name__} computes its logits with more than a matrix (a bias, a scale or a cap): training "
            "heads for it is not supported yet"
        )


def _embedding(target: PreTrainedModel) -> Tensor:
    """(V, H) as the target's embedding module gives it: Gemma's scales its rows."""
    module = target.get_input_embeddings()
    rows = torch.arange(module.weight.shape[0], device=module.weight.device)
    with torch.no_grad():
        return torch.cat([module(part) for part in rows.split(4096)])
