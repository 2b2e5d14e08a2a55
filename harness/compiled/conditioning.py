"""What harness.conditioning says of windows, one small matrix after the other instead of a batch per operation.

Singular values by one-sided Jacobi, the largest eigenvalue of a symmetric matrix by cyclic Jacobi: Golub and Van Loan,
Matrix Computations, 4th ed., sections 8.5 and 8.6.3. At 4 x 4 a call into LAPACK costs more than the rotations.
"""

from __future__ import annotations

import math

import numpy as np

from harness.compiled.common import F1, F2, F4, F5, compiled
from harness.compiled.rounding import MAGNITUDE, bits, number

SWEEPS = 40  # quadratic convergence needs five or six; a matrix that is not finite never gets there


@compiled("float64, float64", "UniTuple(float64, 2)")
def rotation(difference, product):
    """cos and sin that annul `product` between two entries whose diagonal differs by `difference`."""
    zeta = difference / (2.0 * product)
    t = math.copysign(1.0, zeta) / (abs(zeta) + math.sqrt(1.0 + zeta * zeta))
    c = 1.0 / math.sqrt(1.0 + t * t)
    return c, c * t


@compiled(f"{F2}, {F1}", "UniTuple(float64, 2)")
def extreme_singular_values(X, square):
    """Largest and smallest singular value of X [m, m], whose rows become orthogonal; square [m] is scratch."""
    m = X.shape[0]
    # what rounding leaves of an orthogonal pair
    tolerance = (m * 2.2e-16) ** 2
    largest, smallest = 0.0, np.inf
    for _ in range(SWEEPS):
        for i in range(m):
            square[i] = 0.0
            for k in range(m):
                square[i] += X[i, k] * X[i, k]
        done = True
        for i in range(m):
            for j in range(i + 1, m):
                product = 0.0
                for k in range(m):
                    product += X[i, k] * X[j, k]
                if product * product <= tolerance * square[i] * square[j]:
                    continue
                done = False
                cos, sin = rotation(square[j] - square[i], product)
                moved = product * sin / cos
                square[i], square[j] = square[i] - moved, square[j] + moved
                for k in range(m):
                    u = X[i, k]
                    X[i, k] = cos * u - sin * X[j, k]
                    X[j, k] = sin * u + cos * X[j, k]
        if done:
            break
    total = 0.0
    for i in range(m):
        largest, smallest, total = max(largest, square[i]), min(smallest, square[i]), total + square[i]
    if math.isnan(total):
        return np.nan, np.nan
    return math.sqrt(largest), math.sqrt(smallest)


@compiled(f"{F2}", "float64")
def largest_eigenvalue(X):
    """Of a symmetric X [m, m], which is used up: it becomes diagonal."""
    m = X.shape[0]
    for _ in range(SWEEPS):
        off, whole = 0.0, 0.0
        for i in range(m):
            for j in range(m):
                whole += X[i, j] * X[i, j]
                off += X[i, j] * X[i, j] if i != j else 0.0
        # what is left moves an eigenvalue by its last bits at most
        if off <= 1e-31 * whole:
            break
        for i in range(m):
            for j in range(i + 1, m):
                if X[i, j] == 0.0:
                    continue
                cos, sin = rotation(X[j, j] - X[i, i], X[i, j])
                for k in range(m):
                    u = X[k, i]
                    X[k, i] = cos * u - sin * X[k, j]
                    X[k, j] = sin * u + cos * X[k, j]
                for k in range(m):
                    u = X[i, k]
                    X[i, k] = cos * u - sin * X[j, k]
                    X[j, k] = sin * u + cos * X[j, k]
                X[i, j] = X[j, i] = 0.0
    largest = X[0, 0]
    for i in range(m):
        largest = max(largest, X[i, i])
    return largest


