"""An EAGLE head a second time: one row, one token after the other, no cache, no masks. Imports nothing from specdec."""

import math

import torch


class NaiveHead:
    """Args: weights: by the names of vLLM speculators' checkpoints. c: the head's shape and variant."""

    def __init__(self, weights, c, target_embedding, target_lm_head=None):
        self.w, self.c = {name: tensor.double() for name, tensor in weights.items()}, c
        self.embedding = self.w.get("embed_tokens.weight", target_embedding.double())
        self.target_lm_head = target_lm_head

    def draft(self, states, tokens, path=()):
        """Logits (K,) after the drafted tokens `path`, which follow `tokens`; `tokens[i]` comes after `states[i]`."""
        features = [self.fuse(state.double()) for state in states]
        inputs = list(tokens)
        for token in [*path, None]:
            outputs = self.run(features, inputs)
            if token is None:
                return self.logits(outputs[-1])
            features = [*features, self.fed_back(outputs[-1])]
            inputs = [*inputs, token]
        raise AssertionError

    def fuse(self, state):
        if self.c.version == 1:
            return state
        size = self.c.target_hidden_size
        if self.c.fc_norm:
            chunks = [state[i * size : (i + 1) * size] for i in range(self.c.num_taps)]
            state = torch.cat([self.rms(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)])
        if self.c.norm_before_fc:
            state = self.rms(state, "input_norm")
        return self.linear(state, "fc")

    def run(self, features, tokens):
        """The head's output at every position."""
        rows = []
        for token, feature in zip(tokens, features, strict=True):
            e = self.embedding[token]
            if self.c.version == 1:
                h = self.linear(torch.cat([e, feature]), "fc")
                rows.append((h, h))
            else:
                normed = self.rms(feature, "layers.0.hidden_norm")
                x = torch.cat([self.rms(e, "layers.0.input_layernorm"), normed])
                rows.append((normed if self.c.norm_before_residual else feature, x))
        h = self.layer(0, [residual for residual, _ in rows], [x for _, x in rows])
        for number in range(1, self.c.num_layers):
            h = self.layer(number, h, [self.rms(x, f"layers.{number}.input_layernorm") for x in h])
        return h

    def layer(self, number, residual, inputs):
        name = f"layers.{number}."
        attended = self.attention(name + "self_attn.", inputs)
        h = [r + a for r, a in zip(residual, attended, strict=True)]
        out = []
        for x in h:
            n = self.rms(x, name + "post_attention_layernorm")
            gate = torch.nn.functional.silu(self.linear(n, name + "mlp.gate_proj"))
            out.append(x + self.linear(gate * self.linear(n, name + "mlp.up_proj"), name + "mlp.down_proj"))
        return out

    def attention(self, name, inputs):
        D, heads, groups = self.c.head_dim, self.c.num_attention_heads, self.c.num_key_value_heads
        q, k, v = [], [], []
        for position, x in enumerate(inputs):
            for kind, into in (("q", q), ("k", k), ("v", v)):
                parts = self.linear(x, f"{name}{kind}_proj").view(-1, D)
                if kind != "v":
                    if self.c.qk_norm:
                        parts = torch.stack([self.rms(part, f"{name}{kind}_norm") for part in parts])
                    parts = torch.stack([self.turned(part, position) for part in parts])
                into.append(parts)
        out = []
        for i in range(len(inputs)):
            first = 0 if self.c.window is None else max(0, i - self.c.window + 1)
            joined = []
            for head in range(heads):
                group = head // (heads // groups)
                scores = torch.stack([q[i][head] @ k[j][group] for j in range(first, i + 1)]) / math.sqrt(D)
                joined.append(scores.softmax(0) @ torch.stack([v[j][group] for j in range(first, i + 1)]))
            out.append(self.linear(torch.cat(joined), name + "o_proj"))
        return out

    def turned(self, x, position):
        """RoPE: the pair (x_d, x_{d + half}) turns by position * theta^(-2d / covered)."""
        covered = int(self.c.head_dim * self.c.rope.get("partial_rotary_factor", 1.0))
        half = covered // 2
        out = x.clone()
        for d in range(half):
            angle = position * self.c.rope["rope_theta"] ** (-2 * d / covered) / self.c.rope.get("factor", 1.0)
            cos, sin = math.cos(angle), math.sin(angle)
            out[d], out[d + half] = x[d] * cos - x[d + half] * sin, x[d + half] * cos + x[d] * sin
        return out

    def fed_back(self, h):
        return self.rms(h, "norm") if self.c.norm_output else h

    def logits(self, h):
        if self.c.version == 1:
            return self.target_lm_head.double() @ h
        return self.w["lm_head.weight"] @ self.rms(h, "norm")

    def linear(self, x, name):
        y = self.w[name + ".weight"] @ x
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def rms(self, x, name):
        return self.w[name + ".weight"] * x / torch.sqrt((x * x).mean() + self.c.rms_norm_eps)
