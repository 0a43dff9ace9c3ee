"""Other people's code, unchanged: the same result as with plain `generate()`, and it did speculate.

What needs a package of the extra `integrations` is slow: CI installs that extra before it runs the slow tests, where a
package that is missing is a failure. Grammars are in `test_grammar.py`, texts for models that see in
`test_multimodal.py`.
"""

import asyncio
import copy
import json
import threading
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AsyncTextIteratorStreamer,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    TorchAoConfig,
    pipeline,
)

from specdec import SpeculativeGenerator
from specdec.heads.mtp.loading import load as load_mtp
from specdec.models import linear, static_forward
from specdec.models.introspection import decoder_layers
from tests.integration.test_weights import tiny_qwen, write_gguf
from tests.support import mtp, tiny
from tests.support.training import TEMPLATE

NEW = 16
ARGUMENTS = {"do_sample": False, "max_new_tokens": NEW}
WORDS = ["<pad>", "<end>", "<user>", "<assistant>", "<unk>", *(f"w{i}" for i in range(5, tiny.VOCAB))]
PROMPTS = ["w7 w8 w9 w7 w8", "w20 w21", "w33 w40 w12 w33 w40 w12 w33"]


@pytest.fixture(scope="module")
def tokenizer():
    """A word for each of the tiny models' tokens."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **names)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def model(llama):
    """A copy, for libraries that write on it."""
    return copy.deepcopy(llama)


@contextmanager
def speculating(model, proposer=None, compile=False, exact=False):
    """Within it the model's `generate()` is specdec's, which must have been asked, and have accepted drafts."""
    spec = SpeculativeGenerator(
        model, proposer or model, draft_length=4, on_unsupported="error", compile=compile, exact=exact
    )
    with spec.installed():
        yield spec
    report = spec.report
    assert report.num_calls > 0
    assert report.num_plain_calls == report.num_failed_calls == 0
    assert report.num_accepted_tokens > 0


def encoded(tokenizer, prompts=PROMPTS):
    return tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)


# transformers


INPUTS = {
    "a string": (PROMPTS[0], {}),
    "a batch": (PROMPTS, {"batch_size": 3}),
    "a chat": ([{"role": "user", "content": PROMPTS[0]}], {}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_pipeline(model, tokenizer, name):
    given, more = INPUTS[name]
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    expected = pipe(given, **more, **ARGUMENTS)
    with speculating(model) as spec:
        assert pipe(given, **more, **ARGUMENTS) == expected
    assert spec.report.num_calls == 1


def test_pipeline_with_an_assistant(model, tokenizer, tmp_path):
    """The pipeline's own way to speculate: its assistant drafts."""
    for folder in ("target", "assistant"):
        model.save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
    pipe = pipeline("text-generation", str(tmp_path / "target"), assistant_model=str(tmp_path / "assistant"))
    expected = pipe(PROMPTS[0], **ARGUMENTS)
    with speculating(pipe.model, "ngram") as spec:
        assert pipe(PROMPTS[0], **ARGUMENTS) == expected
    assert spec.report.num_draft_tokens == spec.report.num_accepted_tokens


def test_text_streamer(model, tokenizer, capsys):
    def printed():
        model.generate(**encoded(tokenizer, PROMPTS[0]), **ARGUMENTS, streamer=TextStreamer(tokenizer))
        return capsys.readouterr().out

    expected = printed()
    assert len(expected.split()) > NEW
    with speculating(model):
        assert printed() == expected


def test_text_iterator_streamer(model, tokenizer):
    def pieces():
        streamer = TextIteratorStreamer(tokenizer, timeout=60)
        kwargs = {**encoded(tokenizer, PROMPTS[0]), **ARGUMENTS, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=kwargs)
        thread.start()
        texts = list(streamer)
        thread.join()
        return texts

    expected = pieces()
    assert len(expected) > NEW
    with speculating(model):
        assert pieces() == expected


def test_async_text_iterator_streamer(model, tokenizer):
    async def pieces():
        streamer = AsyncTextIteratorStreamer(tokenizer, timeout=60)
        kwargs = {**encoded(tokenizer, PROMPTS[0]), **ARGUMENTS, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=kwargs)
        thread.start()
        texts = [text async for text in streamer]
        thread.join()
        return texts

    expected = asyncio.run(pieces())
    assert len(expected) > NEW
    with speculating(model):
        assert asyncio.run(pieces()) == expected


