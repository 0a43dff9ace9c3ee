"""Rollouts with a model that FSDP shards over processes: torchrun --nproc-per-node 2 fsdp_rollout.py MODEL

Each process has its own prompts. Weights are gathered for each pass, so all processes run their passes together, and
finished ones continue with dummy passes: `synced_gpus`, which transformers sets itself for a sharded model.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

from specdec import SpeculativeGenerator

path = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-Coder-0.5B-Instruct"
parts = DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))
model = AutoModelForCausalLM.from_pretrained(path, distributed_config=parts)
tokenizer = AutoTokenizer.from_pretrained(path)
rank = torch.distributed.get_rank()

prompts = ["a b c d e f g h a b c d", "x y z x y z x y"]
inputs = tokenizer(prompts[rank % 2], return_tensors="pt", return_token_type_ids=False).to(model.device)
arguments = {**inputs, "do_sample": False, "max_new_tokens": 48 - 16 * rank}
plain = model.generate(**arguments)
spec = SpeculativeGenerator(model, "ngram", draft_length=4, on_unsupported="error")
text = spec.generate(**arguments)
same = "plain decoding's text" if torch.equal(text, plain) else "ANOTHER TEXT"
report = spec.last_report
print(f"process {rank}: {same}, {report.num_output_tokens} tokens in {report.num_rounds} passes", flush=True)
torch.distributed.destroy_process_group()
