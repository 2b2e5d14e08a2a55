"""What an outside implementation answers: four calls on a state of its own, and nothing of this package to subclass.

Per value head i, with key head i // (HV/H), a token does

  k_hat = k / sqrt(sum k^2 + 1e-6), q_hat = K^-1/2 q / sqrt(sum q^2 + 1e-6)
  S <- e^g S;  d = beta (v - S k_hat);  S <- S + d k_hat';  o = S q_hat        S [V, K]

A step is verify, then commit; read comes between steps. A class or a function that is called without arguments makes
the implementation; a variant file names it (`design:`) and declares what it claims to compute. It may also have

  variant                       the path of that file, so that an entry point alone names both
  fp64 = True                   given fp64 tensors it computes in fp64 throughout: the identity is then held to 1e-12
  clone(state)                  an independent copy; without it copy.deepcopy
  reset(state, slots, initial)  hand slots to new sequences; without it the reuse of slots is not judged
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from harness.ring import RingSpec
from harness.tokens import Shape

__all__ = ["Design", "RingCursors", "RingSpec", "Shape", "Window"]


class Window(NamedTuple):
    """The drafts of n slots, lane 0 the bonus token; m is always ring.max_window.

    Lanes from lengths[i] on hold anything, NaN included, and so may a slot that is not named.
    """

    slots: Tensor  # [n] int32, rising
    lengths: Tensor  # [n] int32, 1..m
    q: Tensor  # [n, H, m, K] before the norm; bf16 where that holds the run's tokens exactly, else fp32
    k: Tensor  # [n, H, m, K]
    v: Tensor  # [n, HV, m, V]
    g: Tensor  # [n, HV, m] fp32 log decay, <= 0; a reset may be -inf
    beta: Tensor  # [n, HV, m] fp32, in [0, 2]


class RingCursors(NamedTuple):
    """Where every slot of the state stands, int32 [slots]; the harness moves them, by the rule of harness.ring.

    Record j of a slot's history is row (cache_base + j) & (L - 1), j < write_pos. An implementation that keeps other
    books, or none, leaves these alone.
    """

    write_pos: Tensor
    cache_base: Tensor
    is_flush: Tensor  # 1: in verify, fold the history before this window; in commit, fold it now


class Design(Protocol):
    """The four calls. Tensors arrive and are expected on the device of `initial`."""

    def create(self, shape: Shape, ring: RingSpec, initial: Tensor) -> Any:
        """A state of len(initial) slots at initial [slots, HV, V, K] fp32; whatever object suits the kernel.

        shape has H, HV, V, K; ring has length, max_window, flush_at, fold_when. V may be fewer rows than the layer's,
        and heads a share of them.
        """

    def verify(self, state: Any, window: Window, cursors: RingCursors) -> tuple[Tensor, Tensor | None]:
        """(o, d) [n, HV, m, V], lanes behind a length holding anything; d None where the kernel does not show it.

        A slot whose is_flush is up folds its history first. Its records go to the rows behind its history.
        """

    def commit(self, state: Any, slots: Tensor, accepted: Tensor, cursors: RingCursors) -> None:
        """Keep accepted[i] tokens of the window just verified on slots[i], [n] int32 both; 0: none of an aborted one.

        cursors stand behind the accepted tokens already.
        """

    def read(self, state: Any, which: str, slots: Tensor, cursors: RingCursors) -> Tensor:
        """The state after the committed tokens, [n, HV, V, K], slots in any order; nothing may change by it.

        which: `served`, what the next output is computed on; `kept`, the checkpoint if the slot folded now.
        """
