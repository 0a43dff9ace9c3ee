"""Conversations: a cache from an earlier call is taken over, speculated on, and given back as plain decoding does."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from specdec import DraftModelProposer, Eagle3Proposer, HybridProposer, NgramProposer, SpeculativeGenerator
from specdec.models.cache.buffers import Slots
from specdec.models.cache.kv_cache import SpeculativeCache
from specdec.models.compat import CACHE, cache_in
from tests.support import eagle3, families, tiny
from tests.support.diagonal import diagonal

MODELS = ["llama", "qwen3", "gemma3", "mistral", "gpt2"]
PROPOSERS = {
    "ngram": lambda target: NgramProposer(),
    "tree": lambda target: DraftModelProposer(target, branching=(3, 2, 1)),
    "draft": lambda target: DraftModelProposer(tiny.model(target.name, seed=1)),
    "hybrid": lambda target: HybridProposer(DraftModelProposer(tiny.model(target.name, seed=1))),
    "garbage": lambda target: tiny.Garbage(),
}
BATCHES = {"single": (9,), "ragged": (9, 1, 5)}


def named(name):
    model = tiny.model(name)
    model.name = name
    return model


def answered(inputs, sequences, new, ends=None):
    """The next turn's ids and mask: what was written behind a row's end is masked, `new` tokens follow in every row."""
    start = inputs["input_ids"].shape[1]
    written = torch.ones_like(sequences[:, start:])
    for row, kept in zip(sequences[:, start:], written, strict=True):
        found = [i for i, token in enumerate(row.tolist()) if ends and token in ends]
        if found:
            kept[found[0] + 1 :] = 0
    fresh = tiny.prompts(*[new] * len(sequences), seed=7)["input_ids"]
    ids = torch.cat([sequences, fresh], 1)
    mask = torch.cat([inputs["attention_mask"], written, torch.ones_like(fresh)], 1)
    return {"input_ids": ids, "attention_mask": mask}


def same_cache(ours, plain, mask):
    """The keys and values of all columns that hold text."""
    assert ours.get_seq_length() == plain.get_seq_length()
    assert len(ours.layers) == len(plain.layers)
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        assert type(mine) is type(theirs)
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert a.shape == b.shape
            real = torch.nn.functional.pad(mask, (0, plain.get_seq_length() - mask.shape[1]), value=1)
            real = real[:, -a.shape[2] :, None].bool()[:, None]
            torch.testing.assert_close(a * real, b * real, atol=2e-4, rtol=1e-3)


def talk(generate, inputs, turns, ends, arguments, cache=None):
    """Outputs of some turns, each on the cache of the one before."""
    outputs, texts = [], []
    for new in turns:
        texts.append(inputs)
        out = generate(**inputs, **arguments, **{CACHE: cache}, return_dict_in_generate=True, eos_token_id=ends)
        cache = cache_in(out)
        outputs.append((out.sequences, [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]))
        inputs = answered(inputs, out.sequences, new, ends)
    return outputs, texts, cache


@pytest.mark.parametrize(("proposer", "batch", "name"), diagonal(PROPOSERS.keys(), ["ragged", "single"], MODELS))
def test_turn_after_turn(proposer, batch, name):
    target = named(name)
    arguments = {"max_new_tokens": 14, "do_sample": False}
    inputs = tiny.prompts(*BATCHES[batch])
    plain, texts, plain_cache = talk(target.generate, inputs, (4, 11, 1), None, arguments)
    spec = SpeculativeGenerator(target, PROPOSERS[proposer](target), draft_length=4, on_unsupported="error")
    ours, _, our_cache = talk(spec.generate, inputs, (4, 11, 1), None, arguments)
    assert [sequences.tolist() for sequences, _ in ours] == [sequences.tolist() for sequences, _ in plain]
    same_cache(our_cache, plain_cache, texts[-1]["attention_mask"])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_rows_that_ended_early_have_holes_in_the_next_turn(name, proposer):
    target = named(name)
    arguments = {"max_new_tokens": 14, "do_sample": False}
    inputs = tiny.prompts(9, 1, 5)
    written = target.generate(**inputs, **arguments)[:, 9:]
    ends = sorted({int(written[0, 3]), int(written[2, 8])})
    plain, texts, plain_cache = talk(target.generate, inputs, (4, 11, 1), ends, arguments)
    assert any((mask[:, 1:] < mask[:, :-1]).any() for mask in (text["attention_mask"] for text in texts))
    spec = SpeculativeGenerator(target, PROPOSERS[proposer](target), draft_length=4, on_unsupported="error")
    ours, _, our_cache = talk(spec.generate, inputs, (4, 11, 1), ends, arguments)
    assert [sequences.tolist() for sequences, _ in ours] == [sequences.tolist() for sequences, _ in plain]
    same_cache(our_cache, plain_cache, texts[-1]["attention_mask"])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_prompts_with_holes(name, proposer):
    target, inputs = named(name), tiny.prompts(14, 3, 9)
    inputs["attention_mask"][0, 4:7] = inputs["attention_mask"][0, 0] = inputs["attention_mask"][2, -2] = 0
    arguments = {**inputs, "max_new_tokens": 14, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**arguments, output_hidden_states=True)
    spec = SpeculativeGenerator(target, PROPOSERS[proposer](target), draft_length=4, on_unsupported="error")
    ours = spec.generate(**arguments, output_hidden_states=True)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    same_cache(cache_in(ours), cache_in(plain), inputs["attention_mask"])
    real = inputs["attention_mask"][..., None].bool()
    for a, b in zip(ours.hidden_states[0], plain.hidden_states[0], strict=True):
        torch.testing.assert_close(a * real, b * real, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["empty", "filled", "windows unknown", "cropped"])
def test_the_users_very_cache_is_extended(name, kind):
    """Without `return_dict_in_generate`, too."""
    target, inputs = named(name), tiny.prompts(12)
    results = []
    for generate in (
        target.generate,
        SpeculativeGenerator(target, target, draft_length=4, on_unsupported="error").generate,
    ):
        cache = DynamicCache() if kind == "windows unknown" else DynamicCache(config=target.config)
        if kind in ("filled", "windows unknown"):
            target(inputs["input_ids"][:, :7], **{CACHE: cache})
        if kind == "cropped":
            target(inputs["input_ids"][:, :5], **{CACHE: cache})
            cache.crop(-2)
        text = generate(**inputs, **{CACHE: cache}, max_new_tokens=20, do_sample=False)
        results.append((text.tolist(), cache))
    assert results[0][0] == results[1][0]
    same_cache(results[1][1], results[0][1], inputs["attention_mask"])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_only_the_new_tokens_with_the_mask_of_all(name):
    target, inputs = named(name), tiny.prompts(12, 7)
    results = []
    for generate in (
        target.generate,
        SpeculativeGenerator(target, "ngram", draft_length=4, on_unsupported="error").generate,
    ):
        first = generate(**inputs, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
        text = answered(inputs, first.sequences, 3)
        text["input_ids"] = text["input_ids"][:, cache_in(first).get_seq_length() :]
        more = generate(
            **text,
            max_new_tokens=9,
            do_sample=False,
            return_dict_in_generate=True,
            **{CACHE: cache_in(first)},
        )
        assert cache_in(more) is cache_in(first)
        results.append((more.sequences.tolist(), cache_in(more)))
    assert results[0][0] == results[1][0]
    same_cache(results[1][1], results[0][1], text["attention_mask"])


@pytest.mark.parametrize("make", [lambda: Eagle3Proposer(eagle3.head()), lambda: Eagle3Proposer(eagle3.head("3.1"))])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_head_that_has_not_seen_the_earlier_turns(make, batch):
    target = named("llama")
    arguments = {"max_new_tokens": 14, "do_sample": False}
    inputs = tiny.prompts(*BATCHES[batch])
    plain, _, _ = talk(target.generate, inputs, (4, 20, 1), None, arguments)
    spec = SpeculativeGenerator(target, make(), draft_length=3, on_unsupported="error")
    ours, _, _ = talk(spec.generate, inputs, (4, 20, 1), None, arguments)
    assert [sequences.tolist() for sequences, _ in ours] == [sequences.tolist() for sequences, _ in plain]
    assert spec.report.num_draft_tokens


def test_a_later_turn_reads_only_what_is_new():
    target, read = named("llama"), []
    spec = SpeculativeGenerator(target, "ngram", on_unsupported="error")
    handle = target.get_input_embeddings().register_forward_hook(
        lambda module, args, out: read.append(args[0].shape[1])
    )
    try:
        assert spec.capability.trees  # the hook sees the probe's passes
        read.clear()
        inputs = tiny.prompts(30)
        first = spec.generate(**inputs, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        assert read[0] == 30
        read.clear()
        text = answered(inputs, first.sequences, 4)
        spec.generate(**text, max_new_tokens=5, do_sample=False, **{CACHE: cache_in(first)})
        assert read[0] == 5  # the last token written was in no cache yet
    finally:
        handle.remove()


def test_a_call_that_fails_leaves_the_cache_usable():
    class Breaks:
        def put(self, value):
            self.count = getattr(self, "count", 0) + 1
            if self.count == 6:
                raise KeyError("broken")

        def end(self):
            pass

    for name in ("llama", "gemma3"):
        target, inputs = named(name), tiny.prompts(12)
        plain = target.generate(**inputs, max_new_tokens=9, do_sample=False).tolist()
        cache = DynamicCache(config=target.config)
        target(inputs["input_ids"][:, :7], **{CACHE: cache})
        spec = SpeculativeGenerator(target, "ngram", draft_length=4, on_unsupported="error")
        with pytest.raises(KeyError):
            spec.generate(**inputs, **{CACHE: cache}, streamer=Breaks(), max_new_tokens=9, do_sample=False)
        assert cache.get_seq_length() == (7 if name == "llama" else 0)
        again = spec.generate(**inputs, **{CACHE: cache}, max_new_tokens=9, do_sample=False)
        assert again.tolist() == plain


def test_a_call_that_fails_as_it_takes_the_cache_over_leaves_it_usable(monkeypatch):
    target, inputs = named("llama"), tiny.prompts(12)
    arguments = {**inputs, "max_new_tokens": 9, "do_sample": False}
    plain = target.generate(**arguments).tolist()
    cache = DynamicCache(config=target.config)
    target(inputs["input_ids"][:, :7], **{CACHE: cache})
    spec, put = SpeculativeGenerator(target, "ngram", draft_length=4, on_unsupported="error"), SpeculativeCache.put

    def out_of_memory(self, layer, *args):
        if layer == 1:
            raise MemoryError
        put(self, layer, *args)

    monkeypatch.setattr(SpeculativeCache, "put", out_of_memory)
    with pytest.raises(MemoryError):
        spec.generate(**arguments, **{CACHE: cache})
    monkeypatch.undo()
    assert [layer.get_seq_length() for layer in cache.layers] == [7, 7]
    assert spec.generate(**arguments, **{CACHE: cache}).tolist() == plain


def test_caches_that_cannot_be_continued_say_what_to_do():
    target, inputs = named("llama"), tiny.prompts(12)
    full = DynamicCache(config=target.config)
    target(inputs["input_ids"], **{CACHE: full})
    static = StaticCache(config=target.config, max_cache_len=40)
    sliding = named("gemma3")
    holes = inputs["attention_mask"].clone()
    holes[0, 5] = 0
    for model, arguments, reason in (
        (target, {CACHE: full}, r"crop\(-1\)"),
        (target, {CACHE: static}, "only a DynamicCache can be continued"),
        (sliding, {"attention_mask": holes}, "holes"),
    ):
        spec = SpeculativeGenerator(model, "ngram", on_unsupported="error")
        with pytest.raises(ValueError, match=reason):
            spec.generate(**{**inputs, **arguments}, max_new_tokens=4)


# Windows


@pytest.mark.parametrize(
    ("proposer", "prompt", "window", "name"),
    diagonal(
        ["tree", "garbage"],
        {f"prompt{i}": prompt for i, prompt in enumerate([(1,), (5, 2), (60, 3, 31), (75,)])},
        [2, 3, 6, 20],
        ["gemma3", "mistral"],
        times=2,
    ),
)
def test_texts_past_the_window_several_times(proposer, prompt, window, name):
    """Prompts shorter and longer than the window, windows smaller than the draft."""
    target = tiny.model(name, sliding_window=window)
    target.name = name
    arguments = {"max_new_tokens": 50, "do_sample": False, "return_dict_in_generate": True}
    inputs = tiny.prompts(*prompt)
    plain = target.generate(**inputs, **arguments)
    spec = SpeculativeGenerator(target, PROPOSERS[proposer](target), draft_length=4, on_unsupported="error")
    ours = spec.generate(**inputs, **arguments)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    same_cache(cache_in(ours), cache_in(plain), inputs["attention_mask"])


def test_rows_far_ahead_are_rolled_back_in_windows():
    """One row writes far ahead of the other, until a criterion over both cuts it back."""
    target = tiny.model("gemma3", sliding_window=4)
    inputs = tiny.prompts(9, 14)
    arguments = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    answer = target.generate(**inputs, **arguments).sequences

    class OneRowOnly(tiny.Garbage):
        """Drafts the first row's very text, of the other nothing."""

        def _row(self, context, b, most, chain):
            tokens, parents = super()._row(context, b, most, True)
            if b:
                return tokens, [-1] * len(parents)
            end = context.ends[b]
            known = self.answer[b, end : end + most].tolist()
            length = min(len(known), context.budget[b])
            return known + [0] * (most - len(known)), [n - 1 if n <= length else -1 for n in range(most + 1)]

    def stops(input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 30)

    for criteria in (None, [stops]):
        plain = target.generate(**inputs, **arguments, stopping_criteria=criteria)
        spec = SpeculativeGenerator(target, OneRowOnly(size=9, answer=answer), draft_length=9, on_unsupported="error")
        ours = spec.generate(**inputs, **arguments, stopping_criteria=criteria)
        assert spec.report.num_accepted_tokens > 20
        assert ours.sequences.tolist() == plain.sequences.tolist()
        same_cache(cache_in(ours), cache_in(plain), inputs["attention_mask"])


