"""A module that lives here and whose parameters a master trains: the other end of `dr.RemoteModule`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import cloudpickle
import torch

from ..values.step import Operator


class Hosted:
    """A module, and the tensors of it that a master has proxies of."""

    def __init__(self, module: object) -> None:
        if not isinstance(module, torch.nn.Module):
            kind = type(module).__name__
            raise TypeError(
                f"dr.RemoteModule takes what makes a torch.nn.Module, and got one that makes a {kind}"
            )
        self.module = module
        self._names = [name for name, _ in module.named_parameters()]

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, object]]:
        """Return the parameters, the buffers, and what a state dict makes of their names."""
        parameters: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        buffers = dict(self.module.named_buffers())
        state = self.module.state_dict(keep_vars=True)
        first = {id(parameter): name for name, parameter in parameters.items()}
        every = self.module.named_parameters(remove_duplicate=False)
        ties = {name: first[id(parameter)] for name, parameter in every if name not in parameters}
        return (
            parameters,
            buffers,
            {
                "parts": [name for name, _ in self.module.named_modules()],
                "ties": ties,
                "kept": [name for name in buffers if name in state],
                "frozen": [name for name, parameter in parameters.items() if not parameter.requires_grad],
            },
        )

    def forward(
        self, parameters: Sequence[torch.Tensor], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call the module with these parameters, which are in its own memory and may want gradients."""
        given = dict(zip(self._names, parameters))
        return torch.func.functional_call(self.module, given, tuple(args), dict(kwargs))

    def train(self, mode: bool, part: str = "") -> None:
        """Set the mode of the module, or of a part."""
        self.module.get_submodule(part).train(mode)

    def requires_grad_(self, requires_grad: bool, part: str = "") -> None:
        """Set whether the parameters of the module, or of a part, require grad."""
        self.module.get_submodule(part).requires_grad_(requires_grad)

    def set_attribute(self, part: str, name: str, value: object) -> None:
        """Set an attribute of a part."""
        setattr(self.module.get_submodule(part), name, value)

    def assign(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Have parameters be in other memory."""
        for name, tensor in parameters.items():
            self.module.get_parameter(name).data = tensor

    def to(self, dtype: torch.dtype) -> None:
        """Convert the parameters and buffers."""
        self.module.to(dtype)

    def packed(self) -> torch.Tensor:
        """Return the module as it moves to another worker."""
        file = io.BytesIO()
        # A class that came with the module is no module's of this worker.
        torch.save(self.module, file, pickle_module=cloudpickle)
        return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpack(packed: torch.Tensor, device: torch.device) -> Hosted:
    """Return a module that has come from another worker, by order of a master that has the key."""
    module: torch.nn.Module = torch.load(
        io.BytesIO(packed.cpu().numpy().tobytes()), map_location="cpu", weights_only=False
    )
    return Hosted(module.to(device))


NAMED: dict[str, Operator] = {"host": Hosted, "unpack": unpack}
