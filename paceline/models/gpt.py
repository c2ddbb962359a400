"""`gpt-small`: a small decoder-only transformer on token ids (six layers of 384, six heads)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS = 6
WIDTH = 384
HEADS = 6


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        batch, time, width = features.shape
        packed = self.query_key_value(features).view(batch, time, 3, self.heads, -1)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected


class Block(nn.Module):
    """Attention, then a layer four times as wide; each on normalised input, each added back."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.widened = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, features: Tensor) -> Tensor:
        features = features + self.attention(features)
        added: Tensor = features + self.widened(features)
        return added


class Embedding(nn.Module):
    """Token ids to features: what each is, plus where it stands."""

    def __init__(self, token: nn.Embedding, position: nn.Embedding) -> None:
        super().__init__()
        self.token, self.position = token, position

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        features: Tensor = self.token(tokens) + self.position(positions)
        return features


class Head(nn.Module):
    """Features to logits, classes second, where cross_entropy wants them."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits.transpose(1, 2)


class GPT(nn.Module):
    """`input_shape` is (context,), `num_classes` the size of the vocabulary."""

    def __init__(
        self,
        *,
        input_shape: tuple[int, ...],
        num_classes: int,
        layers: int = LAYERS,
        width: int = WIDTH,
        heads: int = HEADS,
        tied: bool = True,
    ) -> None:
        super().__init__()
        (context,) = input_shape
        self.token = nn.Embedding(num_classes, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes, bias=False)
        self._reset(layers)
        if tied:
            self.head.weight = self.token.weight

    def _reset(self, layers: int) -> None:
        """GPT-2's start: what is added to the residual stream shrinks with the depth."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                ends_branch = name.endswith(("output.weight", "widened.3.weight"))
                nn.init.normal_(parameter, 0, 0.02 / (math.sqrt(2 * layers) if ends_branch else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits as (batch, vocabulary, time): classes second, where cross_entropy wants them."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.blocks(self.token(tokens) + self.position(positions))
        logits: Tensor = self.head(self.norm(features))
        return logits.transpose(1, 2)

    def units(self) -> list[tuple[str, nn.Module]]:
        """See `models.units`. The first and the last share their weights, where `tied`."""
        return [
            ("", Embedding(self.token, self.position)),
            ("blocks", self.blocks),
            ("norm", self.norm),
            ("", Head(self.head)),
        ]
