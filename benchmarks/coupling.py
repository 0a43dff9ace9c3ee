"""Measure acceptance at T = 1 for several ways to choose draft tokens, using teacher forcing over sampled texts.

    python benchmarks/coupling.py --target PATH --draft PATH --data ANSWERS [--head PATH]

Per position of an answer, with p the target's distribution and q the draft's:

- drawn: one token sampled from q and verified by rejection sampling, sum(min(p, q));
- top k: the k most likely tokens of q as point masses, their total probability in p;
- shared k: the k largest of q / E with exponential noise E, compared with the target's choice using the same noise.

"spread" is the deviation of log p from log q, as the scale of Gumbel noise that makes the target's choices most likely
(`specdec.proposers.base.SPREAD`). With --head the draft is an EAGLE-3 head of the target, run on the true states.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from failure import bad_input_ends
from table import table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec.data.conversations import read_texts
from specdec.heads.eagle3.checkpoint import load
from specdec.heads.eagle3.head import Eagle3Head
from specdec.models.hidden_states import Taps
from specdec.models.introspection import decoder_layers
from specdec.training.objectives.unroll import unroll

SPREADS = (0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
RACES = 2  # noises per position
POSITIONS = 48  # of a text, evenly over it: each costs passes over the whole vocabulary
WIDTHS = (1, 4)

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the model.")],
    data: Annotated[Path, typer.Option(help="Answers of the model, in a format of `specdec train`.", exists=True)],
    draft: Annotated[str | None, typer.Option(help="Path or hub id of a draft model.")] = None,
    head: Annotated[
        str | None, typer.Option(help="Path or hub id of an EAGLE-3 head, instead of a draft model.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of answers.")] = 14,
    dtype: str = "float32",
) -> None:
    with bad_input_ends():
        if (draft is None) == (head is None):
            raise ValueError("the draft is a model or a head: give --draft or --head")
        torch.manual_seed(0)
        precision = getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=precision).eval()
        texts = list(islice(read_texts(data, AutoTokenizer.from_pretrained(target), 512), limit))
        other = (
            load(head).to(precision).eval() if head else AutoModelForCausalLM.from_pretrained(draft, dtype=precision)
        )
        bets = [positions(model, other, text.ids, text.learn) for text in texts]
        columns = {name: torch.cat([text[name] for text in bets]) for name in bets[0]}
        count = len(columns["drawn"])
        print(f"{count} positions of {len(texts)} answers, {RACES} races each\n")
        rows = [[name, f"{column.mean():.3f}"] for name, column in columns.items() if not name.startswith("spread")]
        print(table(["bet", "right"], rows))
        losses = {
            name.split()[1]: float(column.mean()) for name, column in columns.items() if name.startswith("spread")
        }
        print(f"\nspread of log p around log q: {min(losses, key=losses.__getitem__)}; nats of the choice by spread:")
        print(table(["spread", "nats"], [[spread, f"{loss:.3f}"] for spread, loss in losses.items()]))


@torch.no_grad()
def positions(
    target: PreTrainedModel, draft: PreTrainedModel | Eagle3Head, ids: Tensor, learn: Tensor
) -> dict[str, Tensor]:
    """For each position of one text (T,): acceptance probability of each choice, and nats of the target's choice."""
    head = isinstance(draft, Eagle3Head)
    p, states = _target_logits(target, draft if head else None, ids)
    q = _head_logits(draft, target, ids, states) if head else draft(input_ids=ids[None]).logits[0]
    at = learn.nonzero()[:, 0] - 1  # what chose the token there
    at = at[at > 0]
    at = at[:: max(1, len(at) // POSITIONS)]
    p = p[at].float().softmax(-1)
    log_q = q[at, : p.shape[-1]].float().log_softmax(-1)
    q = log_q.exp()
    out = {"drawn": torch.minimum(p, q).sum(-1)}
    for width in WIDTHS:
        out[f"top {width}"] = p.gather(-1, log_q.topk(width).indices).sum(-1)
    coupled_scores: dict[str, list[Tensor]] = {}
    for _ in range(RACES):
        noise = torch.empty_like(p).exponential_()
        chosen_tokens = (p / noise).argmax(-1, keepdim=True)
        race = log_q - noise.log()
        for width in WIDTHS:
            coupled_scores.setdefault(f"shared {width}", []).append(
                (race.topk(width).indices == chosen_tokens).any(-1).float()
            )
        for spread in SPREADS:
            nats = (race / spread).logsumexp(-1) - race.gather(-1, chosen_tokens)[:, 0] / spread
            coupled_scores.setdefault(f"spread {spread}", []).append(
                nats.clamp(max=20)
            )  # what a head cannot draft: inf
    return out | {name: torch.stack(values).mean(0) for name, values in coupled_scores.items()}


def _target_logits(target: PreTrainedModel, head: Eagle3Head | None, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    if head is None:
        return target(input_ids=ids[None]).logits[0], None
    taps = Taps(target, head.config.taps(len(decoder_layers(target))))
    with taps.listening() as taken:
        logits = target(input_ids=ids[None]).logits[0]
    return logits, taps.features(taken)


def _head_logits(head: Eagle3Head, target: PreTrainedModel, ids: Tensor, states: Tensor) -> Tensor:
    """Logits (T, V), where row i predicts token i + 1 as in the target; -inf outside of the draft vocabulary."""
    embedding = head.embed_tokens or target.get_input_embeddings()
    h = next(iter(unroll(head, embedding(ids[None]).to(head.dtype), states.to(head.dtype), 1)))
    logits = head.logits(h[0])
    full = logits.new_full((len(ids), head.config.vocab_size), float("-inf"))
    full[1:, head.draft_to_target] = logits[: len(ids) - 1]  # the head's row i predicts token i + 2
    return full


if __name__ == "__main__":
    app()
