"""`dr.nn.replace_modules`: other modules in the place of those that a rule names."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..errors import UsageError, without_our_frames

Rule = Callable[[str, nn.Module], nn.Module | None]


@without_our_frames
def replace_modules(model: nn.Module, rule: Rule) -> list[str]:
    """Put another module in the place of each one for which a rule gives one. Return their paths.

    One module replaces a module that stands at several places. The rule is not asked about what stands inside
    a module that it replaces.

    Args:
        rule: it gets the path of a module in the model, as "h.3.mlp", and the module. It returns the new one,
            or None to keep what is there.

    Raises:
        UsageError: the rule would replace the model itself, or returns something else.
    """
    found: dict[int, nn.Module | None] = {}
    replaced: list[str] = []

    def asked(path: str, module: nn.Module) -> nn.Module | None:
        if id(module) not in found:
            new = rule(path, module)
            if new is not None and not isinstance(new, nn.Module):
                raise UsageError(f"the rule gives a module or None, got {new!r:.80} for {path!r}")
            found[id(module)] = None if new is module else new
        return found[id(module)]

    def visit(path: str, module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            inner = f"{path}.{name}".strip(".")
            new = asked(inner, child)
            if new is None:
                visit(inner, child)
        for name, kept in list(module._modules.items()):
            if kept is not None and (new := found.get(id(kept))) is not None:
                module._modules[name] = new
                replaced.append(f"{path}.{name}".strip("."))

    if asked("", model) is not None:
        raise UsageError("the rule gives another module for the model itself (the path is ''): use that one")
    visit("", model)
    return replaced
