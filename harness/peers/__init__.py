"""Other projects' implementations of the same decode, each optional.

A peer is one module: its docstring names the source path, `load` returns the peer's own function or refuses with a
HarnessError that names what to install. Of a whole decode, `inputs` makes the arguments and `decode` is one timed pass;
of a kernel, functions bind a Seat (seat.py: the buffers it is handed) to a call.
"""
