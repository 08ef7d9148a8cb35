"""The op set: one file per family, one record per op. Floor 4.

Importing this package fills the registry of `ggraph.tensor`. Every function here builds a tensor;
what an op means is its `reference`, kept beside it.
"""
