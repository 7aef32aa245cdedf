"""Rows over the ranks of a mesh."""


def spread(rows, ranks):
    """(0, rank, place) of each of `rows` rows over `ranks` ranks, neighbours together."""
    rank = [i * ranks // rows for i in range(rows)]
    return [(0, r, rank[:i].count(r)) for i, r in enumerate(rank)]
