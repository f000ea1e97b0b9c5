"""The switch: which library functions dequantize, what replaces them, switching on and off."""
