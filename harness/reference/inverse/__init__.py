"""Ways to apply (I+A)^-1, one per file. To add one: write the file, name it here; every test and option follows.

An inverse forms X from A before the right-hand side is known, then D from R. `explicit` ones form X = T itself and
share D = R T'; the others keep A and solve.

Spelling: name[/[n][r]]   substitution   rhs_solve   doubling   neumann/3   horner/7   newton/2r   block/16   newton/r
  n  the order of a series, the rounds of an iteration, the rows of a block. Without it a series or an iteration goes
     as far as its window needs, and a block is one row: only a number can truncate.
  r  one refinement of what was formed; any explicit inverse takes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.errors import ConfigError
from harness.reference.inverse import block, doubling, horner, neumann, newton, refinement, substitution


class Inverse(NamedTuple):
    """form(A [N, m, m], a) -> X [N, m, m]; solve(R [N, V, m], A, a) -> D, for those that are not explicit.

    order  without rounding X is sum_{p <= order} (-A)^p: (I+A)^-1 for windows up to order + 1, truncated beyond
    alone  the longest window that takes no product of dots.inverse
    """

    form: Callable[[Tensor, Arithmetic], Tensor]
    explicit: bool = True
    solve: Callable[[Tensor, Tensor, Arithmetic], Tensor] | None = None
    order: float = math.inf
    alone: float = 2


class Method(NamedTuple):
    """make(n or None) -> Inverse. counts: what n says, where there is a choice."""

    make: Callable[[Any], Inverse]
    counts: str = ""


def _only(inverse: Inverse) -> Method:
    return Method(lambda n: inverse)


def _series(form: Callable[..., Tensor], n: int | None) -> Inverse:
    return Inverse(partial(form, order=n), order=n or math.inf)


def _newton(n: int | None) -> Inverse:
    order, alone = (2 ** (n + 1) - 1, 1) if n else (math.inf, 2)
    return Inverse(partial(newton.inverse, rounds=n), order=order, alone=alone)


METHODS: dict[str, Method] = {
    "substitution": _only(Inverse(substitution.inverse, alone=math.inf)),
    "rhs_solve": _only(Inverse(lambda A, a: A, explicit=False, solve=substitution.solve, alone=math.inf)),
    "doubling": _only(Inverse(doubling.inverse)),
    "neumann": Method(partial(_series, neumann.inverse), "order"),
    "horner": Method(partial(_series, horner.inverse), "order"),
    "newton": Method(_newton, "rounds"),
    "block": Method(lambda n: Inverse(partial(block.inverse, size=n or 1), alone=n or 1), "rows"),
}


def _refined(inverse: Inverse) -> Inverse:
    return inverse._replace(
        form=lambda A, a: refinement.refined(inverse.form(A, a), A, a), order=2 * inverse.order + 1, alone=1
    )


def parse(key: str, text: Any) -> Inverse:
    """Read `name[/[n][r]]`; ConfigError naming `key` otherwise."""
    found = re.fullmatch(r"(\w+)(?:/(?=.)([1-9]\d{0,3})?(r?))?", text) if isinstance(text, str) else None
    method = METHODS.get(found[1]) if found else None
    if found and method and (method.counts or not found[2]):
        made = method.make(int(found[2]) if found[2] else None)
        if made.explicit or not found[3]:
            return _refined(made) if found[3] else made
    spellings = [name + (f"[/{m.counts}]" if m.counts else "") for name, m in METHODS.items()]
    raise ConfigError(
        f"{key}: {text!r} is no inverse; have {', '.join(spellings)}, and explicit ones refined: newton/3r"
    )


# what the tests go through: every method, in full and cut short
INVERSES: dict[str, Inverse] = {
    name: parse("inverse", name)
    for name in (*METHODS, "neumann/3", "horner/3", "newton/1", "newton/1r", "block/4", "block/16")
}
_parse = lru_cache(partial(parse, "inverse"))


def inverse_of(name: str) -> Inverse:
    """The inverse of that spelling. Raises ConfigError for any other text."""
    return INVERSES.get(name) or _parse(name)
