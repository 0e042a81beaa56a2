"""What users call. Each call is a short story told in terms of the rows above."""
