"""RewardFunction: the functions that `reward.function` names, with their weights and forms."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distflow_jax import user_functions
from distflow_jax.did_you_mean import suggestion
from distflow_jax.rewards.call_forms import (
    BATCH,
    ROLLOUT,
    ROW,
    CallForm,
    batch_arguments,
    form_of,
    required_of,
    rollout_arguments,
    row_arguments,
    takes_any,
)
from distflow_jax.rewards.records import OF_RUN, RewardRequest
from distflow_jax.rewards.registry import REWARDS

_WHAT = "reward function"


@dataclasses.dataclass(frozen=True)
class WeightedFunction:
    """One function. `objects`: values that its Rubric gives by name, such as `parser`."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    objects: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def form(self) -> CallForm:
        """The form by the function's parameters."""
        return form_of(self.function)

    @functools.cached_property
    def is_async(self) -> bool:
        """Whether calling the function returns a coroutine."""
        call = getattr(self.function, "__call__", None)  # noqa: B004  an object's async __call__
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def call(self, request: RewardRequest) -> Any:
        """Calls a function of one response. Raises what it does, and ValueError for its row."""
        if self.form is ROLLOUT:
            own = rollout_arguments(self.function, request, self.kwargs, self.objects)
            return self.function(**own)
        return self.function(**row_arguments(self.function, request), **self.kwargs)

    def call_batch(
        self,
        requests: Sequence[RewardRequest],
        logged: Sequence[dict[str, Any]],
        *,
        conversational: bool,
    ) -> Any:
        """Calls a function of many responses; `logged`: as batch_arguments. Raises as `call`."""
        own = batch_arguments(
            self.function, requests, self.kwargs, logged, conversational=conversational
        )
        return self.function(**own)


@dataclasses.dataclass(frozen=True)
class RewardFunction:
    """One function, or several whose weighted scores are added."""

    parts: tuple[WeightedFunction, ...]

    @functools.cached_property
    def kind(self) -> str:
        """How the whole is called: "batch" if a function is, else "async" if one is, or "row"."""
        if any(part.form is BATCH for part in self.parts):
            return "batch"
        return "async" if any(part.is_async for part in self.parts) else "row"


def load_reward(
    spec: str, kwargs: Mapping[str, Any], weights: Sequence[float] = ()
) -> RewardFunction:
    """Loads `gsm8k` (built in), `my_module:my_function` or `path/to/file.py:function`.

    After the colon may stand several names, `file.py:format,accuracy`, a list of functions, or a
    Rubric of verifiers: an object with `funcs` and `weights`, or with `rubrics`.

    Args:
      spec: the value of `reward.function`.
      kwargs: the value of `reward.kwargs`; each function gets those that it takes.
      weights: the value of `reward.weights`, one per function; (): 1, or those of the Rubric.

    Raises:
      ValueError, FileNotFoundError: no such function (the message names the nearest), importing
        its module raised, a signature of no known form, an argument in `kwargs` that no function
        takes, another number of weights than of functions, or a name of OF_RUN.
    """
    if ":" not in spec:
        example = "my_module:my_function or path/to/file.py:my_function"
        function = user_functions.load_named(spec, REWARDS, _WHAT, setting=_WHAT, example=example)
        found = [WeightedFunction(spec, function)]
    else:
        named = user_functions.load_objects(spec, _WHAT)
        found = [part for name, value in named.items() for part in _parts(name, value, spec)]
    if not found:
        raise ValueError(f"reward function {spec!r} names no function: it is empty")
    if weights and len(weights) != len(found):
        raise ValueError(
            f"reward.weights has {len(weights)} numbers for {len(found)} functions: "
            f"{', '.join(part.name for part in found)}"
        )
    if weights:
        found = [
            dataclasses.replace(part, weight=weight)
            for part, weight in zip(found, weights, strict=True)
        ]
    for part in found:
        if part.name in OF_RUN and len(found) > 1:  # whose scores are logged by their names
            raise ValueError(
                f"{part.name!r} of reward function {spec!r} has a name under which the run logs "
                "a number itself: choose another"
            )
        _check_signature(part, spec if len(found) == 1 else part.name, kwargs)
    _check_kwargs(found, spec, kwargs)
    taken = [{k: v for k, v in kwargs.items() if _takes(p.function, k)} for p in found]
    return RewardFunction(
        tuple(dataclasses.replace(p, kwargs=own) for p, own in zip(found, taken, strict=True))
    )


def _parts(name: str, value: Any, spec: str) -> Iterator[WeightedFunction]:
    """The functions of a function, of a list of functions, or of a Rubric."""
    if isinstance(value, list | tuple) or hasattr(value, "rubrics"):
        entries = value if isinstance(value, list | tuple) else value.rubrics
        for entry in entries:
            yield from _parts(_name(entry), entry, spec)
    elif hasattr(value, "funcs") and hasattr(value, "weights"):
        objects = dict(getattr(value, "class_objects", {}))
        for function, weight in zip(value.funcs, value.weights, strict=True):
            yield WeightedFunction(_name(function), function, float(weight), objects)
    elif callable(value):
        yield WeightedFunction(name, value)
    else:
        raise ValueError(
            f"reward function {spec!r}: {name} is {value!r}, which cannot be called; name a "
            "function, a list of functions, or a Rubric"
        )


def _check_signature(part: WeightedFunction, shown: str, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError unless a run has a value for each parameter, as far as can be seen."""
    parameters = inspect.signature(part.function).parameters
    shown = f"{shown}{inspect.signature(part.function)}"
    positional_only = {p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY}
    if part.form is ROLLOUT and "parser" in required_of(part.function) - {*part.objects, *kwargs}:
        raise ValueError(
            f"reward function {shown} takes a parser, which its Rubric has: name the Rubric, as in "
            "reward.function=FILE:rubric"
        )
    if part.form.columns and not positional_only:
        return  # any other parameter may be a column of the data
    given = {*ROW.own, *ROW.named, *kwargs}
    unknown = required_of(part.function) - given | positional_only
    if unknown or not ("solution_str" in parameters or takes_any(part.function)):
        raise ValueError(
            f"reward function {shown} must take ({', '.join(ROW.own)}=None) as verl's do, "
            "(prompts, completions, **columns) as TRL's do, or (completion, answer, **columns) as "
            "verifiers' do"
            + (f"; there is no value for {', '.join(sorted(unknown))}" if unknown else "")
        )


def _check_kwargs(parts: Sequence[WeightedFunction], spec: str, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument that the run passes itself, or that no function takes."""
    for key in kwargs:
        if any(key in (*part.form.own, *part.form.named) for part in parts):
            raise ValueError(
                f"reward.kwargs: {key!r} is an argument that the run itself passes; take it out"
            )
        if not any(_takes(part.function, key) for part in parts):
            names = [name for p in parts for name in inspect.signature(p.function).parameters]
            hint = suggestion(key, names) or "take it out of reward.kwargs"
            shown = f"{spec}{inspect.signature(parts[0].function)}" if len(parts) == 1 else spec
            raise ValueError(f"reward.kwargs: {shown} takes no {key!r}; {hint}")


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return name in named or takes_any(function)


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)