@compiled(f"{F5}, {F5}, {F4}, {F4}")
def conditioning(A, T, g, out):
    """out [W, B, HV, 5] as harness.conditioning has them, from A, T [W, B, HV, m, m] and g [W, B, HV, m]."""
    W, B, HV, m = g.shape
    L, power, square = np.empty((m, m)), np.empty((m, m)), np.empty(m)
    for w in range(W):
        for b in range(B):
            for h in range(HV):
                a, t = A[w, b, h], T[w, b, h]
                row, inverse_row, skeel, largest = 0.0, 0.0, 0.0, 0.0
                for i in range(m):
                    x, y = 0.0, 0.0
                    for j in range(m):
                        L[i, j] = a[i, j] + (1.0 if i == j else 0.0)
                        power[i, j] = abs(a[i, j])
                        largest = max(largest, power[i, j])
                        x += abs(L[i, j])
                        y += abs(t[i, j])
                    row, inverse_row = max(row, x), max(inverse_row, y)
                # A, T and I + A are lower triangles
                for i in range(m):
                    total = 0.0
                    for j in range(i + 1):
                        for k in range(j, i + 1):
                            total += abs(t[i, k]) * abs(L[k, j])
                    skeel = max(skeel, total)
                for p in range(2, m):
                    for i in range(m - 1, p - 1, -1):
                        for j in range(i - p + 1):
                            total = 0.0
                            for k in range(j + 1, i - p + 2):
                                total += power[i, k] * abs(a[k, j])
                            power[i, j] = total
                            largest = max(largest, total)
                low, high, G = 0.0, 0.0, 0.0
                for i in range(m):
                    G += g[w, b, h, i]
                    low, high = min(low, G), max(high, G)
                most, least = extreme_singular_values(L, square)
                found = out[w, b, h]
                found[0], found[1], found[2] = most / least, row * inverse_row, skeel
                found[3], found[4] = largest, high - low


@compiled(f"{F5}, {F5}, {F5}, {F4}, {F4}, {F4}, {F5}, boolean, boolean, {F4}, {F5}")
def inner(A, T, P, beta, before, eG, E, wide, operator, out, XP):
    """out [W, B, HV, 3]: residual, norm of the window operator, its spectral radius where the norm settles that.

    P [W, B, H, 2m, m] keys times keys, then more; the rest as harness.conditioning names it. A radius of -1 is open:
    e^{G_m} I - X P decides, and XP [W, B, HV, m, m] has that product.
    """
    W, B, HV, m = beta.shape
    group = HV // P.shape[2]
    X, root, Z, Y = np.empty((m, m)), np.zeros((m, m)), np.empty((m, m)), np.empty((m, m))
    for w in range(W):
        for b in range(B):
            for h in range(HV):
                a, t, p, e = A[w, b, h], T[w, b, h], P[w, b, h // group], E[w, b, h]
                found, product, last = out[w, b, h], XP[w, b, h], eG[w, b, h, m - 1]
                worst, finite = 0, True
                for i in range(m):
                    for j in range(i):
                        total = t[i, j]
                        for k in range(m):
                            total += a[i, k] * t[k, j]
                        worst = max(worst, bits(total) & MAGNITUDE)
                    for j in range(m):
                        X[i, j] = beta[w, b, h, i] * before[w, b, h, i] * t[j, i] * e[m - 1, j]
                        finite &= math.isfinite(X[i, j])
                found[0], found[1], found[2] = number(worst), np.nan, np.nan
                if not (finite and operator):
                    continue
                for i in range(m):
                    for j in range(m):
                        product[i, j], Y[i, j] = 0.0, 0.0
                        for k in range(m):
                            product[i, j] += X[i, k] * p[k, j]
                            Y[i, j] += p[i, k] * X[k, j]
                        # rounding can push a Gram matrix of repeated keys below zero by its own size
                        if j <= i:
                            total = p[i, j] + (1e-13 if i == j else 0.0)
                            for k in range(j):
                                total -= root[i, k] * root[j, k]
                            root[i, j] = math.sqrt(max(total, 0.0)) if i == j else total / root[j, j]
                for i in range(m):
                    for j in range(m):
                        Z[i, j] = -last * (X[i, j] + X[j, i])
                        for k in range(m):
                            Z[i, j] += X[k, i] * Y[k, j]
                for i in range(m):
                    for j in range(m):
                        Y[i, j] = 0.0
                        for k in range(j, m):
                            Y[i, j] += Z[i, k] * root[k, j]
                for i in range(m):
                    for j in range(m):
                        Z[i, j] = 0.0
                        for k in range(i, m):
                            Z[i, j] += root[k, i] * Y[k, j]
                outside = last if wide else 0.0
                norm = math.sqrt(max(last * last + largest_eigenvalue(Z), 0.0))
                found[1] = max(norm, outside)
                found[2] = -1.0 if norm > last * (1 + 1e-12) or not wide else outside
