"""Views with fused layers: the model's own logits and features, in few launches; what is not swapped."""

import copy
from collections import Counter
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from specdec import DraftModelProposer, SpeculativeGenerator
from specdec.engine.draft_session import DraftSession
from specdec.models import static_forward as static_forward_module
from specdec.models.compat import CACHE
from specdec.models.fused_layers import with_fused_layers
from specdec.models.hidden_states import Taps
from specdec.models.kernels import launch as launch_module
from specdec.models.kernels.launch import available
from specdec.models.runner import ModelRunner
from specdec.models.static_forward import SlottedCache, StaticForward
from specdec.sampling.draft_tree import DraftTree
from tests.support import eagle3, tiny

fuser = pytest.importorskip("specdec.models.fuser", reason="triton is not installed")

DEVICE = torch.device(tiny.DEVICE)
pytestmark = pytest.mark.skipif(not available(DEVICE), reason="Triton's kernels do not run here")
SOME = ["llama", "qwen3", "gemma3", "mixtral"]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    """Products are torch's; test_few_rows.py tests the others."""
    monkeypatch.setattr(fuser, "_results", {})
    monkeypatch.setattr(fuser.few_rows, "IN_USE", frozenset())


@pytest.fixture
def on_gpu(monkeypatch):
    """Captured passes run fused layers, as on a GPU."""
    capture = DraftSession.capture
    monkeypatch.setattr(DraftSession, "capture", lambda session, compiled: capture(session, compiled=False))
    monkeypatch.setattr(static_forward_module, "device_of", lambda model: torch.device("cuda"))


@cache
def model(name, layers=2, seed=0):
    kinds = {"layer_types": ["sliding_attention", "full_attention"][-layers:]} if name == "gemma3" else {}
    return tiny.on_host(name, seed, num_hidden_layers=layers, **kinds).to(DEVICE)


def view_of(static_forward):
    """The model that its captured passes run."""
    return static_forward._view.current()


def kinds(module):
    """Names of the fused classes in a model, without the family's."""
    names = Counter(type(child).__name__ for child in module.modules())
    return {name: count for name, count in names.items() if name.startswith("Fused")}


