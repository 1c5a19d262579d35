"""`torch.UntypedStorage(device="remote")` is refused: torch's C++ would end the process.

It looks for the device's allocator of this process's memory, and there is none.
"""

from __future__ import annotations

import torch

from ..errors import NotSupportedError, drop_frames


def install_storages() -> None:
    """Have storages on the device "remote" refused, from now on; `TypedStorage` and `.to` make these too."""
    make = torch.UntypedStorage.__new__

    def checked(cls: type, *args: object, **kwargs: object) -> object:
        device = kwargs.get("device")
        if isinstance(device, (str, torch.device)) and torch.device(device).type == "remote":
            try:
                raise NotSupportedError(
                    f"a storage is memory of this process, and {str(device)!r} has none here. Make a tensor: "
                    f'torch.empty(nbytes, dtype=torch.uint8, device="{device}")'
                )
            except NotSupportedError as error:
                drop_frames(error)
                raise
        return make(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = checked  # type: ignore[method-assign, assignment]
