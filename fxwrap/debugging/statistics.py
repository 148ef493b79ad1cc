"""Statistics of a tensor's elements."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from fxwrap.torch_compat import DTYPE_NAMES


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of a tensor.

    `minimum`, `maximum` and `mean` are those of the finite elements (of the absolute values of complex ones), NaN if
    there is none; `nan` and `inf` count the other elements, of `count` in all.
    """

    dtype: str
    sizes: tuple[int, ...]
    count: int
    minimum: float = math.nan
    maximum: float = math.nan
    mean: float = math.nan
    nan: int = 0
    inf: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return not self.nan and not self.inf

    def to_dict(self) -> dict[str, object]:
        """Returns the fields; numbers that JSON cannot express are None."""
        return {
            name: None if isinstance(item, float) and not math.isfinite(item) else item
            for name, item in asdict(self).items()
        }

    def __str__(self) -> str:
        counts = [f"{count} {name}" for count, name in ((self.nan, "NaN"), (self.inf, "Inf")) if count]
        numbers = f"min {self.minimum:.4g}, max {self.maximum:.4g}, mean {self.mean:.4g}"
        if math.isnan(self.minimum):
            numbers = "no finite elements" if self.count else "no elements"
        return f"{self.dtype}{list(self.sizes)}: {', '.join([numbers, *counts])}"


def tensor_statistics(tensor: torch.Tensor) -> TensorStatistics:
    """Returns the statistics of a tensor of any dtype and device; the mean is computed in float64 where possible."""
    head = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), tensor.numel()
    if not tensor.numel() or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
        return TensorStatistics(*head)
    elements = tensor.detach().abs() if tensor.dtype.is_complex else tensor.detach()
    if not elements.dtype.is_floating_point:
        wide = elements.to(torch.float64)
        return TensorStatistics(*head, float(wide.min()), float(wide.max()), float(wide.mean()))
    elements = elements.float() if elements.dtype.itemsize < 4 else elements
    finite = elements.isfinite()
    nan, count = int(elements.isnan().sum()), int(finite.sum())
    inf = elements.numel() - count - nan
    if not count:
        return TensorStatistics(*head, nan=nan, inf=inf)
    lowest = float(torch.where(finite, elements, math.inf).min())
    highest = float(torch.where(finite, elements, -math.inf).max())
    total = float(torch.where(finite, elements, 0.0).sum(dtype=torch.float64))
    return TensorStatistics(*head, lowest, highest, total / count, nan, inf)
