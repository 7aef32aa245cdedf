"""Devices of this machine as JAX finds them, as lines of JSON on standard output.

    python -m distflow_jax.commands.doctor.device_probe

A process of its own: a broken plugin may raise, hang or end it. Each line is printed as soon as it
is known.
"""

import json
import logging

import jax
import jax.numpy as jnp

from distflow_jax.config.implementation_table import DECODE, Need, candidates
from distflow_jax.training.attention_choice import AttentionSizes, row_attention

# of the shipped configs for accelerators: rows of 4096 tokens in bfloat16, heads of 64 or 128
_SIZES = AttentionSizes(4096, 2048, 1, 8, 128, "bfloat16", features=frozenset({"shared prompts"}))
_SIDE = 256  # of the matrices that each device multiplies


class _Messages(logging.Handler):
    """Prints what JAX logs about platforms, warnings and failures; it goes on with another one."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text += f" {type(error).__name__}: {error}"
        if record.levelno >= logging.WARNING or "Unable to initialize backend" in text:
            tell("messages", [text])


def tell(name: str, value: object) -> None:
    """Prints one fact as a line of JSON."""
    print(json.dumps({name: value}), flush=True)


def computes(device: jax.Device) -> str:
    """Multiplies two matrices of ones on a device; returns the error, "" for the right result."""
    try:
        ones = jax.device_put(jnp.ones((_SIDE, _SIDE), jnp.bfloat16), device)
        wrong = float(jnp.abs(ones @ ones - _SIDE).max())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return f"a matrix product is off by {wrong}" if wrong else ""


def main() -> None:
    """Prints messages, devices, the attention that they take, and the errors of each device."""
    logger = logging.getLogger("jax")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Messages())
    devices = jax.local_devices()
    platform = devices[0].platform
    memory = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in devices]
    kinds = [device.device_kind for device in devices]
    tell("devices", {"platform": platform, "kinds": kinds, "memory": memory})
    rows = row_attention("auto", platform, _SIZES)
    decode = next(candidates(Need(DECODE, platform, _SIZES.head_dim, _SIZES.dtype)))
    tell("attention", {"rows": f"{rows.name} {rows.why}", "decode": decode.by})
    tell("errors", {str(d.id): error for d in devices if (error := computes(d))})


if __name__ == "__main__":
    main()
