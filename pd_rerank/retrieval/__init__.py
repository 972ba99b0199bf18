"""First stages: Java for Pyserini, indexes, encoders and searchers."""
