"""Observation of a sharded model: what is on the live model, compared with the plan, as a report.

Every value is read off live modules, parameters, meshes and files, never off the config.
"""