def passes(target, static_forward, taps):
    """Logits and features of a tree of 5, thrice, with commits that move nodes between them."""
    draft = DraftTree(torch.arange(10).view(2, 5), torch.tensor([-1, 0, 0, 1, 2]).expand(2, 5))
    runner = ModelRunner(target, taps=taps, static_forward=static_forward)
    runner.start(2)
    runner.extend(given=tiny.prompts(9, 4)["input_ids"], pads=[0, 5])
    for _ in range(3):
        output = runner.grow(*(given.to(DEVICE) for given in (draft.tokens, draft.depth, draft.ancestors)))
        yield output.logits, output.features
        runner.commit([3, 1], torch.tensor([[0, 2, 4], [0, 1, 2]], device=DEVICE))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "qwen3", "gemma3", "mistral"))],
)
def test_captured_passes_give_the_models_logits_and_features(name):
    target = model(name)
    taps = Taps(target, (0, 1, 2, -1))
    plain = list(passes(target, None, taps))
    static_forward = StaticForward(target, taps, compiled=False)
    ours = list(passes(target, static_forward, taps))
    assert not static_forward.refused
    assert len(static_forward) == 1
    found = kinds(view_of(static_forward))
    for part in ("Attention", "DecoderLayer", *(() if name == "mixtral" else ("MLP",))):
        assert sum(count for kind, count in found.items() if kind.endswith(part)) == 2
    assert not kinds(target)
    for results in zip(ours, plain, strict=True):
        for result, right in zip(*results, strict=True):
            torch.testing.assert_close(result, right, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", SOME)
def test_other_caches_and_gradients_run_the_models_code(name):
    target, prompts = model(name), tiny.prompts(9, 4)
    view = with_fused_layers(target)
    torch.testing.assert_close(view(**prompts).logits, target(**prompts).logits, **CLOSE)
    assert view.generate(**prompts, max_new_tokens=3).tolist() == target.generate(**prompts, max_new_tokens=3).tolist()
    with torch.enable_grad():
        logits = view(**prompts).logits
        assert torch.equal(logits, target(**prompts).logits)
        assert torch.autograd.grad(logits.sum(), view.model.norm.weight)[0].abs().sum() > 0


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_text_is_plain_decodings(name):
    target, prompts = model(name), tiny.prompts(9, 5)
    plain = target.generate(**prompts, do_sample=False, max_new_tokens=8)
    proposer = DraftModelProposer(model(name, layers=1))
    spec = SpeculativeGenerator(target, proposer, draft_length=2, compile=True)
    with tiny.specdec_warnings() as warned:
        assert spec.generate(**prompts, do_sample=False, max_new_tokens=8).tolist() == plain.tolist()
    assert not warned
    for static_forward in (spec._sessions.own.static_forward, proposer._static_forward):
        assert len(static_forward) >= 1
        assert kinds(view_of(static_forward))


@pytest.mark.usefixtures("on_gpu")
def test_a_view_that_fails_gives_way_to_the_model(monkeypatch):
    class Broken(nn.Module):
        def forward(self, x):
            return x.roll(1, -1)

    def broken(target):
        view = copy.copy(target)
        view._modules = {**target._modules, "lm_head": nn.Sequential(target.lm_head, Broken())}
        return view

    monkeypatch.setattr(static_forward_module, "decoding_view", broken)
    target = model("llama")
    captured = StaticForward(target, compiled=False)
    plain, ours = list(passes(target, None, None)), list(passes(target, captured, None))
    assert captured._view is None
    assert len(captured) == 1
    assert not captured.refused
    torch.testing.assert_close(ours[-1][0], plain[-1][0])


# Launches

FREE = set(
    "view _unsafe_view expand transpose t permute reshape select slice unsqueeze squeeze split alias detach".split()
)
FREE |= {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "unbind", "as_strided"}
PRODUCTS = {"mm", "addmm", "bmm", "linear"}


class Launches(TorchDispatchMode):
    """Counts operations that are kernels on a GPU, except for matrix products."""

    def __init__(self):
        super().__init__()
        self.counts, self.paused = Counter(), False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not self.paused and name not in FREE | PRODUCTS:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))

    @contextmanager
    def as_one(self, name):
        """Count what runs within as one operation."""
        self.counts[name] += not self.paused
        before, self.paused = self.paused, True
        yield
        self.paused = before


@torch.no_grad()
@pytest.mark.parametrize("name", SOME)
def test_launches_per_layer(name, monkeypatch):
    """Attention is one, and experts are none."""
    launches = Launches()

    def attend(module, query, key, value, *args, **kwargs):
        with launches.as_one("attention"):
            return query.transpose(1, 2).contiguous(), None

    def launched(kernel, *args, **kwargs):
        with launches.as_one("triton"):
            launch_module.launch(kernel, *args, **kwargs)

    AttentionInterface.register("counted", attend)
    for file in ("rms_norm", "rotary", "activation"):
        monkeypatch.setattr(f"specdec.models.kernels.{file}.launch", launched)
    target = copy.deepcopy(model(name))
    target.config._attn_implementation = "counted"
    if name == "mixtral":
        target.model.layers[0].mlp = nn.Identity()
    view = with_fused_layers(target)
    config, totals = target.config, []
    states, angles = torch.randn(1, 2, 32, device=DEVICE), torch.randn(1, 2, 4, device=DEVICE).repeat(1, 1, 2)
    for layer in (target.model.layers[0], view.model.layers[0]):
        buffers = [torch.zeros(1, config.num_key_value_heads, 4, 8, device=DEVICE) for _ in range(2)]
        cache = SlottedCache({0: (*buffers, torch.tensor([[0, 1]], device=DEVICE))})
        launches.counts.clear()
        with launches:
            layer(states, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None, **{CACHE: cache})
        launches.counts["cos"] = launches.counts["sin"] = 0
        totals.append(launches.counts.total())
    assert totals[0] >= 25
    assert totals[1] <= 8, launches.counts
    assert launches.counts["triton"] == (4 if name in ("llama", "qwen3") else 5 if name == "gemma3" else 3)


