"""Checks for what users write: suites that plug points pass, and the adjoint test (`docs/testing.md`).

`check_data_channel` is for data channels (`docs/data_channel.md`), `check_launcher` for launchers
(`docs/sessions.md`), `check_adjoint` for functions with gradients, `check_collectives` for a
group's collectives and their speed.
"""

from __future__ import annotations

from functools import partial

from .adjoints import check_adjoint
from .collectives import check_collectives
from .data_channels import check_data_channel
from .launchers import check_launcher

__all__ = ["check_adjoint", "check_collectives", "check_data_channel", "check_launcher"]
# Completion at a prompt offers these.
__dir__ = partial(sorted, __all__)
