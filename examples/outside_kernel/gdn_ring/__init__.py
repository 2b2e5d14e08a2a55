"""A GDN ring kernel in plain torch, to be copied and filled with one's own."""
