"""Compare the overhead of specdec and transformers' assisted generation, on models that cost next to nothing.

    python -m benchmarks.regression.small_pair

The target is a random Llama of 5M parameters in float32, and the draft consists of its first layers. The target's other
layers add little to the residual stream, so that the draft mostly agrees.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import machine
from benchmarks.harness.identity import compare_texts
from benchmarks.harness.measure import take_turns
from benchmarks.harness.methods import assisted
from benchmarks.harness.prompts import Job
from benchmarks.harness.script import Threads, prepare
from benchmarks.harness.summary import summarise
from benchmarks.harness.table import detail_table, table, times
from specdec import DraftModelProposer
from specdec.evaluation.methods import Method, plain, speculative

LAYERS, DRAFT_LAYERS, VOCAB, PROMPT_TOKENS = 6, 1, 4096, 32
SHARPEN = 4.0  # as initialised, all tokens' logits are nearly the same and the text repeats one token

app = typer.Typer(add_completion=False)


def small_pair(disagreement: float) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Make a target and its draft model.

    Args:
        disagreement: scale of the output of the target's further layers; at 0 the draft is always right.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=224,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() > 1:
                weight.mul_(SHARPEN)
        for layer in target.model.layers[DRAFT_LAYERS:]:
            layer.self_attn.o_proj.weight.mul_(disagreement)
            layer.mlp.down_proj.weight.mul_(disagreement)
    draft = LlamaForCausalLM(LlamaConfig(**config.to_dict() | {"num_hidden_layers": DRAFT_LAYERS})).eval()
    draft.load_state_dict({name: target.state_dict()[name] for name in draft.state_dict()})
    return target, draft


@app.command(help=__doc__)
def main(
    draft_length: Annotated[int, typer.Option(min=1, help="Constant draft length of both libraries.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Number of random prompts.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    disagreement: Annotated[
        float, typer.Option(min=0, help="Scale of the layers that the draft lacks; at 0 all drafts are accepted.")
    ] = 0.02,
    threads: Threads = None,
) -> None:
    prepare(threads)
    target, draft = small_pair(disagreement)
    generator = torch.Generator().manual_seed(0)
    jobs = [
        Job(str(i), "random", (torch.randint(1, VOCAB, (PROMPT_TOKENS,), generator=generator),)) for i in range(prompts)
    ]
    lengths: dict[str, int | None] = {"as it comes": None, f"constant draft length {draft_length}": draft_length}
    proposer = DraftModelProposer(draft)
    pairs = {
        label: (
            Method(f"hf-assistant{_suffix(length)}", assisted(target, draft, length)),
            speculative(f"specdec-draft{_suffix(length)}", target, proposer, length),
        )
        for label, length in lengths.items()
    }
    methods = [plain(target), *(method for pair in pairs.values() for method in pair)]
    arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        arguments |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    records = take_turns(methods, target, jobs, arguments, repeats)
    identities = compare_texts(records, jobs, target) if temperature == 0 else {}
    rows = {row.name: row for row in summarise(records, [method.name for method in methods])}
    lines = []
    for label, pair in pairs.items():
        theirs, ours = (rows[method.name] for method in pair)
        overall = [times(theirs.overall), times(ours.overall), times(ours.overall / theirs.overall)]
        lines.append([label, *overall, times((ours.decode or 0) / (theirs.decode or 1))])
    head = ["", "assistant_model over plain", "specdec over plain", "specdec over assistant_model", "decode only"]
    sizes = [sum(p.numel() for p in model.parameters()) / 1e6 for model in (target, draft)]
    print(
        f"# A small pair, T = {temperature:g}\n\n{machine.cpu_model()}, "
        f"{torch.get_num_threads()} threads, float32, random weights: target {sizes[0]:.1f}M parameters, draft "
        f"{sizes[1]:.1f}M; {max_new_tokens} new tokens, {prompts} prompts, medians of {repeats} repeats.\n\n"
        f"{table(head, lines)}\n\n{detail_table(list(rows.values()), identities)}"
    )
    if any(identity.differences for identity in identities.values()):
        raise typer.Exit(1)


def _suffix(length: int | None) -> str:
    return "" if length is None else f"-{length}"


if __name__ == "__main__":
    app()
