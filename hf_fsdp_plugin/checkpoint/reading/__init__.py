"""Loads a checkpoint of any format into a live model and its optimizer, with any world size."""
