"""The switch: which functions of other libraries dequantize, what answers their calls, on and off."""
