"""The CUDA backend's room: kernel sources and their compiler so far. Floor 6."""
