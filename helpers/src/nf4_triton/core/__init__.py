"""What launches: kernels, settings, launches, operators, states, and the reference."""
