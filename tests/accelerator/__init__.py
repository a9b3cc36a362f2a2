"""The simulated accelerator, and its own tests."""
