"""CUDA graphs that outlive a call: the next one of the same kind captures nothing, and any other kind captures its own.

python -m pytest --device pretend tests/unit/models/test_graph_pool.py    # or --device cuda
"""

import copy
import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

from specdec import DraftModelProposer, DynamicTree, HybridProposer, SpeculativeGenerator
from specdec.engine.loop import Loop
from specdec.models import cuda_graphs, graph_pool
from specdec.models.compat import CACHE, cache_in
from specdec.models.fingerprint import fingerprint, settings
from tests.support import launches, tiny

pytestmark = pytest.mark.skipif(tiny.DEVICE == "cpu", reason="pytest --device pretend, or cuda")
NEW = 24


@pytest.fixture
def captures(monkeypatch):
    """The captures of all calls."""
    made, begin = [], cuda_graphs.capturing

    def counted(*args):
        made.append(1)
        return begin(*args)

    monkeypatch.setattr(cuda_graphs, "capturing", counted)
    return made


def generator(name: str = "ngram") -> SpeculativeGenerator:
    """Make a generator that captures its rounds."""
    spec = launches.generator(name, automatic=False)
    spec.compile = "auto"
    return spec


def on_copies() -> SpeculativeGenerator:
    """With a target and a draft model that a test may change."""
    target, draft, _ = launches.models()
    return SpeculativeGenerator(copy.deepcopy(target), DraftModelProposer(copy.deepcopy(draft)), draft_length=4)


def check(spec, given, seed=0, **kwargs):
    texts = []
    for generate in (spec.model.generate, spec.generate):
        torch.manual_seed(seed)
        texts.append(generate(**given, **{"max_new_tokens": NEW, "do_sample": False} | kwargs).tolist())
    assert texts[0] == texts[1]
    return texts[1]


@pytest.mark.parametrize(
    ("name", "batch_size", "sampling"),
    [*((name, 1, False) for name in launches.PROPOSERS), ("eagle3 chain", 3, True), ("block tree", 3, True)],
)
def test_the_next_call_captures_nothing(name, batch_size, sampling, captures):
    spec = generator(name)
    given = [launches.prompts(batch_size) for _ in range(2)]
    given[1]["input_ids"] = given[1]["input_ids"].clone().masked_fill(given[1]["input_ids"] == 7, 9)
    for _ in range(2):  # a hybrid's calls draft by turns, and capture either draft once
        for seed in range(2):
            check(spec, given[seed], seed, do_sample=sampling)
    assert captures
    captures.clear()
    for seed in range(2):
        check(spec, given[seed], seed, do_sample=sampling)
    assert not captures


def test_settings_of_a_call_that_are_part_of_a_graph():
    spec, given = generator(), launches.prompts(1)
    texts = [
        check(spec, given, do_sample=True, **settings)
        for settings in ({"temperature": 0.7}, {"temperature": 1.5}, {"top_k": 3}, {"suppress_tokens": [5, 6, 7]}) * 2
    ]
    assert texts[:4] == texts[4:]
    assert len({str(text) for text in texts}) > 2


def add_adapter(target):
    layer = target.model.layers[0].mlp
    layer.down_proj.bias = torch.nn.Parameter(torch.full((layer.down_proj.out_features,), 0.5).to(tiny.DEVICE))


def replace_weights(target):
    weight = target.model.layers[1].mlp.up_proj.weight
    target.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(-weight.detach())


def add_hook(target):
    target.model.layers[1].register_forward_hook(lambda module, inputs, output: output * 1.5)


def change_setting(target):
    for layer in target.model.layers:
        layer.self_attn.scaling = 1.0


