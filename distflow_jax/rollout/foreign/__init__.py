"""Engines that are not ours, behind one protocol: token ids in, ids and log-probs out."""