def test_windows_keep_their_window(monkeypatch):
    """And what a draft needs behind it; of all other layers everything is kept."""
    most = {}

    class Watched(Slots):
        def place(self, *args):
            super().place(*args)
            most[self.window] = max(most.get(self.window, 0), self.count)

    monkeypatch.setattr("specdec.models.cache.kv_cache.Slots", Watched)
    spec = SpeculativeGenerator(tiny.model("gemma3", sliding_window=16), "ngram", draft_length=4)
    spec.generate(**tiny.prompts(300), max_new_tokens=100, do_sample=False)
    assert most[16] <= 15 + 8
    assert 400 <= most[None] <= 400 * 1.2


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_long_ragged_prompts_are_read_in_parts(name, monkeypatch):
    monkeypatch.setattr("specdec.models.attention_masks.MASKED", 2**9)
    monkeypatch.setattr("specdec.models.attention_masks.FEWEST", 4)
    target, inputs = named(name), tiny.prompts(60, 3, 31)
    arguments = {
        "max_new_tokens": 10,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
    }
    plain = target.generate(**inputs, **arguments)
    spec = SpeculativeGenerator(target, "ngram", draft_length=4)
    passes = []
    handle = target.get_input_embeddings().register_forward_hook(lambda module, args, out: passes.append(args[0].shape))
    assert spec.capability.trees  # the hook sees the probe's passes
    passes.clear()
    ours = spec.generate(**inputs, **arguments)
    handle.remove()
    assert all(B * n <= 16 for B, n in passes)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    real = inputs["attention_mask"][..., None].bool()
    for a, b in zip(ours.hidden_states[0], plain.hidden_states[0], strict=True):
        torch.testing.assert_close(a * real, b * real, atol=2e-4, rtol=1e-3)


