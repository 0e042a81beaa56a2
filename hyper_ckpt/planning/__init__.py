"""Pure functions from descriptions to plans: values in, values out."""
