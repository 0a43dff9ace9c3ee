"""Speculative decoding of other libraries as methods of the catalogue, if installed: economize and flashspec.

    python -m venv peers && peers/bin/pip install -c constraints.txt -e '.[demo]' economize==0.3.2 flashspec==0.3.1
    peers/bin/python -m benchmarks.spec_bench ... --methods 'hf-*,specdec-*,economize-*,flashspec-*'

Both draft a fixed number of tokens per round, so several settings are measured and the best one counts. The names of
economize's methods end with the tokens per round, including the one after the draft. Those of flashspec's end with the
lookup's draft length. Its composites add the draft model's length (f) to the lookup's (g).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.harness.options import Bench

Generate = Callable[..., Any]
NAMES = ("economize-", "flashspec-")  # that their methods' names begin with
CYCLES = (3, 5, 9)  # economize's: a draft and the token behind it
COMPOSITES = ("composite-g4", "composite-g6-f2")  # flashspec's n-grams, and its draft model where they find nothing


def peers(bench: Bench) -> dict[str, Callable[[], Generate]]:
    """Return factories of the methods by name, for single rows at T = 0."""
    options, made = bench.options, {}
    if options.temperature > 0 or options.batch_size > 1:
        return {}
    kinds = ["lookup"] + ["draft", "hybrid"] * (options.draft is not None)
    if find_spec("economize"):
        made |= {f"economize-{kind}-{n}": partial(_economize, bench, kind, n) for kind in kinds for n in CYCLES}
    if find_spec("flashspec") and not options.full_length:  # it cannot be told to go on behind an end
        made[f"flashspec-lookup-{options.lookup_tokens}"] = partial(_flashspec, bench, "bandit")
        if options.draft is not None:
            made |= {f"flashspec-{name}": partial(_flashspec, bench, name) for name in COMPOSITES}
    return made


def _economize(bench: Bench, kind: str, cycle: int) -> Generate:
    import economize
    from economize.techniques.draft_model import DraftModelConfig
    from economize.techniques.hybrid import HybridConfig
    from economize.techniques.lookup import LookupConfig

    configs = {
        "lookup": LookupConfig,
        "draft": lambda: DraftModelConfig(model=bench.options.draft),
        "hybrid": lambda: HybridConfig(fallback=DraftModelConfig(model=bench.options.draft)),
    }
    model = economize.apply(bench.target, configs[kind](), decoding=economize.DecodeConfig(cycle_length=cycle))
    return model.eval().generate  # type: ignore[no-any-return]


def _flashspec(bench: Bench, strategy: str) -> Generate:
    """Make a method of flashspec. strategy: its `drafter_strategy`; "bandit" has n-grams as its only drafter."""
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel

    options, target = bench.options, bench.target
    drafters = [NgramDrafter(max_ngram=options.ngram_size)]
    if strategy != "bandit":
        drafters.append(HuggingFaceDrafter(options.draft, target.device, target.dtype, 0.0, model=bench.draft))
    config = FlashSpecConfig(
        device=str(target.device),
        drafter_strategy=strategy,
        bandit=BanditConfig(n_arms=1),
        sampling=SamplingConfig(temperature=0.0, gamma=options.lookup_tokens),
    )
    engine = SpeculativeEngine(config, drafters, TargetModel(options.target, target.device, target.dtype, model=target))
    ends = sorted(bench.text_ends)

    def generate(input_ids: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
        """Ignore further arguments of `generate()`, which have no effect for one row at T = 0; no streamer is used."""
        result = engine.generate(input_ids, max_new_tokens, eos_token_ids=ends)
        return torch.cat([input_ids, result.output_ids[:, : result.n_tokens_generated]], 1)

    return generate
