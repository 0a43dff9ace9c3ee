"""What a target's MTP layers draft, slowly: no cache, one text, every step over all tokens, from the checkpoint itself.

For Qwen3.5's layout, from 2412.19437 (section 2.2) and the layer's own class in transformers.
"""

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm


class NaiveMtp:
    def __init__(self, target: PreTrainedModel):
        self.target = target
        tensors = load_file(Path(target.name_or_path) / "model.safetensors")
        self.own = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
        config = copy.deepcopy(target.config)
        config.layer_types = ["full_attention"]
        self.layers = []
        for i in range(len({name.split(".")[1] for name in self.own if name.startswith("layers.")})):
            layer, place = Qwen3_5DecoderLayer(config, 0), f"layers.{i}."
            layer.load_state_dict({n.removeprefix(place): t for n, t in self.own.items() if n.startswith(place)})
            self.layers.append(layer)

    @torch.no_grad()
    def drafts(self, text: Tensor, count: int) -> list[int]:
        """The best `count` tokens behind text (T,)."""
        read = self.target(input_ids=text[None, :-1], use_cache=False, output_hidden_states=True)
        tokens, found = text, []
        inputs = out = read.hidden_states[-1][0]
        for step in range(count):
            k = min(step, len(self.layers) - 1)
            if step:  # the next layer reads what this one put out; the last one goes on with its own
                inputs = out if step == k else torch.cat([inputs, out[-1:]])
            out = self.through(k, tokens[1 + k : 1 + k + len(inputs)], inputs)
            found.append(int(self.target.lm_head(out[-1]).argmax()))
            tokens = torch.cat([tokens, torch.tensor(found[-1:])])
        return found

    def through(self, k: int, tokens: Tensor, states: Tensor) -> Tensor:
        """(n, H) that layer k puts out for tokens (n,) and the states (n, H) that they are paired with."""
        embeds = self.normed("pre_fc_norm_embedding", self.target.get_input_embeddings()(tokens))
        x = torch.cat([embeds, self.normed("pre_fc_norm_hidden", states)], -1) @ self.own["fc.weight"].T
        positions = torch.arange(len(x))[None]
        rotation = self.target.model.rotary_emb(x[None], positions.expand(3, 1, -1))  # planes: 5.17 makes none itself
        mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()[None, None]
        out = self.layers[k](x[None], position_embeddings=rotation, attention_mask=mask, position_ids=positions)
        return self.normed("norm", out[0])

    def normed(self, name: str, x: Tensor) -> Tensor:
        norm = Qwen3_5RMSNorm(x.shape[-1], eps=self.target.config.rms_norm_eps)
        norm.load_state_dict({"weight": self.own[f"{name}.weight"]})
        return norm(x)
