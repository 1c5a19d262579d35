"""The suites that plug points pass, for who writes one.

`check_data_channel` is for data channels (`docs/data_channel.md`), `check_launcher` for launchers
(`docs/sessions.md`).
"""

from __future__ import annotations

from .data_channels import check_data_channel
from .launchers import check_launcher

__all__ = ["check_data_channel", "check_launcher"]
