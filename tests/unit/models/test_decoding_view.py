"""The view of a model that runs passes over drafts: it follows changes of the model, and a wrong one is given up."""

import copy

import pytest
import torch

from specdec.models import draft_attention, runner, static_forward
from specdec.models.decoding_view import CurrentView, decoding_view
from specdec.models.runner import ModelRunner
from specdec.models.static_forward import StaticForward
from specdec.models.views import view
from specdec.sampling.draft_tree import DraftTree
from tests.support import interpreted, tiny

pytestmark = pytest.mark.skipif(tiny.DEVICE != "cpu", reason="compares values, which needs no device")


@pytest.fixture
def captured(monkeypatch):
    """`captured(target)`: its captured passes, as on a GPU."""
    monkeypatch.setattr(static_forward, "device_of", lambda model: torch.device("cuda"))
    return lambda target: StaticForward(target, compiled=False)


def passes(target, forward):
    """Logits of a tree of 5 in two ragged rows, thrice, with commits that move nodes between them."""
    draft = DraftTree(torch.arange(10).view(2, 5), torch.tensor([-1, 0, 0, 1, 2]).expand(2, 5))
    rows = ModelRunner(target, static_forward=forward)
    rows.start(2)
    rows.extend(given=tiny.prompts(9, 4)["input_ids"], pads=[0, 5])
    for _ in range(3):
        yield rows.grow(draft.tokens, draft.depth, draft.ancestors).logits
        rows.commit([3, 1], torch.tensor([[0, 2, 4], [0, 1, 2]]))


def assert_right(target, forward):
    with torch.no_grad():
        for ours, right in zip(passes(target, forward), passes(target, None), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_captured_passes_run_the_view(name, captured, monkeypatch):
    used, attend = [], draft_attention.attend
    monkeypatch.setattr(draft_attention, "attend", lambda *args: used.append(args) or attend(*args))
    target = tiny.model(name)
    forward = captured(target)
    with tiny.specdec_warnings() as warned:
        assert_right(target, forward)
    assert not warned
    assert len(forward) == 1
    assert len(used) == 2 * target.config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.skipif(interpreted.MISSING, reason="triton's interpreter")
def test_captured_passes_run_the_kernel(captured, monkeypatch):
    interpreted.mend()
    monkeypatch.setattr(draft_attention, "compiles_for", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(draft_attention, "TRITON_FROM", 1)
    monkeypatch.setattr(draft_attention, "_right", {})
    target = tiny.model("gemma3", num_hidden_layers=7, sliding_window=3)
    assert_right(target, captured(target))
    assert list(draft_attention._right.values()) == [True]


def test_the_pass_that_is_checked_is_the_captured_one(captured, monkeypatch):
    """A CUDA graph is compared with the eager run before it: both must be rounded alike."""
    run = static_forward._pass
    monkeypatch.setattr(static_forward, "_pass", lambda *args: (run(*args)[0] + 1e-4, None))
    target = tiny.model("llama")
    with torch.no_grad():
        pairs = list(zip(passes(target, captured(target)), passes(target, None), strict=True))
    assert [bool((ours - right > 5e-5).all()) for ours, right in pairs] == [False, True, True]


def test_a_view_that_gives_other_logits_is_given_up(captured, monkeypatch):
    """The model itself runs instead."""
    linear = torch.nn.Linear

    def doubled(model):
        return view(model, lambda layer: torch.nn.Identity() if isinstance(layer, linear) and _square(layer) else layer)

    monkeypatch.setattr(static_forward, "decoding_view", doubled)
    target = tiny.model("llama")
    forward = captured(target)
    with tiny.specdec_warnings() as warned:
        assert_right(target, forward)
    assert not warned
    assert len(forward) == 1
    assert forward._view is None


def _square(layer):
    return layer.in_features == layer.out_features


@pytest.mark.parametrize(("device", "sized"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_draft_passes_without_captured_ones_run_the_view_on_gpus(device, sized, monkeypatch):
    """Of a draft model with a trimmed vocabulary, for example: its buffers are as long as the target's."""
    monkeypatch.setattr(runner, "device_of", lambda model: torch.device(device))
    names = {
        part.config._attn_implementation
        for part in ModelRunner(tiny.model("llama"), sized=sized).model.modules()
        if "Attention" in type(part).__name__
    }
    assert names == {draft_attention.NAME if (device, sized) == ("cuda", True) else "sdpa"}


def test_the_view_follows_the_model():
    target = copy.deepcopy(tiny.model("llama"))
    decoding = CurrentView(target, decoding_view)
    first = decoding.current()
    assert first is not target
    assert decoding.current() is first
    target.model.layers[0].register_forward_hook(lambda *args: None)
    second = decoding.current()
    assert second is not first
    target.model.layers[1].mlp = target.model.layers[0].mlp
    assert decoding.current().model.layers[1].mlp.up_proj is target.model.layers[0].mlp.up_proj
