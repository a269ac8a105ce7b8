"""The recurrent network of LEAF for next characters."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.citing import cite
from ..core.errors import ModelError
from ..core.options import Count
from ..data.tables.texts import N_CHARACTERS


@cite("caldas2018leaf")
def char_lstm(
    input_shape: tuple[int, ...],
    n_classes: int,
    *,
    embedding: Count = 8,
    hidden: Count = 256,
    layers: Count = 2,
    vocabulary: Count = N_CHARACTERS,
) -> nn.Module:
    """The network of LEAF for Shakespeare: an embedding of 8, two LSTM layers of 256 units, one linear layer.

    It predicts from the last character of the text, as in `models/shakespeare/stacked_lstm.py` of LEAF. The forget
    gates start with a bias of 1, as in TensorFlow's `BasicLSTMCell`, which LEAF uses.

    Args:
        input_shape: number of characters, as token numbers; see the table option `tokens=characters`.
        n_classes: number of classes, which are the next characters.
        embedding: size of a character's vector.
        hidden: units of an LSTM layer.
        layers: number of LSTM layers.
        vocabulary: number of different tokens.

    Source: Caldas et al., LEAF: A Benchmark for Federated Settings, 2018 (arXiv 1812.01097).
    """
    if len(input_shape) != 1:
        raise ModelError(
            f"char_lstm: got samples of shape {input_shape}, expected a sequence of token numbers; read a text column "
            "with --set table.tokens=characters"
        )
    return CharacterLstm(vocabulary, embedding, hidden, layers, n_classes)


class CharacterLstm(nn.Module):
    """Token numbers (B, length), -1 where there is no token, to logits (B, classes)."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, n_classes: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary + 1, embedding)  # row 0 is for no token
        sizes = [embedding, *(hidden for _ in range(layers))]
        self.layers = nn.ModuleList([LstmLayer(a, b) for a, b in pairwise(sizes)])
        self.classifier = nn.Linear(hidden, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits after the last token."""
        h = self.embedding(x.long().clamp_min(-1) + 1)
        for layer in self.layers:
            h = layer(h)
        logits: Tensor = self.classifier(h[:, -1])
        return logits


class LstmLayer(nn.Module):
    """One LSTM layer, written step by step, because `torch.func.vmap` has no rule for `nn.LSTM`.

    On a CPU, it takes about as long as `nn.LSTM`: the products with the inputs of all steps are one product.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input_weight = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.hidden_weight = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(4 * hidden))
        for weight in (self.input_weight, self.hidden_weight):
            nn.init.xavier_uniform_(weight)
        with torch.no_grad():
            self.bias[hidden : 2 * hidden] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Map sequences (B, length, inputs) to the states (B, length, hidden) after each step."""
        gates = functional.linear(x, self.input_weight, self.bias)
        state = cell = torch.zeros_like(gates[:, 0, : self.hidden])
        states = []
        for gate in gates.unbind(1):
            take, keep, new, show = (gate + functional.linear(state, self.hidden_weight)).chunk(4, dim=1)
            cell = keep.sigmoid() * cell + take.sigmoid() * new.tanh()
            state = show.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states, 1)
