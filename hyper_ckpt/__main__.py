"""`python -m hyper_ckpt`: the same as the command `hyper-ckpt`."""

from __future__ import annotations

from hyper_ckpt.cli import main

if __name__ == "__main__":
    main()
