"""A model that does not fit in memory: half of its layers are read from disk in each pass. python offload.py MODEL

Reading dominates a pass, so eight tokens take as long as one, and drafts help more than anywhere else. If the processor
is fast in bfloat16, leave out dtype to read half as much.
"""

import sys
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specdec import SpeculativeGenerator

path = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-Coder-0.5B-Instruct"
layers = AutoConfig.from_pretrained(path).num_hidden_layers
places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(layers)}

with TemporaryDirectory() as folder:
    model = AutoModelForCausalLM.from_pretrained(path, device_map=places, offload_folder=folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    spec = SpeculativeGenerator(model, "ngram", on_unsupported="error")
    inputs = tokenizer("a b c d e f g h a b c d", return_tensors="pt", return_token_type_ids=False)
    spec.generate(**inputs, do_sample=False, max_new_tokens=8)  # the first call measures the cost of passes
    texts = {}
    for name, generate in (("plain", model.generate), ("specdec", spec.generate)):
        start = perf_counter()
        texts[name] = generate(**inputs, do_sample=False, max_new_tokens=48)
        print(f"{name}: {texts[name].shape[1] - inputs['input_ids'].shape[1]} tokens in {perf_counter() - start:.1f} s")
    print("the same text:", torch.equal(texts["plain"], texts["specdec"]))
    print(f"{spec.last_report.num_rounds} passes over {layers} layers, {layers // 2} of them from disk")
