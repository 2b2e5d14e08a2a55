"""What every kernel shares: the order of its rounding codes, and how it is compiled."""

from __future__ import annotations

from typing import Any

from numba import njit

CODES = (
    "decay score_left score_acc score score_right history_d history_left history_acc state_acc rhs solve_left solve_acc"
    " inverse d output_left output_acc output store_d fold_d fold_left fold_k fold_right fold_acc checkpoint"
    " step recurrent_left recurrent_acc"
).split()
(DECAY, SCORE_LEFT, SCORE_ACC, SCORE, SCORE_RIGHT, HISTORY_D, HISTORY_LEFT, HISTORY_ACC, STATE_ACC, RHS, SOLVE_LEFT,
 SOLVE_ACC, INVERSE, D, OUTPUT_LEFT, OUTPUT_ACC, OUTPUT, STORE_D, FOLD_D, FOLD_LEFT, FOLD_K, FOLD_RIGHT,
 FOLD_ACC, CHECKPOINT, STEP, RECURRENT_LEFT, RECURRENT_ACC) = range(len(CODES))  # fmt: skip

F1, F2, F3, F4, I1 = (*(f"float64[{':, ' * i}::1]" for i in range(4)), "int64[::1]")


def compiled(arguments: str, result: str = "void") -> Any:
    """Compile at import, or load what an earlier import compiled: one signature, so a wrong type is an error."""
    return njit(f"{result}({arguments})", cache=True, error_model="numpy", nogil=True)


def summing(arguments: str, result: str) -> Any:
    """The same, with sums that may be reordered and fused. Roundings live in functions of their own."""
    flags = {"reassoc", "contract", "nsz"}
    return njit(f"{result}({arguments})", cache=True, error_model="numpy", nogil=True, fastmath=flags)
