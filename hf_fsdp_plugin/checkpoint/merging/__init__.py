"""Merges the model of any checkpoint into a Hugging Face folder, with bounded memory."""
