"""`python -m hyper_ckpt.cli`."""

from __future__ import annotations

from hyper_ckpt.cli import main

main()
