"""The versions of the package and of its JSON objects."""

__version__ = "0.1.0"

SCHEMA_VERSION = 1
"""Version of the output of ``--json`` and of ``fsdp_report.json``: increased when a field is removed or its meaning
changes; not when a field is added."""
