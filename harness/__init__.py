"""ReplaySSM harness: does a GDN ring/checkpoint decode drift, where, and what does preventing it cost?"""

__version__ = "0.1.0"
