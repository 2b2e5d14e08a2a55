"""Many runs of one command: plan them, launch them, keep a record of each, and let a sweeper learn from them."""
