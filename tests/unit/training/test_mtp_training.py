"""MTP layers are trained as they draft: what they learn from, faults that are planted, whole runs."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec import SpeculativeGenerator
from specdec.data.packed_dataset import PackedTexts
from specdec.heads.mtp.checkpoint import write
from specdec.heads.mtp.loading import load, tensors_of
from specdec.heads.mtp.trainable import MtpTrainee
from specdec.proposers.draft_heads.mtp import MtpProposer
from specdec.training.evaluate import evaluate
from specdec.training.initialization.mtp import initialize_mtp
from specdec.training.objectives import mtp as mtp_objective
from specdec.training.objectives.mtp import MtpObjective, unroll_mtp
from specdec.training.teacher.base import LocalTeacher, embedding_of
from specdec.training.teacher.target_logits import TargetLogits
from specdec.training.trainer import HeadTrainer
from tests.support import eagle3, mtp, tiny
from tests.support.naive_mtp import NaiveMtp
from tests.support.training import batch_of, losses, quiet_arguments, run, some_texts

EVERY = torch.arange(mtp.VOCAB)
CASES = [("deepseek_v3", 1), ("qwen3_5_text", 3)]
SLOW = [
    ("qwen3_5_text", 1),
    ("glm4_moe", 2),
    ("nemotron_h", 1),
    ("qwen3_next", 1),
    ("mimo_v2_flash", 2),
    ("exaone_moe", 1),
    ("mellum", 1),
    ("hy_v3", 1),
]


@pytest.fixture(scope="session")
def trainee(tmp_path_factory):
    """A target, and its MTP layers in training."""

    def made(family, layers=1):
        target = mtp.target(family, tmp_path_factory.mktemp(family), layers)
        return target, MtpTrainee(load(target).layers, EVERY)

    return made


def prompts(*lengths):
    return [tiny.prompts(length, seed=length, vocab=mtp.VOCAB)["input_ids"][0] for length in lengths]


@pytest.mark.parametrize(
    ("family", "layers"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_teacher_forcing_is_what_the_decoder_accepts(trainee, family, layers):
    target, head = trainee(family, layers)
    found = evaluate(head, target, prompts(9, 14, 17, 20, 5, 6), draft_length=4, max_new_tokens=24)
    assert found.mean_acceptance_length == pytest.approx(found.simulated_length)
    assert found.mean_acceptance_length > 1


def test_evaluation_does_not_depend_on_the_generation_config(trainee):
    target, head = trainee(*CASES[0])
    found = []
    for asked in ({}, {"use_cache": False, "num_beams": 3, "return_dict_in_generate": True, "stop_strings": ["x"]}):
        before = vars(target.generation_config).copy()
        vars(target.generation_config).update(asked)
        torch.manual_seed(0)
        try:
            found.append(evaluate(head, target, prompts(9, 14), draft_length=4, max_new_tokens=12))
        finally:
            vars(target.generation_config).clear()
            vars(target.generation_config).update(before)
    assert found[0] == found[1]


def taught(target, head, steps=4):
    """Of the naive reference's drafts behind some texts, the share that teacher forcing over them makes, too."""
    naive, right = NaiveMtp(target), []
    weight = target.get_output_embeddings().weight
    for prompt in prompts(9, 14, 17, 5):
        drafted = naive.drafts(prompt, steps)
        ids = torch.cat([prompt, torch.tensor(drafted)])[None]
        states = eagle3.states_of(target, ids, (-1,))
        outputs = unroll_mtp(head, target.get_input_embeddings()(ids), states, steps)
        found = [int((out[0, len(prompt) - 2] @ weight.T).argmax()) for out in outputs]
        right += [one == other for one, other in zip(found, drafted, strict=True)]
    return sum(right) / len(right)


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_teacher_forcing_drafts_as_the_naive_reference(trainee, layers):
    assert taught(*trainee("qwen3_5_text", layers)) == 1


