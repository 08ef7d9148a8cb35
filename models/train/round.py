"""Matrices rounded while a head learns, as its file will hold them. Needs PyTorch.

A step is computed with rounded matrices, and its gradient applied to the exact ones: the
straight-through estimator (Bengio et al. 2013, arXiv 1308.3432). A head that learns so loses less
by being written in a small type. Rounding is that of the `gguf` package, block by block.
"""

from collections.abc import Callable

import torch

from ggraph import InputError

from .net import DraftNet, Tensor

BLOCK = 32  # numbers that share a scale


def _half(x: Tensor) -> Tensor:
    """As float16 stores it."""
    return x.to(torch.float16).to(x.dtype)


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, d, 1 / d)


def _ranged(x: Tensor, top: int) -> Tensor:
    """Codes 0 .. top from the least number of a block to the largest."""
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    d = (high - low) / top
    codes = ((x - low) * _inverse(d) + 0.5).floor().clamp(0, top)
    return codes * _half(d) + _half(low)


def _offset(x: Tensor, half: int) -> Tensor:
    """Codes -half .. half - 1, -half for the number that is furthest from zero."""
    peak = x.gather(1, x.abs().argmax(1, keepdim=True))
    d = peak / -half
    codes = (x * _inverse(d) + (half + 0.5)).floor().clamp(0, 2 * half - 1) - half
    return codes * _half(d)


def _symmetric(x: Tensor) -> Tensor:
    """Codes -127 .. 127."""
    d = x.abs().amax(1, keepdim=True) / 127
    scaled = x * _inverse(d)
    codes = scaled.sign() * (scaled.abs() + 0.5).floor()
    return codes * _half(d)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "q4_0": lambda x: _offset(x, 8),
    "q4_1": lambda x: _ranged(x, 15),
    "q5_0": lambda x: _offset(x, 16),
    "q5_1": lambda x: _ranged(x, 31),
    "q8_0": _symmetric,
}


def check_kind(kind: str) -> None:
    """InputError for a type that nothing is rounded to."""
    if kind not in KINDS:
        raise InputError(f"no rounding to {kind!r}; known: {', '.join(KINDS)}")


def rounded(matrix: Tensor, kind: str) -> Tensor:
    """A matrix [N, K] as a file of type `kind` gives it back, K in whole blocks."""
    return KINDS[kind](matrix.reshape(-1, BLOCK)).reshape(matrix.shape)


class Rounding:
    """The matrices of a net, which are either exact or rounded. InputError for other types."""

    def __init__(self, net: DraftNet, kind: str) -> None:
        check_kind(kind)
        self.kind = kind
        # Rows that are no whole blocks are not stored in such types.
        self._matrices = [p for p in net.parameters() if p.ndim == 2 and p.shape[1] % BLOCK == 0]
        self._exact: list[Tensor] = []

    def apply(self) -> None:
        """Round; `restore` knows what they were."""
        if self._exact:
            return
        with torch.no_grad():
            for p in self._matrices:
                self._exact.append(p.detach().clone())
                p.copy_(rounded(p, self.kind))

    def restore(self) -> None:
        """Exact again; gradients stay."""
        with torch.no_grad():
            for p, exact in zip(self._matrices, self._exact, strict=False):
                p.copy_(exact)
        self._exact = []
