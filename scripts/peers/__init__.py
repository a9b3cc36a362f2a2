"""Runs the test suites of other libraries with and without the plugin. Started by ``scripts/run_peers.py``."""
