"""What a prediction costs and how good it is: labels of samples, or the next tokens of texts."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from normexp.data import IGNORED_TARGET, TextBytes

Logits = Float[Tensor, "*shape outputs"]
Targets = Int64[Tensor, "*shape"]


def sum_losses(logits: Logits, targets: Targets) -> Float[Tensor, ""]:
    """Return the sum of the cross entropies in nats; 0 without a target that counts.

    Args:
        logits: Of every prediction, ``[N, outputs]`` or ``[N, L, outputs]``.
        targets: What is right, ``IGNORED_TARGET`` where nothing is asked.
    """
    flat = logits.flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), reduction="sum", ignore_index=IGNORED_TARGET)


class EvaluationSums:
    """Sums over an evaluation, on the device until they are read once at the end.

    Args:
        device: Where logits are.
        text_bytes: Of a language model: the bytes that all targets of the evaluation stand for.
    """

    def __init__(self, device: torch.device, text_bytes: TextBytes | None = None) -> None:
        self._text_bytes = text_bytes
        # nats, right ones, predictions
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, logits: Logits, targets: Targets) -> None:
        """Add the predictions of a batch."""
        logits, targets = logits.flatten(0, -2), targets.flatten()
        losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED_TARGET)
        is_right, is_asked = logits.argmax(dim=1) == targets, targets != IGNORED_TARGET
        sums = (losses.double().sum(), is_right.sum(), is_asked.sum())
        self._sums += torch.stack([value.double() for value in sums])

    def means(self) -> dict[str, float]:
        """Return the mean loss in nats a prediction and the share of right ones.

        Of a language model also: perplexity, e to the loss; and bits a byte, the length of the
        text under a code that the model makes, over its bytes: a token costs its loss, an
        unknown one 8 bits more for each byte to spell it. So tokenizers and sizes of vocabularies
        compare (words roughly: their spaces and line ends are not kept).
        """
        nats, right, count = self._sums.tolist()
        loss = nats / max(count, 1.0)
        means = {"loss": loss, "accuracy": right / max(count, 1.0)}
        if self._text_bytes is not None:
            # torch's exp is infinite where math.exp raises.
            means["perplexity"] = float(torch.tensor(loss, dtype=torch.float64).exp())
            bits = nats / math.log(2.0) + 8.0 * self._text_bytes.unknown
            means["bits_per_byte"] = bits / self._text_bytes.total
        return means
