"""Gain and shift from a condition, around a norm without its own: the adaptive norms.

Legend: N samples, L positions of a sequence, C channels, H, W height and width, Z features of
the condition.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._statistics import position_axes, upcast, zero_invalid


class ZeroLinear(nn.Linear):
    """A linear layer that starts at zero; its start draws no random number."""

    def reset_parameters(self) -> None:
        """Set weight and bias to zero."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class AdaptiveNorm(nn.Module):
    """``y = (1 + scale(z)) * norm(x) + shift(z)`` with scale and shift linear in z.

    The first C outputs of the projection are the scale, the others the shift. A fresh layer is
    the plain norm, since the projection starts at zero.

    Args:
        norm: A norm without gain and shift.
        num_features: Channels C.
        condition_features: Features Z of the condition.
        dims: Number of position axes of the input.

    Raises:
        UserError: If ``condition_features`` is below 1.
    """

    def __init__(
        self, norm: nn.Module, num_features: int, *, condition_features: int, dims: int
    ) -> None:
        super().__init__()
        if condition_features < 1:
            key = "norm.params.condition_features"
            raise UserError(key, condition_features, "a whole number of 1 or more is needed")
        self.norm = norm
        self.projection = ZeroLinear(condition_features, 2 * num_features)
        self.dims = dims

    @property
    def resolved_params(self) -> dict[str, int]:
        """What the inner norm resolved, such as its groups."""
        resolved: dict[str, int] = getattr(self.norm, "resolved_params", {})
        return resolved

    def forward(
        self, x: Float[Tensor, "*shape"], condition: Float[Tensor, "n z"]
    ) -> Float[Tensor, "*shape"]:
        """Return the normalized input with gain and shift from the condition.

        The norm, gain and shift are computed in float32 for half-precision inputs, the
        projection in the type of its weight (that of autocast inside it); the result is cast to
        the input's type at the end.

        Args:
            x: Features ``[N, C]``, sequences ``[N, L, C]`` or images ``[N, C, H, W]``.
            condition: What gain and shift of a sample are computed from.
        """
        return self._apply_condition(self.norm(upcast(x)), condition).to(x.dtype)

    def _apply_condition(self, y: Tensor, condition: Tensor) -> Tensor:
        """Return what the norm has normalized, with gain and shift."""
        projected = self.projection(condition.to(self.projection.weight.dtype))
        scale, shift = upcast(projected).chunk(2, 1)
        for axis in position_axes(self.dims):
            scale, shift = scale.unsqueeze(axis), shift.unsqueeze(axis)
        # In this order images in channels-last strides stay so.
        return y * (1.0 + scale) + shift


class MaskedAdaptiveNorm(AdaptiveNorm):
    """The same around a norm that reduces over positions: in sequences it takes a mask."""

    def forward(
        self,
        x: Float[Tensor, "*shape"],
        condition: Float[Tensor, "n z"],
        mask: Bool[Tensor, "n l"] | None = None,
    ) -> Float[Tensor, "*shape"]:
        """Return the normalized input with gain and shift from the condition.

        Args:
            x: Features ``[N, C]``, sequences ``[N, L, C]`` or images ``[N, C, H, W]``. Types are
                as in the class above.
            condition: What gain and shift of a sample are computed from.
            mask: True where a position is valid; for sequences, where all are without one.

        Returns:
            The same shape, zero at invalid positions.

        Raises:
            ValueError: If a mask comes with anything but sequences.
        """
        if mask is None:
            return super().forward(x, condition)
        if self.dims != 1:
            raise ValueError("only sequences take a mask")
        y = self._apply_condition(self.norm(upcast(x), mask), condition)
        return zero_invalid(y, mask).to(x.dtype)
