"""The report: the state of the sharded model, compared with the plan.

Every value is read from live modules, parameters, meshes and files, never from the config.
"""
