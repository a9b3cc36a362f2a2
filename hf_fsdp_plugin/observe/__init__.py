"""The report: the state of the sharded model, compared with the plan.

Every value is read off live modules, parameters, meshes and files, never off the config.
"""
