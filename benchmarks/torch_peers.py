"""Baseline models in PyTorch, trained in the usual way: torch.compile, fused AdamW, clipped gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """A pre-norm layer as in GPT-2, without biases."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        rows, length, width = x.shape
        parts = self.query_key_value(self.attention_norm(x)).split(width, dim=2)
        query, key, value = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class GPT(nn.Module):
    """A decoder-only model with learned positions and tied embeddings."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of tokens and targets (B, T)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Translator(nn.Module):
    """The model of Vaswani et al. 2017 with nn.Transformer, with one embedding table for source, target and logits."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, hidden: int, length: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        self.transformer = nn.Transformer(width, heads, layers, layers, hidden, dropout=0.1, batch_first=True)
        # Sinusoidal positions (section 3.5): angle of position p and dimension pair i is p / 10000^(2i / d_model).
        angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)[None]
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))
        self.scale, self.dropout = width**0.5, nn.Dropout(0.1)

    def forward(self, source: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy with smoothed labels, for source (B, S), tokens and targets (B, T)."""
        embedded = [
            self.dropout(self.tokens(ids) * self.scale + self.positions[: ids.shape[1]]) for ids in (source, tokens)
        ]
        mask = self.mask[: tokens.shape[1], : tokens.shape[1]]
        hidden = self.transformer(*embedded, tgt_mask=mask, tgt_is_causal=True)
        logits = F.linear(hidden, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), label_smoothing=0.1)


def training_step(
    model: nn.Module, batch: tuple[Any, ...], *, betas: tuple[float, float], autocast: torch.dtype | None = None
) -> Callable[[], Tensor]:
    """Return a function that updates the model on the batch once and returns the loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    inputs = [torch.from_numpy(array).long().to(device) for array in batch]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=betas, fused=True)
    compiled = torch.compile(model)

    def step():
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            loss = compiled(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
