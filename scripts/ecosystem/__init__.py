"""The ecosystem suite: public scripts, unchanged, through the plugin. See run_ecosystem.py."""
