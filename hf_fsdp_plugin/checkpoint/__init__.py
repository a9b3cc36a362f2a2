"""What a run leaves behind: written whole or not at all, read in any world, verified, merged."""
