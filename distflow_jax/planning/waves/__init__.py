"""Plans of steps in waves."""
