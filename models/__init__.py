"""Graph builders, one file per architecture, and the runner. Installed as `ggraph_models`."""
