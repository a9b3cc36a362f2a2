"""Optimizers of sharded models: their parameters, whether and how their steps run, clipping of gradients."""
