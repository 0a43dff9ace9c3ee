"""`probe`: it finds out what a model can do, and touches nothing that others share."""

import copy
import gc
import threading
import types
import weakref
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import specdec.models.capability
from specdec import DraftModelProposer, SpeculativeGenerator
from specdec.models import compat
from specdec.models.capability import WINDOW, Capability, capability, probe
from specdec.models.hidden_states import Reference
from tests.support import tiny


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_the_probe_leaves_the_windows_of_a_model_alone(name):
    """Another thread may be decoding: every pass of the probe runs on settings of its own."""
    model = copy.deepcopy(tiny.model(name))
    seen = []
    watched = type(model.config)
    before = watched.__setattr__

    def noting(config, key, value):
        if config is model.config.get_text_config(decoder=True) and key == "sliding_window":
            seen.append(value)
        before(config, key, value)

    watched.__setattr__ = noting
    try:
        assert probe(model).trees
    finally:
        del watched.__setattr__
    assert seen == []
    assert model.config.get_text_config(decoder=True).sliding_window == tiny.WINDOW != WINDOW


def test_plain_decoding_beside_a_probe_in_another_thread():
    model = copy.deepcopy(tiny.model("mistral"))
    inputs = tiny.prompts(9)
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=60).tolist()
    written, probing = [], threading.Event()

    def decode():
        while not probing.is_set() or len(written) < 2:
            written.append(model.generate(**inputs, do_sample=False, max_new_tokens=60).tolist())

    thread = threading.Thread(target=decode)
    thread.start()
    for _ in range(12):
        assert probe(model).trees
    probing.set()
    thread.join()
    assert all(text == expected for text in written)


def test_the_probe_writes_no_buffer():
    """RoPE that depends on length keeps its frequencies in one, and a pass may write them."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **tiny.BASE | {"max_position_embeddings": 40, "rope_parameters": scaling})
    ).eval()
    model(torch.randint(64, (1, 60)))  # longer than the limit: the frequencies have changed
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert probe(model).trees
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_model_in_train_mode_is_judged_in_each_mode(dropout):
    model = copy.deepcopy(tiny.model("llama", attention_dropout=dropout)).train()
    spec = SpeculativeGenerator(model, "ngram", draft_length=4)
    assert spec.capability.trees == (dropout == 0)
    if dropout:
        with tiny.specdec_warnings() as messages:
            spec.generate(**tiny.prompts(9), max_new_tokens=4)
        assert len(messages) == 1
        assert "train mode" in messages[0]
        assert "model.eval()" in messages[0]
    model.eval()
    assert spec.capability.trees
    model.train()
    assert spec.capability.trees == (dropout == 0)


def test_gradient_checkpointing_runs_as_plain_decoding():
    """In train mode it takes the cache away."""
    model = copy.deepcopy(tiny.model("llama")).train()
    model.gradient_checkpointing_enable()
    found = SpeculativeGenerator(model, "ngram").capability
    assert "train mode" in found.reason or (
        compat.RENAMED and found.trees
    )  # since 5.24 only where gradients are wanted


def test_gradient_checkpointing_that_is_switched_on_later():
    model = copy.deepcopy(tiny.model("llama")).train()
    spec = SpeculativeGenerator(model, "ngram", draft_length=3)
    assert spec.capability.trees
    model.gradient_checkpointing_enable()
    inputs = tiny.prompts(9)
    found = spec.generate(**inputs, do_sample=False, max_new_tokens=8)
    assert torch.equal(found, model.generate(**inputs, do_sample=False, max_new_tokens=8))
    assert spec.last_report.num_plain_calls == (not compat.RENAMED)


def test_the_probe_draws_none_of_the_calls_random_numbers():
    """A model with dropout draws some when it is tried out in train mode, in a generator's first call."""
    model, inputs = copy.deepcopy(tiny.model("llama", attention_dropout=0.5)).train(), tiny.prompts(9)
    spec = SpeculativeGenerator(model, "ngram")
    torch.manual_seed(1)
    found = spec.generate(**inputs, do_sample=False, max_new_tokens=8)
    torch.manual_seed(1)
    assert torch.equal(found, model.generate(**inputs, do_sample=False, max_new_tokens=8))


