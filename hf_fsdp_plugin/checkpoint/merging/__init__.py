"""Merging: the model of any checkpoint as a Hugging Face folder, streamed. Does not import torch."""
