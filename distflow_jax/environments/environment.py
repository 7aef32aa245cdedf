"""The protocol of environments, which answer the model between two turns of a response.

    class Guess:
        def __init__(self, tokenizer, *, highest=100): ...
        def reset(self, prompt): ...                     # once, before the first token
        def step(self, tokens, text) -> Turn: ...        # after each turn of the model
        def close(self): ...                             # if there is one: when the response ends

Each method may be `async`: those run in one event loop, which they must not block. Others have
threads, not always the same one. Every response has an object of its own, which is called by one at
a time, so its state may be plain attributes.

What a method raises is no answer to the model: it means that something failed that the model has
not to do with. A turn that is wrong gets a Turn that says so. The call is then made again: on a new
object that is reset and given the turns so far, and must answer them alike. With the attribute
`repeatable = True` the same object is asked again, which no failed call may have changed. The
attribute `counts`, of a class, has the names of numbers that every response logs: 0 where no turn
does.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from distflow_jax.batch import Prompt


@dataclasses.dataclass(frozen=True, eq=False)
class Shown:
    """An observation with pictures, for a model that sees.

    `text` has one `<image>` for each of `images`, in their order; an image is uint8 [height, width,
    3] or a picture of Pillow. With a `role` ("user") the text is written as a turn of the model's
    chat template; else it is put behind the sampled ids as it is.
    """

    text: str
    images: Sequence[Any] = ()
    role: str | None = None


@dataclasses.dataclass(frozen=True)
class Turn:
    """An environment's answer to one turn of the model.

    `observation` is what the model reads before it goes on: token ids int [M]; text, which is
    encoded by itself and put behind the ids that were sampled; or Shown, text with pictures. It is
    looked over where the response ends. `reward` is added to the response's score. `logged` holds
    numbers that are summed over the turns of a response and reported as `environment/{name}`.
    """

    observation: Any = ""
    reward: float = 0.0
    done: bool = False
    logged: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Environment(Protocol):
    """See the head of this file. `close`, `repeatable` and `counts` are optional."""

    def reset(self, prompt: Prompt) -> Any:
        """Begins anew. What it returns, ids, text or Shown, the model reads after the prompt.

        None for nothing. It must be the same for all responses to a prompt, which are compared with
        each other.
        """

    def step(self, tokens: np.ndarray, text: str) -> Turn:
        """Answers a turn of the model: its ids int32 [T], the end token included, and its text."""
