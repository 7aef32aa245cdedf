"""Stand-in for seqio: only what JetStream 0.2.2 imports (see vocabularies.py)."""
