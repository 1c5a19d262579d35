"""Three recipes: what each layer of a model takes, what gave the first NaN, other layers by a rule.

    $ python examples/25_looking_inside.py
    milliseconds of: 0, 1, 2, the whole
    FloatingPointError: aten.log.default was the first to give NaN
    Sequential(Linear, SiLU, Linear)

Each is ten lines to copy.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import distruntime as dr


def time_layers(model: nn.Module, *args: torch.Tensor) -> dict[str, float]:
    """Return the milliseconds of each layer on its worker, with those of its children, by name.

    The first call takes longer.
    """
    begun: dict[nn.Module, dr.Event] = {}
    ended: dict[nn.Module, dr.Event] = {}

    def now() -> dr.Event:
        return dr.current_stream().record_event(dr.Event(enable_timing=True))

    enter = register_module_forward_pre_hook(lambda m, _: begun.update({m: now()}))
    leave = register_module_forward_hook(lambda m, *_: ended.update({m: now()}))
    with enter, leave:
        model(*args)
    return {name: begun[m].elapsed_time(ended[m]) for name, m in model.named_modules() if m in ended}


class FirstNaN(TorchDispatchMode):
    """Asks after each operator, so a traceback ends at the line that gave the first NaN.

    Each question costs a round trip.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if "empty" not in str(func) and any(x.isnan().any() for x in made):
            raise FloatingPointError(f"{func} was the first to give NaN")
        return result


def replace(model: nn.Module, kind: type[nn.Module], by: type[nn.Module]) -> None:
    for path, module in list(model.named_modules()):
        if isinstance(module, kind):
            model.set_submodule(path, by())


def main() -> None:
    with dr.init_master_worker(world_size=1, quiet=True):
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).to("remote")
        x = torch.ones(4, 8, device="remote")
        print("milliseconds of:", ", ".join(sorted(name or "the whole" for name in time_layers(model, x))))
        try:
            with FirstNaN():  # type: ignore[no-untyped-call]
                torch.log(x - 2.0).sum().sqrt()
        except FloatingPointError as error:
            print(f"{type(error).__name__}: {error}")
        replace(model, nn.GELU, nn.SiLU)
        print(f"{type(model).__name__}({', '.join(type(layer).__name__ for layer in model)})")


if __name__ == "__main__":
    main()
