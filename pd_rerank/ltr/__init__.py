"""Learning to rank from features of a pool: what is computed of it, and the trees that are trained on it."""