# Layers that are swapped, and layers that are not


class Centred(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Swapped(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Scaled(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs) * 1.01


class Changed(LlamaAttention):
    """Rotates with other angles."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        cos, sin = position_embeddings
        return super().forward(hidden_states, (cos, -sin), attention_mask, **kwargs)


PLANTED = {
    Centred: lambda layer: [layer.input_layernorm],
    Swapped: lambda layer: [layer.mlp],
    Scaled: lambda layer: [layer],
    Changed: lambda layer: [layer.self_attn],
}


@torch.no_grad()
@pytest.mark.parametrize("kind", PLANTED)
def test_modules_that_almost_match_keep_their_code(kind):
    target = copy.deepcopy(model("llama"))
    for layer in target.model.layers:
        for module in PLANTED[kind](layer):
            module.__class__ = kind
    view, prompts = with_fused_layers(target), tiny.prompts(9)
    assert any(type(module) is kind for module in view.modules())
    assert kinds(view)
    torch.testing.assert_close(view(**prompts).logits, target(**prompts).logits, **CLOSE)


def test_attention_that_changes_keys_or_writes_none_is_not_swapped():
    """Code of its own with the same names in it."""
    changes = {
        "changes keys": "keys = keys * 2",
        "changes queries": "queries = queries * 2",
        "writes none": "return self.o_proj(queries.transpose(1, 2).flatten(2)), None",
    }
    for change in changes.values():
        text = (
            "def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):\n"
            "    shape = (*hidden_states.shape[:-1], -1, self.head_dim)\n"
            "    parts = [part(hidden_states) for part in (self.q_proj, self.k_proj, self.v_proj)]\n"
            "    queries, keys, values = (part.view(shape).transpose(1, 2) for part in parts)\n"
            "    queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)\n"
            f"    {change}\n"
            f"    keys, values = kwargs['{CACHE}'].update(keys, values, self.layer_idx)\n"
            "    attend = ALL_ATTENTION_FUNCTIONS.get_interface('sdpa', None)\n"
            "    return self.o_proj(attend(self, queries, keys, values, attention_mask)[0].flatten(2)), None\n"
        )
        names = dict(vars(__import__(LlamaAttention.__module__, fromlist=["*"])))
        exec(text, names)
        kind = type("Other", (LlamaAttention,), {"forward": names["forward"]})
        target = copy.deepcopy(model("llama"))
        target.model.layers[0].self_attn.__class__ = kind
        view = with_fused_layers(target)
        assert type(view.model.layers[0].self_attn) is kind
        assert "Fused" in type(view.model.layers[1].self_attn).__name__


def test_partial_rotary_is_left_alone():
    """The rotation that the kernel would apply has the size of a head."""
    target = tiny.model("phi")
    assert not any("Attention" in name for name in kinds(with_fused_layers(target)))


def test_wrapped_projections_are_called():
    class Wrapper(nn.Module):
        """Has no weight that could be read."""

        def __init__(self, inner):
            super().__init__()
            self.call = inner.forward

        def forward(self, x):
            return self.call(x) * 2

    target = copy.deepcopy(model("llama"))
    for module in [*target.modules()]:
        for name, child in module.named_children():
            if name.endswith("_proj"):
                setattr(module, name, Wrapper(child))
    view, prompts = with_fused_layers(target), tiny.prompts(9)
    assert kinds(view).keys() == kinds(with_fused_layers(model("llama"))).keys()
    with torch.no_grad():
        torch.testing.assert_close(view(**prompts).logits, target(**prompts).logits, **CLOSE)


def test_hooks_and_replaced_passes_are_kept():
    target, seen = copy.deepcopy(model("llama")), Counter()
    first, second = target.model.layers
    first.post_attention_layernorm.register_forward_hook(lambda *args: seen.update(["norm"]))
    second.mlp.act_fn.register_forward_pre_hook(lambda *args: seen.update(["activation"]))
    second.register_forward_hook(lambda *args: seen.update(["layer"]))
    first.mlp.forward = lambda x: seen.update(["mlp"]) or x
    view = with_fused_layers(target)
    assert not seen
    with torch.no_grad():
        view(**tiny.prompts(9))
    assert seen == {"norm": 1, "activation": 1, "layer": 1, "mlp": 1}
    assert "Fused" in type(view.model.layers[1]).__name__


def test_comparing_draws_no_random_numbers_and_changes_nothing():
    target = copy.deepcopy(model("qwen3"))
    before, weights = torch.get_rng_state(), copy.deepcopy(target.state_dict())
    view = with_fused_layers(target)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(weight, weights[name]) for name, weight in target.state_dict().items())
    assert not kinds(target)
    assert view.model.layers[0].self_attn.q_proj is target.model.layers[0].self_attn.q_proj


def test_modules_that_are_alike_are_compared_once(monkeypatch):
    compared = Counter()
    for name in ("rounding_of", "activation_of", "sums_agree", "writes_agree"):
        own = getattr(fuser, name)
        monkeypatch.setattr(fuser, name, lambda *args, own=own, name=name: compared.update([name]) or own(*args))
    for seed in (0, 1):
        with_fused_layers(tiny.model("llama", seed=seed))
    assert compared == {"rounding_of": 1, "activation_of": 1, "sums_agree": 1, "writes_agree": 1}


def test_roundings_are_told_apart_in_16_bits():
    """A weight of ones shows no difference, so others are tried."""
    for module, rounding in ((LlamaRMSNorm(48, 1e-6), 1), (nn.RMSNorm(48, 1e-6), 3)):
        view = with_fused_layers(module.to(DEVICE, torch.float16))
        assert view.rounding == rounding
    assert not hasattr(with_fused_layers(nn.LayerNorm(48, bias=False).to(DEVICE)), "rounding")


@torch.no_grad()
def test_norms_and_mlps_of_draft_heads():
    head = eagle3.head()
    view = with_fused_layers(head)
    assert kinds(view) == {"FusedLlamaRMSNorm": 4, "FusedLlamaMLP": 1}
    states = torch.randn(1, 3, 32, device=DEVICE)
    for name in ("input_layernorm", "mlp"):
        ours, right = (getattr(made.layers[0], name)(states) for made in (view, head))
        torch.testing.assert_close(ours, right, **CLOSE)


def test_models_where_nothing_is_known_are_returned_as_they_are():
    target = tiny.model("gpt2")
    assert with_fused_layers(target) is target


@pytest.mark.usefixtures("on_gpu")
def test_a_model_that_changes_has_another_view():
    """An adapter replaces projections, which a view made before does not see."""
    target = copy.deepcopy(model("llama"))
    static_forward = StaticForward(target, compiled=False)
    before = view_of(static_forward)
    assert view_of(static_forward) is before
    target.model.layers[0].self_attn.q_proj = nn.Sequential(target.model.layers[0].self_attn.q_proj)
    after = view_of(static_forward)
    assert after.model.layers[0].self_attn.q_proj is target.model.layers[0].self_attn.q_proj
    assert kinds(after) == kinds(before)


@torch.no_grad()
def test_layers_with_tensors_of_their_own_keep_their_code():
    """They may multiply by them, and the first layer's may be 1."""
    target = copy.deepcopy(model("llama"))
    for layer in target.model.layers:
        for module in (layer, layer.mlp):
            module.register_buffer("layer_scalar", torch.ones(1))
    found = kinds(with_fused_layers(target))
    assert found
    assert not {"FusedLayer", "FusedMLP"} & {*found}
