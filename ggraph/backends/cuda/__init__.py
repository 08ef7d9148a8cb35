"""The CUDA backend's room; this version has no CUDA backend. Floor 6."""
