"""Measurements: the CPU, drafts, and the peers they are compared with."""