class Draws(torch.nn.Module):
    """Changes nothing, and draws random numbers in train mode, as an adapter's dropout does before it has learnt."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.dropout = inner, torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.inner(x) + 0 * self.dropout(x).mean()


@pytest.mark.parametrize("first", ["another mode", "without it"])
def test_random_numbers_that_change_no_logits_are_noticed(first):
    """Those of plain decoding's passes, one token each, could not be drawn alike in passes over drafts."""
    model, inputs = copy.deepcopy(tiny.model("llama")), tiny.prompts(9)
    spec = SpeculativeGenerator(model, "ngram", draft_length=3)
    if first == "without it":
        model.train()
        assert spec.capability.trees
    layer = model.model.layers[0].mlp
    layer.up_proj = Draws(layer.up_proj).train(model.training)
    if first == "another mode":
        assert spec.capability.trees
        layer.up_proj.train()  # the model itself stays in eval mode
    torch.manual_seed(1)
    found = spec.generate(**inputs, do_sample=True, max_new_tokens=12)
    torch.manual_seed(1)
    assert torch.equal(found, model.generate(**inputs, do_sample=True, max_new_tokens=12))
    assert spec.last_report.num_plain_calls == 1
    assert "train mode, where its forward pass draws random numbers: call model.eval()" in spec.capability.reason
    model.eval()
    assert spec.capability.trees


def test_dropout_that_is_turned_on_in_train_mode():
    model, inputs = copy.deepcopy(tiny.model("llama")).train(), tiny.prompts(9)
    spec = SpeculativeGenerator(model, "ngram", draft_length=3)
    assert spec.capability.trees
    model.model.layers[1].self_attn.attention_dropout = 0.1
    torch.manual_seed(1)
    found = spec.generate(**inputs, do_sample=False, max_new_tokens=12)
    torch.manual_seed(1)
    assert torch.equal(found, model.generate(**inputs, do_sample=False, max_new_tokens=12))
    assert spec.last_report.num_plain_calls == 1


def test_it_is_tried_out_once_in_each_state(monkeypatch):
    tried, attempt = [], specdec.models.capability.probe
    monkeypatch.setattr(specdec.models.capability, "probe", lambda *args: (tried.append(args), attempt(*args))[1])
    model, inputs = copy.deepcopy(tiny.model("gemma3")), tiny.prompts(9)
    spec = SpeculativeGenerator(model, "ngram", draft_length=3)
    for change in (model.eval, model.train, model.double, model.eval, model.float, model.train):
        change()
        for _ in range(2):
            spec.generate(**inputs, do_sample=False, max_new_tokens=2)
    assert len(tried) == 4


class Steering:
    """Adds to the state of a pass's last token, as plain decoding's single tokens have it."""

    def __call__(self, module, args, output):
        states = output if isinstance(output, torch.Tensor) else output[0]
        last = torch.zeros_like(states)
        last[:, -1] = 3.0
        steered = states + last
        return steered if isinstance(output, torch.Tensor) else (steered, *output[1:])


def test_hooks_that_come_and_go_are_noticed():
    model, inputs = copy.deepcopy(tiny.model("llama")), tiny.prompts(9)
    spec, steering = SpeculativeGenerator(model, "ngram", draft_length=3), Steering()
    plain_calls = []
    for hooked in (False, True, False, True):
        handle = model.model.layers[0].register_forward_hook(steering) if hooked else None
        with tiny.specdec_warnings():
            found = spec.generate(**inputs, do_sample=False, max_new_tokens=20)
        assert torch.equal(found, model.generate(**inputs, do_sample=False, max_new_tokens=20))
        plain_calls.append(spec.last_report.num_plain_calls)
        if handle is not None:
            handle.remove()
    assert plain_calls == [0, 1, 0, 1]


def test_hooks_that_equal_each_other_are_different_hooks():
    """Vectors cannot be compared as one value, and a hook that was probed says nothing about an equal one."""

    @dataclass
    class Vector:
        values: torch.Tensor

        def hook(self, module, args, output):
            return None

    model, inputs = copy.deepcopy(tiny.model("llama")), tiny.prompts(9)
    spec = SpeculativeGenerator(model, "ngram", draft_length=3)
    kept = [Vector(torch.ones(16)), Vector(torch.ones(16))]
    for vector in kept:
        handle = model.model.layers[0].register_forward_hook(vector.hook)
        assert torch.equal(
            spec.generate(**inputs, do_sample=False, max_new_tokens=4),
            model.generate(**inputs, do_sample=False, max_new_tokens=4),
        )
        handle.remove()
    references = [Reference(vector.hook) for vector in kept]
    assert references[0] == Reference(kept[0].hook) != references[1]


