"""Tensor parallelism: each process holds a part of every layer. torchrun --nproc-per-node 2 tensor_parallel.py MODEL

All processes write the same text: the first one drafts and broadcasts its random numbers.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

from specdec import SpeculativeGenerator

path = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-Coder-0.5B-Instruct"
parts = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))
model = AutoModelForCausalLM.from_pretrained(path, distributed_config=parts)
tokenizer = AutoTokenizer.from_pretrained(path)
spec = SpeculativeGenerator(model, "ngram", on_unsupported="error")

inputs = tokenizer("a b c d e f g h a b c d", return_tensors="pt", return_token_type_ids=False).to(model.device)
for sampling in (False, True):
    torch.manual_seed(0)
    plain = model.generate(**inputs, do_sample=sampling, max_new_tokens=48)
    torch.manual_seed(0)
    text = spec.generate(**inputs, do_sample=sampling, max_new_tokens=48)
    same = "plain decoding's text" if torch.equal(text, plain) else "ANOTHER TEXT"
    rank, report = torch.distributed.get_rank(), spec.last_report
    print(
        f"process {rank}, T={int(sampling)}: {same}, {report.num_output_tokens} tokens in {report.num_rounds} passes",
        flush=True,
    )
torch.distributed.destroy_process_group()