@torch.no_grad()
@pytest.mark.parametrize("fault", ["position", "token", "attention"])
def test_a_planted_fault_is_seen(trainee, fault, monkeypatch):
    """All at one position, tokens one too late, rows that see what others put out."""
    target, head = trainee("qwen3_5_text")
    if fault == "position":
        monkeypatch.setattr(mtp_objective, "positions_in", torch.zeros_like)
    elif fault == "token":
        monkeypatch.setattr(mtp_objective, "pad", lambda x, by: torch.nn.functional.pad(x, by).roll(-1, 1))
    else:
        taken = mtp_objective.masks_as_taken

        def all_before(model, masks, seen):
            def wrong(span):
                visible = seen(span)
                return visible[..., : visible.shape[1]].repeat(1, 1, visible.shape[2] // visible.shape[1])

            return taken(model, masks, wrong)

        monkeypatch.setattr(mtp_objective, "masks_as_taken", all_before)
    assert taught(target, head) < 1


@torch.no_grad()
@pytest.mark.parametrize(("family", "layers"), [("qwen3_5_text", 2), ("mimo_v2_flash", 1)])
def test_texts_in_one_row_do_not_see_each_other(trainee, family, layers):
    target, head = trainee(family, layers)
    ids = tiny.prompts(22, vocab=mtp.VOCAB)["input_ids"]
    documents = torch.tensor([[0] * 9 + [1] * 13])
    embeds, states = target.get_input_embeddings()(ids), torch.randn(1, 22, 32)
    packed = list(unroll_mtp(head, embeds, states, 4, documents))
    for start, stop in ((0, 9), (9, 22)):
        alone = unroll_mtp(head, embeds[:, start:stop], states[:, start:stop], 4)
        for step, (ours, theirs) in enumerate(zip(packed, alone, strict=True)):
            rows = stop - start - 2 - step  # that draft a token of their own text
            torch.testing.assert_close(ours[:, start:][:, :rows], theirs[:, :rows], rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_parameter(trainee):
    target, head = trainee("qwen3_5_text", 2)
    head.requires_grad_(True).train()
    ids = tiny.prompts(20, vocab=mtp.VOCAB)["input_ids"]
    states = eagle3.states_of(target, ids, (-1, -1))
    objective = MtpObjective(head, embedding_of(target), TargetLogits.of(target), steps=3)
    objective(*batch_of(target, ids, torch.ones_like(ids).bool(), states))["loss"].backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in head.parameters())
    assert all(weight.grad is None for weight in target.parameters())


def test_layers_are_not_written_over_a_model(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="choose another folder"):
        write([], tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("family", ["llama", "gemma3", *(family for family, _ in CASES)])
def test_any_target_gets_fresh_layers(family, tmp_path_factory):
    """Made of its own last layer with full attention; written, they are read again."""
    if family in mtp.CONFIGS:
        target = mtp.target(family, tmp_path_factory.mktemp(family))
    else:
        target = tiny.model(family)
    torch.manual_seed(0)
    head = initialize_mtp(target, torch.arange(target.config.vocab_size), 2)
    folder = tmp_path_factory.mktemp("head")
    for _ in range(2):
        write([tensors_of(layer) for layer in head.layers], folder)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    read = load(target, str(folder))
    for ours, theirs in zip(head.layers, read.layers, strict=True):
        assert all(
            torch.equal(weight, theirs.state_dict()[name])
            for name, weight in ours.state_dict().items()
            if "embed_tokens" not in name
        )
    inputs = tiny.prompts(7, 3, vocab=mtp.VOCAB)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    spec = SpeculativeGenerator(target, MtpProposer(str(folder)), draft_length=3, on_unsupported="error")
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()
    assert spec.report.num_draft_tokens


def test_quantised_layers_are_no_start():
    target = tiny.model("llama")
    target.model.layers[-1].register_buffer("packed", torch.zeros(3, dtype=torch.int8))
    with pytest.raises(ValueError, match="quantised, and MTP layers cannot start"):
        initialize_mtp(target, EVERY)


@pytest.mark.slow
def test_training_teaches_them(tmp_path):
    target = tiny.model("llama", num_hidden_layers=3)
    texts = some_texts(target, 8, 30)
    head = initialize_mtp(target, torch.arange(tiny.VOCAB))
    args, teacher = quiet_arguments(tmp_path, 60, 20), LocalTeacher.of(target, head)
    trainer = HeadTrainer(head, teacher, args, train_dataset=PackedTexts(texts, 60))
    trainer.train()
    logged = [entry["simulated_length"] for entry in trainer.state.log_history if "simulated_length" in entry]
    assert logged[-1] > logged[0] + 0.5
    found = evaluate(trainer.head, target, [text.ids[:6] for text in texts[:3]], draft_length=3, max_new_tokens=20)
    assert found.agrees


@pytest.mark.slow
def test_a_run_and_one_that_goes_on_from_it(files, tmp_path):
    result = run(files, tmp_path / "out", "--kind", "mtp", "--cache-states")
    assert result.exit_code == 0, result.output
    assert f"SpeculativeGenerator(model, 'mtp:{tmp_path}/out/head')" in result.output.replace("\n", "")
    whole = losses(tmp_path / "out")
    target = AutoModelForCausalLM.from_pretrained(files / "model")
    inputs = tiny.prompts(7, 4)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    spec = SpeculativeGenerator(target, f"ngram+mtp:{tmp_path / 'out' / 'head'}", on_unsupported="error")
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()

    result = run(files, tmp_path / "more", "--kind", "mtp", "--from", str(tmp_path / "out" / "head"))
    assert result.exit_code == 0, result.output
    assert losses(tmp_path / "more")[0] < whole[0]
    for options, said in (
        (("--flex",), "leave out --flex"),
        (("--intermediate-size", "8"), "leave out --intermediate-size"),
        (("--dry-run",), "--dry-run does not support --kind mtp"),
        (("--from", str(files / "model")), "holds no MTP layers"),
    ):
        result = run(files, tmp_path / "refused", "--kind", "mtp", *options)
        assert result.exit_code == 2, result.output
        assert said in " ".join(result.output.split())
