"""Training of EAGLE-3 heads from the target's own answers."""
