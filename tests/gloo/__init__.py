"""Tests with real ranks."""
