"""Random combinations of `generate()` arguments, each against plain `generate()` at T = 0.

    python -m tests.support.fuzz --cases 2000 --seed 0
    python -m tests.support.fuzz --case 1234          # one case again: what it was, and how the outputs differ

A case is made from its seed alone. Compared: sequences, streamer calls, scores, logits, hidden states, warnings; where
the cache is returned, in some cases also a second turn on it.
"""

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import LogitsProcessor, StoppingCriteria

from specdec import (
    BlockProposer,
    DraftModelProposer,
    DynamicTree,
    Eagle3Proposer,
    EarlyExitProposer,
    HybridProposer,
    HydraProposer,
    NgramProposer,
    SpeculativeGenerator,
    SuffixProposer,
)
from specdec.models.compat import CACHE, cache_in
from tests.support import blocks, eagle3, tiny

MODELS = ("llama", "llama", "qwen3", "mistral", "gemma3", "mixtral", "gpt2", "gpt_neox")
PROPOSERS = (
    "ngram",
    "ngram tree",
    "suffix",
    "draft",
    "itself",
    "draft tree",
    "itself tree",
    "dynamic tree",
    "itself dynamic",
    "trimmed",
    "eagle3",
    "eagle3 tree",
    "hybrid",
    "garbage",
    "answer",
)
LATER = ("drafter", "drafter chain", "P-EAGLE", "medusa", "hydra", "hydra tree", "suffix beside a head", "early exit")


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.puts: list[list] = []
        self.ends = 0

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.ends += 1


class EndsAfter(StoppingCriteria):
    """Per row: stops where the text holds `token` twice in what was generated."""

    def __init__(self, token: int, start: int):
        self.token, self.start = token, start

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, self.start :] == self.token).sum(-1) >= 2


class EndsSoon(StoppingCriteria):
    """Stops the first row within a draft's length or so, whatever it runs ahead to."""

    def __init__(self, remainder: int):
        self.remainder = remainder

    def __call__(self, input_ids, scores, **kwargs):
        ends = input_ids[:, -2:].sum(-1) % 3 == self.remainder
        ends[1:] = False
        return ends


class AllTogether(StoppingCriteria):
    """Looks at all rows: stops them together, once the last tokens add up to a multiple of five."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), int(input_ids[:, -1].sum()) % 5 == 0)


class NoTokenTwice(LogitsProcessor):
    """Pure, and reads the text and the row's index."""

    stateless = True

    def __call__(self, input_ids, scores):
        last = input_ids[:, -1:]
        row = torch.arange(len(scores))[:, None] % scores.shape[-1]
        return scores.scatter(1, last, -1e9).scatter(1, row, -1e9)