def test_settings_that_come_and_go_are_probed_once(monkeypatch):
    model, probed = copy.deepcopy(tiny.model("llama")), []
    monkeypatch.setattr(specdec.models.capability, "probe", lambda *given: probed.append(given) or Capability("dict"))
    hooks = [lambda *given, index=index: None for index in range(12)]
    for _ in range(2):
        for hook in hooks:
            handle = model.model.layers[0].register_forward_hook(hook)
            capability(model)
            handle.remove()
    assert len(probed) == len(hooks)


def test_hooks_do_not_outlive_the_model():
    """What was found out for a model with a hook keeps neither of them."""
    model = copy.deepcopy(tiny.model("llama"))
    model.forward = types.MethodType(type(model).forward, model)
    steering = Steering()
    handle = model.model.layers[0].register_forward_hook(steering)
    SpeculativeGenerator(model, "ngram").capability  # noqa: B018
    handle.remove()
    kept = weakref.ref(steering), weakref.ref(model)
    del model, steering, handle
    gc.collect()
    assert [one() for one in kept] == [None, None]


# What a config says


def windows(config):
    config.sliding_window = 3


def full_layers(config):
    config.layer_types = ["full_attention"] * len(config.layer_types)


def another_layer(config):
    config.layer_types[0] = "full_attention"


@pytest.mark.parametrize("change", [windows, full_layers, another_layer])
def test_windows_that_change_between_calls(change):
    """Lists that are written to, too: the model is tried out anew, and its rows go by what it says now."""
    model, inputs = copy.deepcopy(tiny.model("gemma3")), tiny.prompts(12, 5)
    spec = SpeculativeGenerator(model, tiny.Garbage(), on_unsupported="error")
    spec.generate(**inputs, do_sample=False, max_new_tokens=4)
    change(model.config)
    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        if hasattr(layer, "attention_type"):
            layer.attention_type = kind
        layer.self_attn.sliding_window = model.config.sliding_window if kind == "sliding_attention" else None
        layer.self_attn.is_sliding = kind == "sliding_attention"
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=24).tolist() == expected.tolist()


@pytest.mark.parametrize("when", ["from the start", "after a call"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_whose_routers_are_asked_for(name, when):
    """A router's loss reads the attention mask, and knows none of ours."""
    model, draft, inputs = copy.deepcopy(tiny.model(name)), copy.deepcopy(tiny.model(name, seed=1)), tiny.prompts(9)
    proposer = DraftModelProposer(draft, branching=(2, 2))
    spec = SpeculativeGenerator(model, proposer, draft_length=4, on_unsupported="error")
    if when == "after a call":
        spec.generate(**inputs, do_sample=False, max_new_tokens=4)
    model.config.output_router_logits = draft.config.output_router_logits = True
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=16).tolist()
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=16).tolist() == plain
    assert spec.capability.trees
    assert spec.last_report.num_draft_tokens > 20


@pytest.mark.parametrize("extra", ["output_attentions", "output_hidden_states"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_passes_make_nothing_that_only_a_config_asks_for(name, extra):
    model, inputs = copy.deepcopy(tiny.model(name)), tiny.prompts(9, 4)
    model.set_attn_implementation("eager")
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=12).tolist()
    setattr(model.config, extra, True)
    spec, made = SpeculativeGenerator(model, "ngram", draft_length=3, on_unsupported="error"), []

    def note(module, arguments, output):
        made.append(output.get(extra.removeprefix("output_")))

    handle = model.register_forward_hook(note)
    try:
        assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain
    finally:
        handle.remove()
    assert made
    assert all(states is None for states in made)


def test_a_model_that_cannot_be_copied_is_not_tried_out():
    model = copy.deepcopy(tiny.model("llama"))
    model.guard = threading.Lock()
    assert "cannot be copied" in probe(model).reason


def test_a_generator_that_is_installed_does_not_stand_in_the_way():
    """The model is tried out in its first call, when `generate` is ours already, lock and draft model and all."""
    target, inputs = copy.deepcopy(tiny.model("llama")), tiny.prompts(9)
    expected = target.generate(**inputs, do_sample=False, max_new_tokens=8)
    spec = SpeculativeGenerator(target, tiny.model("llama", seed=1), draft_length=2)
    with spec.installed():
        assert target.generate(**inputs, do_sample=False, max_new_tokens=8).tolist() == expected.tolist()
    assert spec.report.num_draft_tokens > 0
    assert spec.report.num_plain_calls == 0
