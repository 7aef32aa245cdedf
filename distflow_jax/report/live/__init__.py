"""The live report: a small server of run folders, and the reader that follows their metrics."""