def test_gguf_target(tmp_path):
    """Its weights come out of a GGUF file; transformers reads them in float32."""
    write_gguf(tmp_path / "tiny.gguf", tiny_qwen(tied=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    inputs = tiny.prompts(9, 5, vocab=model.config.vocab_size)
    expected = model.generate(**inputs, **ARGUMENTS).tolist()
    with speculating(model):
        assert model.generate(**inputs, **ARGUMENTS).tolist() == expected


def test_lora_target_and_its_base_as_draft(llama, tokenizer, tmp_path):
    """As they are used: both from folders, the draft by its path."""
    peft = pytest.importorskip("peft")
    llama.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(init_lora_weights=False, target_modules=["q_proj", "v_proj"], lora_alpha=1)
    peft.get_peft_model(copy.deepcopy(llama), settings).save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    target = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    inputs = encoded(tokenizer)
    unadapted = llama.generate(**inputs, **ARGUMENTS).tolist()
    expected = target.generate(**inputs, **ARGUMENTS).tolist()
    assert expected != unadapted
    with speculating(target, f"draft:{tmp_path / 'base'}"):
        assert target.generate(**inputs, **ARGUMENTS).tolist() == expected
        with target.disable_adapter():
            assert target.generate(**inputs, **ARGUMENTS).tolist() == unadapted


# Of the extra `integrations`


TASK = {
    "task": "tiny",
    "dataset_path": "json",
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["w7"], "max_gen_toks": NEW, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_lm_eval(model, tokenizer, tmp_path, monkeypatch, batch_size, dtype):
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    answers = ["w8", "w9", "w10"]
    lines = [{"question": question, "answer": answer} for question, answer in zip(PROMPTS, answers, strict=True)]
    data = tmp_path / "test.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    model = copy.deepcopy(model).to(dtype)
    lm = HFLM(model, backend="causal", tokenizer=tokenizer, batch_size=batch_size, max_length=64, device="cpu")
    manager = TaskManager(include_defaults=False)  # reading its thousands of tasks takes ten seconds

    def evaluated():
        found = simple_evaluate(lm, tasks=[copy.deepcopy(task)], task_manager=manager, bootstrap_iters=0)
        return found["results"], [sample["resps"] for sample in found["samples"]["tiny"]]

    expected = evaluated()
    assert len(expected[1]) == 3
    with speculating(model, exact=dtype == torch.bfloat16):
        assert evaluated() == expected


@pytest.mark.slow
def test_grpo_rollouts(model, tokenizer, tmp_path):
    """TRL's trainer samples its rollouts: the same completions, losses and weights after two updates."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def trained(model):
        seen = []

        def reward(completions, **kwargs):
            seen.extend(completions)
            return [float(len(set(text.split()))) for text in completions]

        config = GRPOConfig(
            output_dir=str(tmp_path / "run"),
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=NEW,
            max_steps=2,
            learning_rate=1e-3,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=0,
        )
        prompts = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
        trainer = GRPOTrainer(model, reward, args=config, train_dataset=prompts, processing_class=tokenizer)
        trainer.train()
        return seen, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    other = copy.deepcopy(model)
    completions, losses = trained(model)
    assert len(completions) == 4
    with speculating(other):
        assert trained(other) == (completions, losses)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], weight)


@pytest.fixture
def captured(monkeypatch):
    """Passes over drafts are captured as full graphs, without generated code."""
    monkeypatch.setattr(static_forward, "BACKEND", "eager")
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("compile", [False, True], ids=["", "compile"])
@pytest.mark.parametrize("bits", [8, 4])
def test_torchao_target(models, tokenizer, bits, compile, monkeypatch):
    """Weights alone; of 4 bits, in the one packing that torchao 0.18 multiplies on any CPU. Tiny layers count as large
    ones, for which other ways to multiply would be tried, were they plain."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    monkeypatch.setattr(linear, "SMALLEST", 1)
    model = copy.deepcopy(models("llama"))
    quantize_(model, Int8WeightOnlyConfig() if bits == 8 else IntxWeightOnlyConfig(torch.int4, PerGroup(16)))
    inputs = encoded(tokenizer)
    expected = model.generate(**inputs, **ARGUMENTS).tolist()
    assert expected != models("llama").generate(**inputs, **ARGUMENTS).tolist()
    with speculating(model, compile=compile) as spec:
        for _ in range(1 + 2 * compile):
            assert model.generate(**inputs, **ARGUMENTS).tolist() == expected
    assert not compile or len(spec._sessions.own.static_forward)


@pytest.mark.slow
@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("compile", [False, True], ids=["", "compile"])
def test_bitsandbytes_target(tokenizer, tmp_path, compile):
    """4 bits on the CPU, as transformers loads it; its 8 bits round activations, too, and run as plain decoding.

    Rows of 64 numbers: on a CPU with AVX-512 BF16 bitsandbytes takes no shorter ones (0.50).
    """
    tiny.model("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=settings, dtype=torch.float32, device_map="cpu"
    )
    inputs = encoded(tokenizer)
    expected = model.generate(**inputs, **ARGUMENTS).tolist()
    with speculating(model, compile=compile) as spec:
        for _ in range(1 + 2 * compile):
            assert model.generate(**inputs, **ARGUMENTS).tolist() == expected
    assert not compile or len(spec._sessions.own.static_forward)


QUANTISED = {
    "torchao, 8 bits": lambda: TorchAoConfig(_torchao().Int8WeightOnlyConfig()),
    "torchao, 4 bits": lambda: TorchAoConfig(_torchao().IntxWeightOnlyConfig(torch.int4, _torchao().PerGroup(16))),
    "bitsandbytes, 8 bits": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes, 4 bits": lambda: BitsAndBytesConfig(load_in_4bit=True),
}


def _torchao():
    return pytest.importorskip("torchao.quantization")


# Of DeepSeek-V3 bitsandbytes (0.50) gets activations of four dimensions, which in 8 bits its CPU kernel does not take.
NOT_THEIRS = {("deepseek_v3", "bitsandbytes, 8 bits")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "how"),
    [pair for pair in product(("qwen3_5_text", "deepseek_v3", "glm4_moe"), QUANTISED) if pair not in NOT_THEIRS],
)
def test_mtp_layers_beside_a_quantised_target(family, how, tmp_path, monkeypatch):
    """They are as they were trained; the text is the quantised target's."""
    monkeypatch.setattr(linear, "SMALLEST", 1)
    first = mtp.target(family, tmp_path, **mtp.IN_BLOCKS)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=QUANTISED[how](), dtype=torch.float32, device_map="cpu"
    )
    model.generation_config = first.generation_config
    kinds = {(type(layer), type(layer.weight)) for layer in model.modules() if isinstance(layer, torch.nn.Linear)}
    assert kinds - {(torch.nn.Linear, torch.nn.Parameter)}
    (layer,) = load_mtp(model).layers
    (block,) = torch.load(tmp_path / "blocks.pt")
    ours = decoder_layers(layer.block)[0].state_dict()
    assert ours.keys() == block.keys()
    assert all(torch.equal(tensor, block[name]) for name, tensor in ours.items())
    spec = SpeculativeGenerator(model, "mtp", draft_length=3, on_unsupported="error")
    inputs = tiny.prompts(9, 4, vocab=mtp.VOCAB)
    for sampling in ({"do_sample": False}, {"do_sample": True}):
        texts = []
        for generate in (model.generate, spec.generate):
            torch.manual_seed(3)
            texts.append(generate(**inputs, **sampling, max_new_tokens=20).tolist())
        assert texts[0] == texts[1]
    assert spec.report.num_accepted_tokens


@pytest.mark.slow
def test_datasets_map(model, tokenizer):
    from datasets import Dataset

    def answer(rows):
        texts = model.generate(**encoded(tokenizer, rows["prompt"]), **ARGUMENTS)
        return {"answer": tokenizer.batch_decode(texts, skip_special_tokens=True)}

    prompts = Dataset.from_dict({"prompt": PROMPTS})
    expected = prompts.map(answer, batched=True, batch_size=2, load_from_cache_file=False)["answer"]
    with speculating(model) as spec:
        assert prompts.map(answer, batched=True, batch_size=2, load_from_cache_file=False)["answer"] == expected
    assert spec.report.num_calls == 2


@pytest.mark.slow
def test_gradio_chat(model, tokenizer, monkeypatch):
    """A chat interface that streams, asked over HTTP as its page would."""
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    import gradio
    from gradio_client import Client

    def respond(message, history):
        chat = [{"role": "user", "content": message}]  # alone: both are asked in one session
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        kwargs = {"input_ids": inputs["input_ids"], **ARGUMENTS, "streamer": streamer}
        threading.Thread(target=model.generate, kwargs=kwargs).start()
        text = ""
        for piece in streamer:
            text += piece
            yield text

    chat = gradio.ChatInterface(respond)
    _, url, _ = chat.launch(prevent_thread_lock=True, quiet=True, inbrowser=False)
    try:
        client = Client(url, verbose=False)
        expected = client.predict(PROMPTS[0], api_name="/respond")
        assert len(expected.split()) == NEW
        with speculating(model):
            job = client.submit(PROMPTS[0], api_name="/respond")
            assert job.result(timeout=60) == expected
            assert len(job.outputs()) > 1
    finally:
        chat.close()
