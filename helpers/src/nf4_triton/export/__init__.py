"""What reads 4-bit checkpoints and writes them in 16 bit."""
