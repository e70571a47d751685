"""Blocks that at least two papers use."""

import torch
from torch import Tensor, nn


class WordEmbedding(nn.Module):
    """Word vectors of any dimension for a model of any width.

    Vectors that were loaded (GloVe's 100 or 300, say) keep their own dimension, and where that is
    not the model's width a learned projection leads from one to the other.
    """

    def __init__(
        self, num_tokens: int, width: int, *, vectors: Tensor | None = None, padding: int = 0
    ):
        super().__init__()
        dimension = width if vectors is None else vectors.shape[1]
        self.table = nn.Embedding(num_tokens, dimension, padding_idx=padding)
        self.project = (
            nn.Identity() if dimension == width else nn.Linear(dimension, width, bias=False)
        )
        with torch.no_grad():
            if vectors is None:
                nn.init.normal_(self.table.weight, std=width**-0.5)
                self.table.weight[padding].zero_()
            else:
                self.table.weight.copy_(vectors)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, width)."""
        embedded: Tensor = self.project(self.table(tokens))
        return embedded
