"""ggraph: a tensor-graph runtime that proves its memory plans before it runs them."""
