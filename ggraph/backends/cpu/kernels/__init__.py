"""The kernels: what they compute, and how weights lie in memory for them."""
