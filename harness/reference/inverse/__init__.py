"""Ways to apply (I+A)^-1, one per file. To add one: write the file, name it here; every test and option follows.

An inverse forms X from A before the right-hand side is known, then D from R. `explicit` ones form X = T itself and
share D = R T'; the others keep A and solve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.reference.inverse import doubling, substitution


class Inverse(NamedTuple):
    """form(A [N, m, m], a) -> X [N, m, m]; solve(R [N, V, m], A, a) -> D, for those that are not explicit."""

    form: Callable[[Tensor, Arithmetic], Tensor]
    explicit: bool = True
    solve: Callable[[Tensor, Tensor, Arithmetic], Tensor] | None = None


INVERSES: dict[str, Inverse] = {
    "substitution": Inverse(substitution.inverse),
    "rhs_solve": Inverse(lambda A, a: A, explicit=False, solve=substitution.solve),
    "doubling": Inverse(doubling.inverse),
}
