"""Reports on sharded models: the state of the live model, compared with the plan.

Every value is read off live modules, parameters, meshes and files, never off the config.
"""
