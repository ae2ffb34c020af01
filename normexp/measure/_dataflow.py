"""Which module feeds which: recorded from one forward pass, by the identity of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Stands for a use of a tensor by anything but one of the watched modules.
ELSEWHERE = ""


@dataclass
class Flow:
    """What one forward pass did with the watched modules.

    Attributes:
        calls: How often each was entered.
        inputs: The only tensor that each was called with, for those called with one.
        outputs: The tensor that each returned.
        users: By the number of a tensor (``id``), the watched modules that it was given to as
            their only input; ELSEWHERE for any other use: an operation outside of them, or the
            model's output.
        leaks: Modules whose own parameters were used outside of them.
        kept: Every tensor whose number is noted, so that no other tensor gets it.
    """

    calls: Counter[str] = field(default_factory=Counter)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    users: dict[int, Counter[str]] = field(default_factory=dict)
    leaks: set[str] = field(default_factory=set)
    kept: list[Tensor] = field(default_factory=list)

    def users_of(self, tensor: Tensor) -> Counter[str]:
        """Return the counts of a tensor's users, noted from now on."""
        if id(tensor) not in self.users:
            self.kept.append(tensor)
        return self.users.setdefault(id(tensor), Counter())

    def only_user(self, path: str) -> str | None:
        """Return the one watched module that takes a module's output, None if others do too."""
        output = self.outputs.get(path)
        users = self.users.get(id(output), Counter())
        if output is None or users.total() != 1:
            return None
        return next(iter(users)) or None


def record_flow(model: nn.Module, watched: Iterable[str], inputs: Tensor) -> Flow:
    """Run the model once and tell how data flows between the watched modules.

    Every operation that reaches torch's dispatcher is seen, whether it is called by a module, a
    function or compiled code; so "used nowhere else" holds for this input, and is not read off
    the order of the modules.

    Args:
        model: The model, in eval mode.
        watched: Paths of the modules, none inside another.
        inputs: A batch.
    """
    flow = Flow()
    frames: list[str] = []
    modules = {path: model.get_submodule(path) for path in watched}
    owners = {id(p): path for path, module in modules.items() for p in module.parameters()}

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types here
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            frame = frames[-1] if frames else ELSEWHERE
            for leaf in tree_leaves((args, kwargs or {})):
                if not isinstance(leaf, Tensor):
                    continue
                if id(leaf) in flow.users and leaf is not flow.inputs.get(frame):
                    flow.users[id(leaf)][ELSEWHERE] += 1
                if owners.get(id(leaf), frame) != frame:
                    flow.leaks.add(owners[id(leaf)])
            return func(*args, **(kwargs or {}))

    def enter(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flow.calls[path] += 1
        frames.append(path)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # None stands for what is not given, such as a mask.
        given = [argument for argument in args if argument is not None]
        if len(tensors) == 1 and len(given) == 1 and args[0] is tensors[0]:
            flow.inputs[path] = args[0]
            flow.users_of(args[0])[path] += 1
        else:
            flow.inputs.pop(path, None)
            for tensor in tensors:
                flow.users_of(tensor)[ELSEWHERE] += 1

    def leave(path: str, output: object) -> None:
        frames.pop()
        if isinstance(output, Tensor):
            flow.outputs[path] = output
            flow.users_of(output)

    with ExitStack() as stack:
        for path, module in modules.items():
            before = module.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: enter(path, args, kwargs), with_kwargs=True
            )
            after = module.register_forward_hook(lambda _, __, y, path=path: leave(path, y))
            stack.callback(before.remove)
            stack.callback(after.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(Watch())  # type: ignore[no-untyped-call]
        result = model(inputs)
    for leaf in tree_leaves(result):
        if id(leaf) in flow.users:
            flow.users[id(leaf)][ELSEWHERE] += 1
    return flow
