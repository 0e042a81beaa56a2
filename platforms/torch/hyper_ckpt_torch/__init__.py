"""The PyTorch platform of hyper-ckpt. Importing this package does not import torch."""