class Counting(LogitsProcessor):
    """Stateful: each call pushes another token down."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % scores.shape[-1]] -= 50
        return scores


def case(seed: int, models: tuple[str, ...] = MODELS) -> tuple[dict[str, Any], dict[str, Any]]:
    """What to run: (setup, generate() arguments); every call makes new streamers and processors."""
    r = random.Random(seed)
    lengths = tuple(r.choice((1, 2, 5, 9, 14)) for _ in range(r.choice((1, 1, 2, 3))))
    inputs = tiny.prompts(*lengths, seed=r.randrange(20))
    width = max(lengths)
    more = random.Random(-seed - 1)  # its own: what was drawn before stays as it was
    setup = {
        "new_turn": more.choice((0, 1, 3, 12)),
        "masks_pads": more.random() < 0.5,
        "model": r.choice(models),
        "proposer": r.choice(PROPOSERS),
        "draft_length": r.choice((None, 0, 1, 2, 4, 4, 7)),
        "lengths": lengths,
        "hook": r.random() < 0.2,
    }
    if more.random() < 0.3:
        setup["proposer"] = more.choice(LATER if models == MODELS else LATER[:-1])  # no early exit beside states
    kwargs: dict[str, Any] = {"max_new_tokens": r.choice((1, 2, 9, 16, 24)), "do_sample": False}
    if r.random() < 0.1:
        kwargs["max_length"] = width + kwargs.pop("max_new_tokens")

    def maybe(name: str, make, chance: float = 0.12) -> None:
        value = make()  # always drawn, so that one option does not move the others
        if r.random() < chance:
            kwargs[name] = value

    maybe("eos_token_id", lambda: r.sample(range(1, tiny.VOCAB), r.choice((1, 6, 20))), 0.5)
    maybe("min_new_tokens", lambda: r.choice((1, 4, 8)))
    maybe("min_length", lambda: width + r.choice((1, 4)))
    maybe("repetition_penalty", lambda: r.choice((1.1, 2.0)))
    maybe("no_repeat_ngram_size", lambda: r.choice((2, 3)))
    maybe("bad_words_ids", lambda: [[r.randrange(tiny.VOCAB)], [r.randrange(tiny.VOCAB), r.randrange(tiny.VOCAB)]])
    maybe("sequence_bias", lambda: [[[r.randrange(1, tiny.VOCAB)], 3.0], [[r.randrange(1, tiny.VOCAB)], -4.0]])
    maybe("suppress_tokens", lambda: r.sample(range(tiny.VOCAB), 3))
    maybe("begin_suppress_tokens", lambda: r.sample(range(tiny.VOCAB), 3))
    maybe("forced_eos_token_id", lambda: r.randrange(tiny.VOCAB), 0.05)
    maybe("exponential_decay_length_penalty", lambda: (r.choice((2, 5)), 1.5), 0.05)
    modulus = r.choice((2, 3))
    maybe(
        "prefix_allowed_tokens_fn",
        lambda: lambda b, text: [t for t in range(tiny.VOCAB) if (t + b + len(text)) % modulus],
    )
    maybe("logits_processor", lambda: LogitsProcessorList([NoTokenTwice()]))
    criteria = r.choice((lambda: EndsAfter(r.randrange(tiny.VOCAB), width), AllTogether))()
    maybe("stopping_criteria", lambda: StoppingCriteriaList([criteria]))
    maybe("streamer", Recorder, 0.3)
    maybe("prefill_chunk_size", lambda: r.choice((1, 3, 8)))
    maybe("num_return_sequences", lambda: 1)
    maybe("pad_token_id", lambda: r.randrange(tiny.VOCAB), 0.05)
    maybe("inputs_embeds", lambda: True, 0.08)
    maybe("use_cache", lambda: False, 0.04)
    if more.random() < 0.1:  # a row that is stopped where it ran ahead to an end token
        kwargs["stopping_criteria"] = StoppingCriteriaList([EndsSoon(more.randrange(3))])
        kwargs["eos_token_id"] = more.sample(range(1, tiny.VOCAB), 12)
        setup |= {"proposer": "itself", "draft_length": 7}
    maybe("num_beams", lambda: 2, 0.04)
    maybe("guidance_scale", lambda: 1.5, 0.04)
    maybe("cache_implementation", lambda: "static", 0.04)
    stateful = r.random() < 0.04
    if stateful:
        kwargs["logits_processor"] = LogitsProcessorList([Counting()])
    if r.random() < 0.4:
        kwargs["return_dict_in_generate"] = True
        for name in ("output_scores", "output_logits", "output_hidden_states"):
            maybe(name, lambda: True, 0.5)
    maybe("do_sample", lambda: True, 0.4)  # with the same seed, the same text
    maybe("temperature", lambda: r.choice((0.7, 1.5)), 0.3 * kwargs["do_sample"])
    maybe("top_p", lambda: r.choice((0.5, 0.95)), 0.3 * kwargs["do_sample"])
    maybe("top_k", lambda: r.choice((0, 3)), 0.5 * kwargs["do_sample"])
    if setup["model"] == "mamba2":
        kwargs.pop("prefill_chunk_size", None)  # plain decoding finds no cache there (5.23)
    if "eos_token_id" not in kwargs:
        kwargs.pop("exponential_decay_length_penalty", None)
    if kwargs.get("num_beams"):
        kwargs.pop("streamer", None)
        kwargs.pop("output_hidden_states", None)
    if kwargs.pop("inputs_embeds", None):
        ids = inputs.pop("input_ids")
        inputs["inputs_embeds"] = tiny.model(setup["model"]).get_input_embeddings()(ids).detach()
        if r.random() < 0.5:
            inputs["input_ids"] = ids
        for name in ("prefill_chunk_size", "guidance_scale", "min_length"):
            kwargs.pop(name, None)
    return setup, inputs | kwargs


def proposer(name: str, model: str, answer: torch.Tensor, draft_length: int | None):
    target = tiny.model(model)
    other = tiny.model(model, seed=1)
    return {
        "ngram": lambda: NgramProposer(),
        "ngram tree": lambda: NgramProposer(continuations=3),
        "suffix": lambda: SuffixProposer(),
        "draft": lambda: other,
        "itself": lambda: target,
        "draft tree": lambda: DraftModelProposer(other, branching=(3, 2, 1)),
        "itself tree": lambda: DraftModelProposer(target, branching=(2, 2, 1)),
        "dynamic tree": lambda: DraftModelProposer(other, tree=DynamicTree(depth=4, top_k=3, size=9)),
        "itself dynamic": lambda: DraftModelProposer(target, tree=DynamicTree(depth=4, top_k=2)),
        "eagle3": lambda: Eagle3Proposer(eagle3.head("3.1")),
        "eagle3 tree": lambda: Eagle3Proposer(eagle3.head(), branching=(3, 2, 1)),
        "hybrid": lambda: HybridProposer(Eagle3Proposer(eagle3.head())),
        "drafter": lambda: BlockProposer(blocks.head("DSpark")),
        "drafter chain": lambda: BlockProposer(blocks.head("own vocabulary"), branching=(1, 1, 1)),
        "P-EAGLE": lambda: BlockProposer(blocks.parallel()),
        "medusa": lambda: BlockProposer(blocks.medusa()),
        "hydra": lambda: HydraProposer(blocks.hydra()),
        "hydra tree": lambda: HydraProposer(blocks.hydra(prefix=False), branching=(3, 2, 1)),
        "early exit": lambda: EarlyExitProposer(1),
        "suffix beside a head": lambda: HybridProposer(Eagle3Proposer(eagle3.head()), SuffixProposer()),
        "trimmed": lambda: DraftModelProposer(target, vocab=20),
        "garbage": lambda: tiny.Garbage(size=draft_length or 5),
        "answer": lambda: tiny.Garbage(size=7, answer=answer),
    }[name]()


def run(seed: int, models: tuple[str, ...] = MODELS) -> tuple[str, bool]:
    """What is wrong with a case (empty: nothing), and whether it was speculated on."""
    setup, kwargs = case(seed, models)
    _, plain_kwargs = case(seed, models)
    model = tiny.model(setup["model"])
    torch.manual_seed(seed)
    try:
        plain = model.generate(**plain_kwargs)
    except Exception as error:
        plain = error
    answer = plain if isinstance(plain, torch.Tensor) else getattr(plain, "sequences", None)
    spec = SpeculativeGenerator(
        model,
        proposer(setup["proposer"], setup["model"], answer, setup["draft_length"]),
        draft_length=setup["draft_length"],
    )
    torch.manual_seed(seed)
    with tiny.specdec_warnings() as messages:
        try:
            ours = model.generate(custom_generate=spec, **kwargs) if setup["hook"] else spec.generate(**kwargs)
        except Exception as error:
            if isinstance(plain, Exception) and type(error) is type(plain):
                return "", False
            raise
    if isinstance(plain, Exception):
        return ("" if isinstance(plain, RuntimeError) else f"plain generate() raised {plain!r}, this did not"), False
    if len(messages) != len(set(messages)) or spec.report.num_plain_calls > len(messages):
        return f"warnings: {messages}", False
    wrong = difference(plain, ours, plain_kwargs.get("streamer"), kwargs.get("streamer"), kwargs)
    if not wrong and setup["new_turn"] and type(getattr(plain, CACHE, None)) is DynamicCache:
        wrong = second_turn(seed, models, spec, plain, ours)
    return wrong, not spec.report.num_plain_calls


def second_turn(seed: int, models: tuple[str, ...], spec: SpeculativeGenerator, plain: Any, ours: Any) -> str:
    """What is wrong where both outputs are gone on from, each on its own cache."""
    outputs = []
    for generate, before in ((spec.model.generate, plain), (spec.generate, ours)):
        setup, kwargs = case(seed, models)
        if "inputs_embeds" in kwargs:
            return ""
        text, mask = before.sequences, kwargs.pop("attention_mask")
        written = torch.ones_like(text[:, kwargs.pop("input_ids").shape[1] :])
        if setup["masks_pads"]:
            written[text[:, mask.shape[1] :] == kwargs.get("pad_token_id", tiny.PAD)] = 0
        new = tiny.prompts(*[setup["new_turn"]] * len(text), seed=seed)["input_ids"]
        for name in ("max_length", "min_length", "cache_implementation", "streamer"):
            kwargs.pop(name, None)
        kwargs |= {
            "input_ids": torch.cat([text, new], 1),
            "attention_mask": torch.cat([mask, written, torch.ones_like(new)], 1),
            CACHE: cache_in(before),
            "max_new_tokens": 12,
        }
        kwargs.pop("output_hidden_states", None)
        torch.manual_seed(seed)
        try:
            outputs.append(generate(**kwargs))
        except Exception as error:
            if generate == spec.generate and not isinstance(outputs[0], type(error)):
                raise
            outputs.append(error)
    if isinstance(outputs[0], Exception):
        return ""
    wrong = difference(*outputs, None, None, kwargs)
    return f"second turn: {wrong}" if wrong else ""


def difference(plain: Any, ours: Any, plain_streamer: Any, our_streamer: Any, kwargs: dict[str, Any]) -> str:
    """The first thing in which two outputs differ."""
    if plain_streamer is not None and vars(plain_streamer) != vars(our_streamer):
        return f"streamer: plain {vars(plain_streamer)}, ours {vars(our_streamer)}"
    if type(plain) is not type(ours):
        return f"types: plain {type(plain).__name__}, ours {type(ours).__name__}"
    if isinstance(plain, torch.Tensor):
        return "" if plain.tolist() == ours.tolist() else f"sequences: plain {plain.tolist()}, ours {ours.tolist()}"
    if plain.sequences.tolist() != ours.sequences.tolist():
        return f"sequences: plain {plain.sequences.tolist()}, ours {ours.sequences.tolist()}"
    for name in ("scores", "logits", "hidden_states"):
        theirs, mine = plain.get(name), ours.get(name)
        if (theirs is None) != (mine is None) or (theirs is not None and len(theirs) != len(mine)):
            return f"{name}: plain {theirs and len(theirs)} entries, ours {mine and len(mine)}"
        for step, (a, b) in enumerate(zip(theirs or (), mine or (), strict=True)):
            for layer, (x, y) in enumerate(zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]):
                if isinstance(a, tuple) and step == 0 and "attention_mask" in kwargs:
                    real = kwargs["attention_mask"].bool()[:, -x.shape[1] :]
                    x, y = (x[real], y[real]) if x.shape == y.shape else (x, y)
                close = {"atol": 1e-4, "rtol": 1e-4, "equal_nan": True}  # 5.17's length penalty makes NaN of -inf
                if x.shape != y.shape or x.dtype != y.dtype or not torch.allclose(x, y, **close):
                    return f"{name}[{step}][{layer}] differs: {tuple(x.shape)} {x.dtype}, {tuple(y.shape)} {y.dtype}"
    return ""


def describe(seed: int, models: tuple[str, ...] = MODELS) -> str:
    setup, kwargs = case(seed, models)
    shown = {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    return f"case {seed}: {setup} {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first case's seed; the others follow")
    parser.add_argument("--case", type=int, help="run this one alone")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    seeds = [args.case] if args.case is not None else range(args.seed, args.seed + args.cases)
    if args.case is not None:
        print(describe(args.case))
    start, counts = time.perf_counter(), Counter()
    for seed in seeds:
        try:
            wrong, speculated = run(seed)
        except Exception as error:
            if args.case is not None:
                raise
            wrong, speculated = f"{type(error).__name__}: {error}", False
        counts["wrong" if wrong else "speculated" if speculated else "plain"] += 1
        if wrong:
            print(f"{describe(seed)}\n    {wrong[:600]}", flush=True)
    seconds = time.perf_counter() - start
    print(
        f"{len(seeds)} cases in {seconds:.0f} s: {counts['speculated']} speculated and the same, "
        f"{counts['plain']} ran as plain decoding, {counts['wrong']} wrong"
    )
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    main()
