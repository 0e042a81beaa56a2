"""A sample platform of hyper-ckpt, to be copied. Importing this package imports nothing else."""
