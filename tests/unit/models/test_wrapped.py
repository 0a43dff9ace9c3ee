"""Models in PEFT's adapters, in `torch.compile`, or in both: taken as targets and as drafts, whatever they wrap."""

import copy
import inspect
import types

import pytest
import torch
from torch import nn

from specdec import DraftModelProposer, SpeculativeGenerator
from specdec.models.introspection import unwrap_model
from tests.support import tiny

peft = pytest.importorskip("peft")
ARGUMENTS = {"do_sample": False, "max_new_tokens": 9}


def lora(model, **settings):
    settings = {"init_lora_weights": False, "target_modules": ["q_proj", "v_proj"]} | settings
    return peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**settings)).eval()


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_forward(model):
    model = copy.deepcopy(model)
    model.forward = torch.compile(model.forward, backend="eager")
    return model


WRAPPED = {
    "lora": lambda model: lora(model, task_type="CAUSAL_LM"),
    "lora of no task": lora,
    "lora and mixed": lambda model: peft.get_peft_model(copy.deepcopy(model), adapters(), mixed=True).eval(),
    "compiled": compiled,
    "compiled forward": compiled_forward,
    "compiled lora": lambda model: compiled(lora(model, task_type="CAUSAL_LM")),
    "lora of a compiled one": lambda model: lora(compiled(copy.deepcopy(model)), task_type="CAUSAL_LM"),
}


def adapters():
    return peft.LoraConfig(init_lora_weights=False, target_modules=["q_proj"])


SLOW = {"compiled forward"}  # traced anew for every shape


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in WRAPPED])
def test_a_wrapped_target(llama, ragged, name):
    target = WRAPPED[name](llama)
    expected = target.generate(**ragged, **ARGUMENTS).tolist()
    spec = SpeculativeGenerator(target, DraftModelProposer(llama, branching=(3, 2)), draft_length=3)
    assert spec.generate(**ragged, **ARGUMENTS).tolist() == expected
    assert spec.report.num_plain_calls == 0


@pytest.mark.parametrize("name", ["lora", "lora of no task", "compiled", "compiled lora"])
def test_the_other_ways_in(llama, single, name):
    target = WRAPPED[name](llama)
    expected = target.generate(**single, **ARGUMENTS).tolist()
    spec = SpeculativeGenerator(target, "ngram", draft_length=3)
    with spec.installed():
        assert target.generate(**single, **ARGUMENTS).tolist() == expected
    assert target.generate(**single, **ARGUMENTS, custom_generate=spec).tolist() == expected
    assert spec.report.num_calls == 2
    assert spec.report.num_plain_calls == 0


@pytest.mark.parametrize("name", ["lora", "lora and mixed", "compiled", "compiled lora"])
def test_an_installed_generator_is_the_wrappers_method(llama, single, name):
    target = WRAPPED[name](llama)
    before, spec = target.generate, SpeculativeGenerator(target, "ngram", draft_length=3)
    expected = target.generate(**single, **ARGUMENTS).tolist()
    with spec.installed():
        assert inspect.ismethod(target.generate)
        assert target.generate.__self__ is before.__self__
        assert inspect.signature(target.generate) == inspect.signature(before)
        assert types.MethodType(target.generate.__func__, before.__self__)(**single, **ARGUMENTS).tolist() == expected
    assert spec.report.num_calls == 1
    assert target.generate == before


def test_peft_updates_the_signature(llama, single):
    """It makes a method of the one that stands there."""
    target = WRAPPED["lora"](llama)
    expected = target.generate(**single, **ARGUMENTS).tolist()
    spec = SpeculativeGenerator(target, "ngram", draft_length=3)
    with spec.installed():
        assert "inputs" not in inspect.signature(target.generate).parameters
        peft.helpers.update_generate_signature(target)
        assert inspect.signature(target.generate) == inspect.signature(unwrap_model(target).generate)
        assert target.generate(**single, **ARGUMENTS).tolist() == expected
    assert spec.report.num_calls == 1
    assert "generate" not in vars(target)


@pytest.mark.parametrize("name", ["lora", "compiled", "compiled lora"])
def test_a_wrapped_draft(llama, single, name):
    draft = WRAPPED[name](llama)
    spec = SpeculativeGenerator(llama, draft, draft_length=3)
    assert spec.generate(**single, **ARGUMENTS).tolist() == llama.generate(**single, **ARGUMENTS).tolist()
    assert spec.report.num_draft_tokens > 0


def test_an_adapter_that_is_switched_off(llama, single):
    target = WRAPPED["lora"](llama)
    spec = SpeculativeGenerator(target, "ngram", draft_length=3)
    with target.disable_adapter():
        assert spec.generate(**single, **ARGUMENTS).tolist() == llama.generate(**single, **ARGUMENTS).tolist()


def test_a_wrappers_own_generation_config(llama, single):
    """PEFT gives it to the model inside for the time of a call."""
    target, tokenizer = WRAPPED["lora"](llama), tiny.letters()
    written = tokenizer.decode(target.generate(**single, **ARGUMENTS)[0, 9:])
    target.generation_config = copy.deepcopy(target.generation_config)
    target.generation_config.stop_strings = written[2:5]
    spec = SpeculativeGenerator(target, "ngram", draft_length=3)
    ours = spec.generate(**single, **ARGUMENTS, tokenizer=tokenizer)
    assert ours.tolist() == target.generate(**single, **ARGUMENTS, tokenizer=tokenizer).tolist()
    assert ours.shape[1] == 9 + 5


PROMPTS = {
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_learnt_prompts_run_as_plain_decoding(llama, single, name):
    """They enter where `generate()` prepares the inputs of a pass, which a draft pass does not go through."""
    target = peft.get_peft_model(copy.deepcopy(llama), PROMPTS[name]).eval()
    expected = target.generate(**single, **ARGUMENTS).tolist()
    spec = SpeculativeGenerator(target, "ngram")
    with tiny.specdec_warnings() as messages:
        assert spec.generate(**single, **ARGUMENTS).tolist() == expected
    assert len(messages) == 1
    assert "prompt tuning" in messages[0]
    after = SpeculativeGenerator(unwrap_model(target), "ngram", on_unsupported="error")
    assert after.generate(**single, **ARGUMENTS).tolist() == llama.generate(**single, **ARGUMENTS).tolist()


def test_what_wraps_no_model_is_refused():
    with pytest.raises(TypeError, match="one wrapped by PEFT or torch.compile, got OptimizedModule"):
        SpeculativeGenerator(compiled(nn.Linear(2, 2)), "ngram")
