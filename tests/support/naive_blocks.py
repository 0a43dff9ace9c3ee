"""Block-parallel drafters a second time: one row, no cache, no masks, loops. Imports nothing from specdec."""

import functools
import math
from types import SimpleNamespace

import torch

from tests.support.naive_eagle3 import NaiveHead


class NaiveDrafter(NaiveHead):
    """A DFlash or DSpark drafter. Args: see `NaiveHead`; c: its shape and variant."""

    latest = (None, None)  # the block that was computed last, and of what

    def draft(self, states, anchor, path=()):
        """Logits (K,) behind the drafted tokens `path`, which follow `anchor`; `states` are those of all before it.

        Also the chance that the next token is accepted; None without a confidence head.
        """
        which = states.data_ptr(), len(states), anchor
        if self.latest[0] != which:
            self.latest = which, self.block(states, anchor)
        h = self.latest[1]
        slot = len(path) + (0 if self.c.from_anchor else 1)
        before = [anchor, *path]
        own = "lm_head.weight" in self.w
        logits = (self.w["lm_head.weight"] if own else self.target_lm_head.double()) @ h[slot] * self.c.logit_scale
        if self.c.logit_softcap is not None:
            logits = torch.tanh(logits / self.c.logit_softcap) * self.c.logit_softcap
        if self.c.domino is not None and len(path) >= self.c.domino.uncorrected:
            logits = logits + self.domino(h[slot], before)
        if self.c.selector is not None:
            logits = self.selected(logits, h[slot], before[-1])
        if self.c.markov is not None:
            logits = logits + self.bias(h, before)
        sure = None
        if self.c.confidence:
            x = h[slot]
            if self.c.confidence_with_markov:
                x = torch.cat([x, self.w["markov_head.markov_w1.weight"][before[-1]]])
            sure = torch.sigmoid(self.linear(x, "confidence_head.proj"))[0]
        return logits, sure

    def domino(self, h, before):
        """The correction of Domino's head after these tokens, with torch's own GRU."""
        gru = torch.nn.GRU(self.c.hidden_size, self.c.domino.state_size, bias=False).double()
        gru.weight_ih_l0.copy_(self.w["domino_head.input_gates.weight"])
        gru.weight_hh_l0.copy_(self.w["domino_head.state_gates.weight"])
        state = gru(torch.stack([self.embedding[token] for token in before]))[0][-1]
        inner = torch.nn.functional.silu(self.linear(torch.cat([h, state]), "domino_head.down_proj"))
        return self.linear(inner, "domino_head.up_proj")

    def selected(self, logits, h, before):
        """The candidates' logits with their scores behind this token, one by one; -inf for all other tokens."""
        name, out = "candidate_selector.", torch.full_like(logits, -math.inf)
        context = self.w[name + "predecessor_codebook.weight"][before] * self.linear(h, name + "hidden_projection")
        for token in logits.argsort(descending=True)[: self.c.selector.candidates].tolist():
            out[token] = logits[token] + context @ self.w[name + "successor_codebook.weight"][token]
        return out

    def convolved(self, rows, kernels, which):
        """Each row, mixed with those before it in the block."""
        groups = self.c.hidden_size // self.c.convolution.group_size
        out = []
        for i in range(len(rows)):
            base, moved = kernels[0][which], kernels[1][i].view(2, -1, groups)[which]
            mixed = torch.zeros_like(rows[i])
            for back in range(min(i + 1, self.c.convolution.kernel_size)):
                channel = [g for g in range(groups) for _ in range(self.c.convolution.group_size)]
                mixed = mixed + (base[back] + moved[back][channel]) * rows[i - back]
            out.append(mixed)
        return out

    def wrapped(self, part, name, rows):
        """A part of a layer over all rows, between two convolutions if there are any."""
        if self.c.convolution is None:
            return part(rows)
        kernels = self.w[name + ".base_kernel"], [self.linear(row, name + ".kernel_projection") for row in rows]
        return self.convolved(part(self.convolved(rows, kernels, 0)), kernels, 1)

    def bias(self, h, before):
        """What the Markov head adds behind the last of these tokens."""
        embedded = [self.w["markov_head.markov_w1.weight"][token] for token in before]
        first = 0 if self.c.from_anchor else 1
        slot = len(before) - 1 + first
        if self.c.markov == "vanilla":
            out = embedded[-1]
        elif self.c.markov == "gated":
            gate = torch.sigmoid(self.linear(torch.cat([h[slot], embedded[-1]]), "markov_head.gate_proj"))
            out = gate * embedded[-1]
        else:
            inputs = embedded if self.c.from_anchor else [embedded[0], *embedded]
            state = torch.zeros_like(embedded[0])
            for place, e in enumerate(inputs):
                gate, candidate, read = self.linear(torch.cat([state, e, h[place]]), "markov_head.joint_proj").chunk(3)
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            out = torch.tanh(read)
        return self.w["markov_head.markov_w2.weight"] @ out

    def block(self, states, anchor):
        """The normed output at every place of the block."""
        context = [self.rms(self.linear(state.double(), "fc"), "hidden_norm") for state in states]
        x = [self.embedding[anchor], *[self.embedding[self.c.mask_token_id]] * (self.c.block_size - 1)]
        x = [row * self.c.embedding_scale for row in x]
        for number in range(self.c.num_layers):
            name = f"layers.{number}."
            inputs = [self.rms(row, name + "input_layernorm") for row in x]
            attend = functools.partial(self.attend, name + "self_attn.", number, context)
            attended = self.wrapped(attend, name + "attention_conv", inputs)
            x = [row + a for row, a in zip(x, attended, strict=True)]
            normed = [self.rms(row, name + "post_attention_layernorm") for row in x]
            outputs = self.wrapped(lambda rows, at=name: [self.mlp(n, at) for n in rows], name + "mlp_conv", normed)
            x = [row + out for row, out in zip(x, outputs, strict=True)]
        return [self.rms(row, "norm") for row in x]

    def mlp(self, n, name):
        gate = torch.nn.functional.silu(self.linear(n, name + "mlp.gate_proj"))
        return self.linear(gate * self.linear(n, name + "mlp.up_proj"), name + "mlp.down_proj")

    def attend(self, name, number, context, inputs):
        D, heads, groups = self.c.head_dim, self.c.num_attention_heads, self.c.num_key_value_heads
        T = len(context)
        rows = [*context, *inputs]
        k = torch.stack([self.projected(name, "k", row, position) for position, row in enumerate(rows)])
        v = torch.stack([self.projected(name, "v", row, None) for row in rows])
        out = []
        for i, x in enumerate(inputs):
            q = self.projected(name, "q", x, T + i)
            seen = [j for j in range(len(rows)) if self.sees(number, T, T + i, j)]
            joined = []
            for head in range(heads):
                group = head // (heads // groups)
                scores = k[seen, group] @ q[head] / math.sqrt(D)
                joined.append(scores.softmax(0) @ v[seen, group])
            out.append(self.linear(torch.cat(joined), name + "o_proj"))
        return out

    def sees(self, number, anchor, here, there):
        """Whether the token at position `here` sees the one at `there`, in this layer."""
        window = self.c.windows[number]
        if there > here and (self.c.causal == "all" or (self.c.causal == "windows" and window is not None)):
            return False
        if window is None:
            return True
        return there >= (anchor if self.c.window_from_anchor else here) - window

    def projected(self, name, kind, x, position):
        """(heads, D) of one token."""
        parts = self.linear(x, f"{name}{kind}_proj").view(-1, self.c.head_dim)
        if kind == "v":
            return parts
        if self.c.qk_norm:
            size = torch.sqrt((parts * parts).mean(-1, keepdim=True) + self.c.rms_norm_eps)
            parts = self.w[f"{name}{kind}_norm.weight"] * parts / size
        half = self.c.head_dim // 2
        pace = self.c.rope["rope_theta"] ** (-torch.arange(half).double() / half) / self.c.rope.get("factor", 1.0)
        cos, sin = (position * pace).cos(), (position * pace).sin()
        left, right = parts[:, :half], parts[:, half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class NaiveParallel(NaiveHead):
    """A P-EAGLE head."""

    def draft(self, states, tokens, path=()):
        """Logits (K,) behind any tokens `path` of that length; `tokens[i]` comes after `states[i]`."""
        masks = len(path)
        features = [self.fuse(state.double()) for state in states]
        features += [self.fuse(self.w["mask_hidden"][0, 0])] * masks
        return self.logits(self.run(features, [*tokens, *[self.c.mask_token_id] * masks])[-1])


class NaiveHydra(NaiveHead):
    """Hydra's heads. c: their config."""

    def __init__(self, weights, c, target_embedding):
        renamed = {name.replace("prefix.layer.", "layers.0."): tensor for name, tensor in weights.items()}
        shape = None if c.prefix is None else SimpleNamespace(**vars(c.prefix), window=None)
        super().__init__(renamed, shape, target_embedding)
        self.layers = c.num_layers

    def draft(self, states, tokens, path=()):
        """Logits (V,) behind the drafted tokens `path`, which follow the last of `tokens`."""
        state = states[-1].double()
        if self.c is not None:
            rows = [row.double() for row in states]
            out = self.layer(0, rows, [self.rms(row, "layers.0.input_layernorm") for row in rows])
            state = self.rms(out[-1], "prefix.norm")
        x = torch.cat([state, *(self.embedding[token] for token in [tokens[-1], *path])])
        head = f"heads.{len(path)}."
        for number in range(self.layers):
            block = f"{head}blocks.{number}."
            kept = x if number else self.linear(x, block + "res_connection")
            x = kept + torch.nn.functional.silu(self.linear(x, block + "linear"))
        return self.linear(x, head + "lm_head")
