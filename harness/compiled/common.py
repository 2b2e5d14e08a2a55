"""What every kernel shares: its rounding codes and flags, the columns of a plan, and how it is compiled."""

from __future__ import annotations

from typing import Any

from numba import njit

CODES = (
    "key state_operand state_left state_right state_acc decay exp score_left score_key score_acc score score_right"
    " history_d history_left history_acc rhs solve_left solve_acc inverse d output_left output_acc output store_k_hat"
    " store_d cumulative store_g fold_d fold_left fold_k fold_right fold_acc checkpoint replayed decayed step"
    " seen_left recurrent_left recurrent_acc snapshot taken"
).split()
(KEY, STATE_OPERAND, STATE_LEFT, STATE_RIGHT, STATE_ACC, DECAY, EXP, SCORE_LEFT, SCORE_KEY, SCORE_ACC, SCORE,
 SCORE_RIGHT, HISTORY_D, HISTORY_LEFT, HISTORY_ACC, RHS, SOLVE_LEFT, SOLVE_ACC, INVERSE, D, OUTPUT_LEFT, OUTPUT_ACC,
 OUTPUT, STORE_K_HAT, STORE_D, CUMULATIVE, STORE_G, FOLD_D, FOLD_LEFT, FOLD_K, FOLD_RIGHT, FOLD_ACC, CHECKPOINT,
 REPLAYED, DECAYED, STEP, SEEN_LEFT, RECURRENT_LEFT, RECURRENT_ACC, SNAPSHOT, TAKEN) = range(len(CODES))  # fmt: skip

# what a design is, as numbers: has low parts, reads them in a verify, keeps cumulative gates, sums decays exactly, has
# a T, reads its checkpoint in two parts, keeps raw inputs, folds by replaying them, adds one record after the other,
# decays a state after S k_hat
FLAGS = "low_k low_d read_low cumulative exact explicit two_parts raw replay in_turn late".split()
LOW_K, LOW_D, READ_LOW, CUMULATE, EXACT_DECAYS, EXPLICIT, TWO_PARTS, RAW, REPLAY, IN_TURN, LATE = range(len(FLAGS))

# one slot in one step: window length, records folded before it, where its history lies and ends, records of it that
# the verify reads, lanes put out and where to; then, after the commit, records folded at once, where the history lies
# now and ends, and which of the slot's grid points this is, or -1
PLAN = "live before base end history keep at after new_base new_end point".split()
LIVE, BEFORE, BASE, END, HISTORY, KEEP, AT, AFTER, NEW_BASE, NEW_END, POINT = range(len(PLAN))

F1, F2, F3, F4, F5 = (f"float64[{':, ' * i}::1]" for i in range(5))
I1, I2, I3 = (f"int64[{':, ' * i}::1]" for i in range(3))


def compiled(arguments: str, result: str = "void") -> Any:
    """Compile at import, or load what an earlier import compiled: one signature, so a wrong type is an error."""
    return njit(f"{result}({arguments})", cache=True, error_model="numpy", nogil=True)


def summing(arguments: str, result: str) -> Any:
    """The same, with sums that may be reordered and fused. Roundings live in functions of their own."""
    flags = {"reassoc", "contract", "nsz"}
    return njit(f"{result}({arguments})", cache=True, error_model="numpy", nogil=True, fastmath=flags)
