"""Situations that break CUDA graphs elsewhere. Texts must be plain decoding's, and the process must stay usable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.gpu.calls import on_each_round, share, warned, write
from benchmarks.gpu.setting import LLAMA, Row, Setting
from benchmarks.harness import counting
from specdec import DraftModelProposer, SpeculativeGenerator
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer

CALLS = 5  # of each thread
SAMPLED = {"do_sample": True, "temperature": 1.0}
# The most likely token only: calls at the same time share the generator of random numbers, so no seed is theirs.
SAMPLED_FIRST = SAMPLED | {"top_k": 1}
Check = Callable[[Setting, PreTrainedModel], Row]


def hazards(setting: Setting) -> Iterator[Row]:
    """Check each hazard with a tiny model in float32. A failure is a row; a device that is lost ends the part."""
    target = tiny(setting)
    for check in CHECKS:
        name = (check.__doc__ or "").partition(".")[0]
        try:
            with warned() as texts:
                row = check(setting, target)
        except Exception as error:
            row = {"ok": False, "found": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        yield {"hazard": name, **row, **({"warned": texts} if texts else {})}
        setting.synchronize()


def tiny(setting: Setting) -> PreTrainedModel:
    """Make a model in float32, where a text does not depend on rounding, that counts."""
    return counting.counting(LLAMA, setting.device, small=True, dtype=torch.float)


def replay(setting: Setting, target: PreTrainedModel, ids: Tensor) -> SpeculativeGenerator:
    """Make a generator that drafts 80% right tokens."""
    return setting.replay(target, ids)


def with_tree(setting: Setting, target: PreTrainedModel, ids: Tensor) -> SpeculativeGenerator:
    """Make a generator that drafts such tokens with a head's trees."""
    return setting.replay(target, ids, inner=Eagle3Proposer(counting.head_for(target)))


def with_chain(setting: Setting, target: PreTrainedModel, ids: Tensor) -> SpeculativeGenerator:
    """Make a generator that drafts such tokens with a head's chains."""
    inner = Eagle3Proposer(counting.head_for(target)).shaped()
    return setting.replay(target, ids, inner=inner)


def with_model(setting: Setting, target: PreTrainedModel, ids: Tensor) -> SpeculativeGenerator:
    """Make a generator with a draft model, which is right after 80% of the tokens."""
    draft = counting.counting(LLAMA, setting.device, True, wrong=0.2, dtype=torch.float, num_hidden_layers=2)
    return SpeculativeGenerator(target, DraftModelProposer(draft), draft_length=4, on_unsupported="error")


def cpu_ids(generator: Callable[[Setting, PreTrainedModel, Tensor], SpeculativeGenerator], name: str) -> Check:
    """Make a check of ids on the CPU, while the models may be elsewhere."""

    def check(setting: Setting, target: PreTrainedModel) -> Row:
        ids = setting.prompts(target)
        spec = generator(setting, target, ids)
        texts = [write(spec, ids.cpu(), setting.new_tokens) for _ in range(3)]
        right = min(share(text, ids.cpu(), target) for text in texts)
        return {"ok": right == 1, "found": f"{right:.3f} right"}

    check.__doc__ = name
    return check


def nested(setting: Setting, target: PreTrainedModel) -> Row:
    """Nested call in a streamer."""
    ids, inner = setting.prompts(target), setting.prompts(target, length=160)
    spec = with_model(setting, target, ids)
    inside: list[Tensor] = []

    class Nested:
        def put(self, tokens: Tensor) -> None:
            if len(inside) < 3:
                inside.append(inner)  # so that the call within the call is the last one
                inside[-1] = write(spec, inner, setting.new_tokens)

        def end(self) -> None:
            pass

    outer = write(spec, ids, setting.new_tokens, streamer=Nested())
    right = [share(outer, ids, target), *(share(text, inner, target) for text in inside)]
    return {"ok": min(right) == 1, "found": f"right: {right}"}


def threads(setting: Setting, target: PreTrainedModel) -> Row:
    """Two threads with calls at T = 0 and T = 1."""
    ids = setting.prompts(target)
    specs = [replay(setting, target, ids), with_chain(setting, target, ids)]

    def answer(job: tuple[SpeculativeGenerator, dict[str, Any]]) -> float:
        spec, given = job
        return share(write(spec, ids, setting.new_tokens, **given), ids, target)

    jobs = [(spec, given) for _ in range(CALLS) for given in ({}, SAMPLED_FIRST) for spec in specs]
    with ThreadPoolExecutor(2) as pool:
        right = list(pool.map(answer, jobs))
    return {"ok": min(right) == 1, "found": f"{len(right)} calls, lowest share right {min(right):.3f}"}


def fresh_thread(setting: Setting, target: PreTrainedModel) -> Row:
    """Second call in a fresh thread."""
    ids = setting.prompts(target)
    spec = replay(setting, target, ids)
    taken: list[float] = []

    def call() -> Tensor:
        return write(spec, ids, setting.new_tokens)

    texts = [call(), call()]
    with on_each_round(taken.append), ThreadPoolExecutor(1) as pool:
        texts.append(pool.submit(call).result())
    right = min(share(text, ids, target) for text in texts)
    return {"ok": right == 1, "found": f"{right:.3f} right, first round {1e3 * taken[0]:.1f} ms"}


def sampling(setting: Setting, target: PreTrainedModel) -> Row:
    """Call at T = 1."""
    ids = setting.prompts(target)
    return same_as_plain(setting, target, ids, replay(setting, target, ids))


def failed_capture(setting: Setting, target: PreTrainedModel) -> Row:
    """Failed capture, then sampling."""
    target = tiny(setting)  # another one, as it is changed here
    target.model.layers[1].mlp = Syncing(target.model.layers[1].mlp)
    ids = setting.prompts(target)
    spec = replay(setting, target, ids)
    right = min(share(write(spec, ids, setting.new_tokens), ids, target) for _ in range(3))
    found = [f"{right:.3f} right"]
    if setting.cuda:
        default = torch.cuda.current_stream() == torch.cuda.default_stream()
        found.append("default stream" if default else "NOT on the default stream")
        torch.rand(1, device=setting.device)
        right *= default
    row = same_as_plain(setting, target, ids, spec)
    return {"ok": right == 1 and row["ok"], "found": "; ".join([*found, row["found"]])}


class Syncing(nn.Module):
    """A layer that reads a value on the host, which no capture allows."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Tensor:
        return self.inner(states) * (1.0 if states[0, 0, 0].item() < 1e9 else 0.5)


def same_as_plain(setting: Setting, target: PreTrainedModel, ids: Tensor, spec: SpeculativeGenerator) -> Row:
    """Compare three sampled texts with plain decoding's, by seed."""
    same = []
    for seed in range(3):
        texts = []
        for method in (target.generate, spec):
            torch.manual_seed(seed)
            texts.append(write(method, ids, setting.new_tokens, **SAMPLED))
        same.append(bool(torch.equal(*texts)))
    return {"ok": all(same), "found": f"{sum(same)} of 3 texts at T = 1 as plain"}


CHECKS: Sequence[Check] = (
    cpu_ids(with_tree, "Ids on the CPU with a head that drafts trees"),
    cpu_ids(with_chain, "Ids on the CPU with a head that drafts chains"),
    cpu_ids(with_model, "Ids on the CPU with a draft model"),
    sampling,
    nested,
    fresh_thread,
    threads,
    failed_capture,
)
