"""What a prediction costs and how good it is: labels of samples, or the next tokens of texts."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from normexp.data import IGNORED_TARGET

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
        token_bytes: Of a language model: bytes that each token id stands for, 0 where that is not
            known, float64 ``[outputs]``; else None.
    """

    def __init__(self, device: torch.device, token_bytes: Tensor | None = None) -> None:
        self._token_bytes = None if token_bytes is None else token_bytes.to(device)
        # nats, right ones, predictions; nats of known tokens, bytes of known tokens.
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)

    def add(self, logits: Logits, targets: Targets) -> None:
        """Add the predictions of a batch."""
        logits, targets = logits.flatten(0, -2), targets.flatten()
        losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED_TARGET)
        losses = losses.double()
        is_asked = targets != IGNORED_TARGET
        sums = [losses.sum(), (logits.argmax(dim=1) == targets).sum(), is_asked.sum()]
        if self._token_bytes is not None:
            num_bytes = self._token_bytes[targets.clamp(min=0)] * is_asked
            sums += [torch.where(num_bytes > 0, losses, 0.0).sum(), num_bytes.sum()]
        self._sums[: len(sums)] += torch.stack([value.double() for value in sums])

    def means(self) -> dict[str, float]:
        """Return the mean loss in nats a prediction and the share of right ones.

        Of a language model also: perplexity, e to the loss; and bits a byte, over the tokens
        whose bytes are known, so that other tokenizers compare.
        """
        nats, right, count, known_nats, num_bytes = self._sums.tolist()
        loss = nats / max(count, 1.0)
        means = {"loss": loss, "accuracy": right / max(count, 1.0)}
        if self._token_bytes is not None:
            # torch's exp is infinite where math.exp raises.
            means["perplexity"] = float(torch.tensor(loss, dtype=torch.float64).exp())
            if num_bytes:
                means["bits_per_byte"] = known_nats / (math.log(2.0) * num_bytes)
        return means
