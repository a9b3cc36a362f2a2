"""The preflight: a tiny clone of the model runs through every stage of a training on CPU ranks."""
