"""Float32 parameters in two halves of 16 bits: a bfloat16 and what it lacks."""
