"""The Newton-Schulz iteration of Muon (https://kellerjordan.github.io/posts/muon/).

It replaces the singular values of a matrix by values near 1, by products of matrices alone: each
step applies the odd polynomial a s + b s^3 + c s^5 to all of them.
"""

from dataclasses import dataclass

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c: of steep slope at 0; after 5 steps singular values above 1e-3 lie in [0.7, 1.2]."""

EPS = 1e-7
"""Smallest norm by which a matrix is divided, so that zeros stay zeros."""


@dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """The iteration, of `steps` steps in `dtype`.

    With bfloat16 the result equals that of `torch.optim.Muon` bit by bit, which knows no other
    dtype.
    """

    steps: int
    dtype: torch.dtype

    def orthogonalize_(self, matrix: torch.Tensor) -> None:
        """Orthogonalize a matrix of `dtype`, in place."""
        a, b, c = COEFFICIENTS
        # The wide form has the smaller Gram matrix.
        is_tall = matrix.shape[0] > matrix.shape[1]
        wide = matrix.T if is_tall else matrix
        # The Frobenius norm bounds the largest singular value.
        x = wide.div(wide.norm().clamp(min=EPS))
        for _ in range(self.steps):
            gram = x @ x.T
            # b A + c A^2, which times X is b X^3 + c X^5 for singular values.
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)
        wide.copy_(x)

    def flops(self, shape: tuple[int, int]) -> int:
        """Return the floating-point operations for a matrix of `shape`: per step, two products of
        the short side squared with the long side, and one of the short side cubed."""
        short, long = sorted(shape)
        return self.steps * (4 * short * short * long + 2 * short**3)
