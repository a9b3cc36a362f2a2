"""Behaviors of users' scripts: each function is one, written as for one process, with plain Trainers and Accelerators.

``run.py`` runs many of them in one process per rank. ``ecosystem/grouped.py`` lists, starts and compares them.
"""
