"""Draft heads from every layout in the wild, to one form."""
