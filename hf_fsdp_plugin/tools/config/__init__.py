"""``hf-fsdp config``: asks for settings and writes a config; the edits of YAML of all tools."""
