"""Several machines as one cache: who holds which blocks, and how they come over."""
