"""The readable designs compiled for the CPU: same sites, same modes, loops over heads and rows instead of tensors.

What a torch step costs there is the number of its operations, not their size; these kernels have one call a step.
harness.reference says what they compute, and the tests hold the two together.
"""
