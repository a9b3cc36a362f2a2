"""Memory of a step in closed form. ``peak.estimate_memory`` predicts it.

``meta_pass`` runs the model and its loss on the meta device; ``stages`` and ``allocations`` record what is alive,
logits included; ``step`` and ``engines`` add what FSDP holds; ``peak`` finds the largest moment.
"""
