"""Programs of this repository, which ``python -m scripts.NAME`` runs."""
