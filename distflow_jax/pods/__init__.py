"""Plans for pods that are not at hand: their chips and links, and what a run would take there."""
