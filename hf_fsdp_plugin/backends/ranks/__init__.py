"""Agreement of the ranks: errors, plans and steps that all of them have, and ranks that are missing in a call.

``cluster`` is about their machines: variables of Slurm, ranks per machine, the network of gloo.
"""
