"""The regression gate: a seeded suite, measured and held against baselines by rules that NaN cannot pass.

`python -m harness.gate check` and `accept`; README.md of this folder states the rules.
"""