def cut_head(target):
    head = target.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach()[: head.out_features // 2])  # where it was


def change_class(target):
    mlp = target.model.layers[1].mlp
    mlp.__class__ = type("Negated", (type(mlp),), {"forward": lambda self, x: -super(type(self), self).forward(x)})


@pytest.mark.parametrize("change", [add_adapter, replace_weights, add_hook, change_setting, cut_head, change_class])
def test_a_model_that_is_changed_between_calls(change):
    spec, given = on_copies(), launches.prompts(1)
    before = [check(spec, given) for _ in range(3)]
    change(spec.model)
    after = [check(spec, given) for _ in range(3)]
    assert after[0] != before[0]


def test_a_forward_pass_that_is_replaced_between_calls(monkeypatch):
    spec, given = on_copies(), launches.prompts(1)
    before = [check(spec, given) for _ in range(2)]
    kind = type(spec.model.model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: -own(self, x))
    assert check(spec, given) != before[0]


def test_a_setting_that_a_streamer_changes():
    """Captures after such a change belong to no kind that the earlier settings describe."""
    spec, given = on_copies(), launches.prompts(1)
    layer = spec.model.model.layers[0].self_attn
    own = layer.scaling

    class Changing:
        columns = 0

        def put(self, value):
            self.columns += 1
            layer.scaling = own if self.columns < 3 else 4 * own

        def end(self):
            pass

    spec.generate(**given, do_sample=False, max_new_tokens=NEW, streamer=Changing())
    for layer.scaling in (own, 4 * own):
        check(spec, given)


def test_a_hook_whose_code_reads_what_it_likes():
    spec, given, scale = on_copies(), launches.prompts(1), [1.0]
    spec.model.model.layers[1].register_forward_hook(lambda module, inputs, output: output * scale[0])
    texts = []
    for scale[0] in (1.0, 2.0, 1.0):
        texts += [check(spec, given) for _ in range(2)]
    assert texts[0] == texts[1] == texts[4] != texts[2] == texts[3]


def test_weights_that_are_changed_in_place(captures):
    spec, given = on_copies(), launches.prompts(1)
    before = [check(spec, given) for _ in range(3)]
    captures.clear()
    with torch.no_grad():
        for model in (spec.model, spec.proposer.model):
            model.model.layers[1].mlp.up_proj.weight.mul_(-1)
    assert check(spec, given) != before[0]
    assert not captures


def test_calls_within_a_call_have_graphs_of_their_own():
    spec, given = generator(), launches.prompts(1)
    inner = []

    class Streamer:
        def put(self, value):
            if len(inner) < 3:
                inner.append(1)
                check(spec, launches.prompts(1))

        def end(self):
            pass

    for _ in range(2):
        inner.clear()
        text = spec.generate(**given, do_sample=False, max_new_tokens=NEW, streamer=Streamer()).tolist()
        assert text == spec.model.generate(**given, do_sample=False, max_new_tokens=NEW).tolist()
    assert len(inner) == 3


def test_a_longer_text_moves_the_buffers(monkeypatch):
    monkeypatch.setattr("specdec.models.cache.buffers.FEWEST", 32)
    spec, given = generator("eagle3 chain"), launches.prompts(1)
    for new in (8, 60, 8, 150, 60):
        check(spec, given, max_new_tokens=new)


def test_a_cache_that_is_given_back_takes_its_buffers_along():
    spec, given = generator(), launches.prompts(1)
    for _ in range(2):
        check(spec, given)
    made = [
        generate(**given, do_sample=False, max_new_tokens=NEW, return_dict_in_generate=True, **{CACHE: cache})
        for generate, cache in ((spec.generate, DynamicCache()), (spec.model.generate, DynamicCache()))
    ]
    kept = [cache_in(output).layers[0].keys.tolist() for output in made]
    check(spec, given)
    assert cache_in(made[0]).layers[0].keys.tolist() == kept[0]
    torch.testing.assert_close(torch.tensor(kept[0]), torch.tensor(kept[1]))


def test_values_that_are_not_finite_stay_in_their_call():
    spec, given = on_copies(), launches.prompts(1)
    wanted = [check(spec, given) for _ in range(3)][-1]
    weight = spec.model.model.layers[0].self_attn.v_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
        spec.generate(**launches.prompts(1), do_sample=False, max_new_tokens=60)
        weight.copy_(kept)
    assert check(spec, given) == wanted


def test_memory_is_released(monkeypatch):
    spec, given = generator(), launches.prompts(1)
    pool = spec._sessions.own.graphs
    check(spec, given)
    assert len(pool) == 1
    spec.release_memory()
    assert len(pool) == 0
    monkeypatch.setattr(graph_pool, "is_scarce", lambda device: True)
    check(spec, given)
    assert len(pool) == 0
    monkeypatch.setattr(graph_pool, "is_scarce", lambda device: False)
    for batch_size in range(1, graph_pool.MOST + 3):
        check(spec, launches.prompts(batch_size))
    assert len(pool) == graph_pool.MOST


def test_memory_of_a_generator_that_is_deleted_is_released_at_once():
    spec = generator("eagle3 chain")
    check(spec, launches.prompts(1))
    ((_, recorder),) = spec._sessions.own.graphs._idle
    kept = [weakref.ref(recorder), *map(weakref.ref, recorder._captured.values())]
    del recorder
    gc.collect()
    gc.disable()
    try:
        del spec
        assert [one() for one in kept] == [None] * len(kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["eagle3 chain", "mtp chain"])
def test_states_of_a_prompt_are_not_kept(name, monkeypatch):
    spec, seen, begin = generator(name), [], Loop._first_token

    def first_token(self, prefill):
        seen.append(weakref.ref(prefill.features))
        begin(self, prefill)

    monkeypatch.setattr(Loop, "_first_token", first_token)
    check(spec, {name: tensor.to("cuda") for name, tensor in tiny.prompts(40).items()})
    assert len(spec._sessions.own.graphs) == 1
    gc.collect()
    assert [features() for features in seen] == [None]


def test_calls_on_another_stream_have_graphs_of_their_own(captures):
    spec, given = generator(), launches.prompts(1)
    check(spec, given)
    captures.clear()
    with torch.cuda.stream(torch.cuda.Stream()):
        check(spec, given)
    assert captures
    captures.clear()
    check(spec, given)
    assert not captures


def test_the_proposer_within_a_hybrid_may_get_another_tree(monkeypatch):
    monkeypatch.setattr(HybridProposer, "_lookup_pays", lambda *args: False)
    spec, given, sizes = generator("hybrid"), launches.prompts(1), []
    for size in (4, 9, 4, 9):
        spec.proposer.other.tree, spec.draft_length = DynamicTree(depth=3, top_k=3, size=size), 3
        with spec.watch() as rounds:
            check(spec, given)
        sizes.append(max(len(round.tokens) for round in rounds))
    assert sizes == [4, 9, 4, 9]


def test_a_call_that_fails_keeps_nothing():
    spec, given = generator(), launches.prompts(1)

    class Failing:
        def put(self, value):
            if value.dim() == 1:
                raise KeyboardInterrupt

        def end(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        spec.generate(**given, do_sample=False, max_new_tokens=NEW, streamer=Failing())
    assert len(spec._sessions.own.graphs) == 0
    check(spec, given)


def test_what_a_fingerprint_tells_apart():
    layer = torch.nn.Linear(2, 2)
    before = fingerprint(layer)
    layer.note = {"scale": [1.0, 2.0]}
    changed = fingerprint(layer)
    assert before != changed
    layer.note["scale"][1] = 3.0
    assert fingerprint(layer) != changed
    layer.register_forward_hook(lambda *_: None)
    assert fingerprint(layer) is None
    assert settings(type("Holder", (), {})()) is not None


@pytest.mark.parametrize("attribute", [lambda whole: whole, lambda whole: [whole]], ids=["itself", "in a list"])
def test_a_fingerprint_of_modules_that_refer_to_each_other(attribute):
    whole = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for layer in whole:
        vars(layer)["whole"] = attribute(whole)
    before = fingerprint(whole)
    assert fingerprint(whole) == before
    whole[1].note = 1
    assert fingerprint(whole) != before


def test_a_fingerprint_of_layers_that_are_used_twice():
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert fingerprint(torch.nn.Sequential(one, two, one)) != fingerprint(torch.nn.Sequential(one, one, two))
    layers = torch.nn.ModuleList([one, two, one])
    before = fingerprint(layers)
    layers[1], layers[2] = one, two
    assert fingerprint(layers) != before


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as those of quantised weights."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(args[0])  # detached, for a parameter


def test_tensors_whose_memory_is_not_known_have_no_fingerprint():
    layer = torch.nn.Linear(2, 2)
    layer.weight = torch.nn.Parameter(Wrapped(torch.ones(2, 2)), requires_grad=False)
    assert fingerprint(layer) is None
    before = fingerprint(layer, hooks=True)
    assert fingerprint(layer, hooks=True) == before
    layer.weight = torch.nn.Parameter(Wrapped(torch.ones(2, 2)), requires_grad=False)
    assert fingerprint(layer, hooks=True) != before
