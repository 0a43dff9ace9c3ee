"""Decode with an EAGLE-3 head in vLLM. Run it in an environment that has vLLM and not specdec.

Prints one line of JSON: the texts (token ids), the number of drafts, and the accepted tokens by position.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="Folder or hub id of the target.")
    parser.add_argument("head", help="Folder of the head.")
    parser.add_argument("prompts", type=Path, help="Prompts as a JSON list of lists of token ids.")
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()

    from vllm import LLM, SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in json.loads(options.prompts.read_text())]
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        max_model_len=1024,
        max_num_seqs=1,  # one at a time, as specdec's figures are taken
        enforce_eager=True,
        disable_log_stats=False,  # get_metrics() has no counts otherwise
        speculative_config={
            "method": "eagle3",
            "model": options.head,
            "num_speculative_tokens": options.draft_length,
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=options.max_new_tokens)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    counts = {metric.name: metric for metric in llm.get_metrics()}
    found = {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": counts["vllm:spec_decode_num_drafts"].value,
        "accepted": counts["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
    }
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
