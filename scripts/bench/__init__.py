"""The benchmarks. See README.md."""
