"""Other engines, recorded and judged."""