@pytest.mark.usefixtures("only_new_objects")
def test_keys_and_values_take_no_more_than_plain_decodings():
    """A quarter on top for what a draft needs behind a window: all slots everywhere would be five times as much."""
    target = tiny.model("gemma3", sliding_window=16)

    class Weigher:
        """A streamer that adds up the keys and values there are, in their storages, at every eighth token."""

        most = tokens = 0

        def put(self, tokens):
            self.tokens += 1
            if self.tokens % 8:  # looking through all objects takes a second
                return
            heads, width = target.config.num_key_value_heads, target.config.head_dim
            found = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dim() == 4]
            kept = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in found
                if (t.shape[0], t.shape[1], t.shape[-1]) == (1, heads, width)
            }
            self.most = max(self.most, sum(kept.values()))

        def end(self):
            pass

    spec = SpeculativeGenerator(target, "ngram", draft_length=4, on_unsupported="error")
    taken = {}
    for name, generate in (("plain", target.generate), ("ours", spec.generate)):
        gc.collect()
        weigher = Weigher()
        generate(**tiny.prompts(300), max_new_tokens=40, do_sample=False, streamer=weigher)
        taken[name] = weigher.most
    assert 0 < taken["ours"] < 1.25 * taken["plain"]


def test_a_ragged_prefill_makes_no_matrix_of_positions():
    """(B, T, T) in 64-bit integers: 34 GB for four rows of 32k."""

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.int64:
                self.numbers = max(self.numbers, out.untyped_storage().nbytes() // 8)
            return out

    inputs = tiny.prompts(200, 60, 131)
    spec = SpeculativeGenerator(tiny.model("llama"), "ngram", draft_length=4, on_unsupported="error")
    assert spec.capability.trees
    with Largest() as largest:
        spec.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert 0 < largest.numbers < 200 * 200


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v32"])
def test_columns_that_a_later_turn_shows_again(name, rows):
    """A mask hides a part of the cache in one turn only."""
    model = families.tiny_model(name) if name == "deepseek_v32" else tiny.model(name)
    texts = []
    for generate in (model.generate, SpeculativeGenerator(model, "ngram", on_unsupported="error").generate):
        ids, cache = tiny.prompts(*[14] * rows)["input_ids"], DynamicCache(config=model.config)
        for hidden in ((), (3, 4, 5), ()):
            mask = torch.ones_like(ids)
            mask[0, list(hidden)] = 0
            arguments = {"do_sample": False, "max_new_tokens": 8, CACHE: cache}
            ids = generate(input_ids=ids, attention_mask=mask, **arguments)
            texts.append(ids[:, -8:].tolist())
            ids = torch.cat([ids, torch.tensor([[5, 6]] * rows, device=ids.device)], 1)
    assert texts[:3] == texts[3:]
