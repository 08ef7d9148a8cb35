"""From a model to tokens: samplers, the engine and its drafters."""
