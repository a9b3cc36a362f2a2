"""Where every tensor of a checkpoint lies, for every format in use, and the manifest. No torch."""
