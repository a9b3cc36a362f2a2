"""A checkpoint of any format -> a live model and its optimizer, in any world."""
