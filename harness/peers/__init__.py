"""Other projects' implementations of the same decode, each an optional extra.

A peer is one module: its docstring names the source path, `load` returns the peer's own function or refuses with a
HarnessError that names the extra, `inputs` turns a decode into its arguments, `decode` is one timed pass.
"""
