"""Fuzzing, soaking, seeded bugs, other libraries' answers to odd layouts."""
