"""A custom proposer: remembers the last successor of each token, and drafts by following these successors.

python examples/own_proposer.py PATH_OR_HUB_ID
"""

import sys
from itertools import pairwise

from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import Context, DraftTree, Proposer, SpeculativeGenerator


class TrailProposer(Proposer):
    """Drafts from the bigrams of the text: after x, the token that last followed x."""

    def propose(self, context: Context) -> DraftTree:
        drafts = []
        for b in range(context.batch_size):
            text = context.row(b).tolist()
            follower = dict(pairwise(text))  # later pairs overwrite earlier ones
            trail, token = [], text[-1]
            while token in follower and len(trail) < 4:
                token = follower[token]
                trail.append(token)
            drafts.append(trail)
        return context.chain(drafts)


if __name__ == "__main__":
    path = sys.argv[1]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path, dtype="auto"), AutoTokenizer.from_pretrained(path)
    spec = SpeculativeGenerator(model, TrailProposer())
    inputs = tokenizer("The quick brown fox jumps over the lazy dog. The quick brown fox", return_tensors="pt")
    print(tokenizer.decode(spec.generate(**inputs, max_new_tokens=64)[0]))
    print(spec.report)
