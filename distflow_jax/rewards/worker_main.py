"""A reward worker process: loads a reward function and scores requests until its pool closes.

Started as `python -m distflow_jax.rewards.worker_main SOCKET_FD PARENT_PID`. Not through
multiprocessing, whose spawn imports the parent's main script again, and all of JAX with it.
"""

import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from distflow_jax.rewards.function_calls import score_requests
from distflow_jax.rewards.registry import LOAD
from distflow_jax.rewards.reward_function import load_reward

PARENT_CHECK_SECONDS = 0.5


def main(connection: Connection) -> None:
    """Serves a connection until it closes.

    The first message is (arguments of `load_reward`, options of `score_requests`); the answer is
    ("ready", kind) with kind "row", "async" or "batch", or ("error", exception). Each further
    message is a list of RewardRequest or VoteRequest; the answer is a list of RewardResult.
    """
    named, options = connection.recv()
    try:
        if named[0] in LOAD:
            LOAD[named[0]](named[1])
        reward = load_reward(*named)
    except (ValueError, FileNotFoundError) as error:
        connection.send(("error", type(error)(str(error))))
        return
    connection.send(("ready", reward.kind))
    while True:
        try:
            requests = connection.recv()
        except EOFError:
            return
        connection.send(score_requests(reward, requests, **options))


def end_with_parent(parent: int) -> None:
    """Kills this process's group (its own session) once the parent is gone.

    An idle worker ends when its socket closes; this is for a worker whose function hangs.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    socket_fd, parent_pid = map(int, sys.argv[1:])
    # Schedulers send SIGTERM to every process of a job, and the run needs its workers to finish the
    # step. A handler, not SIG_IGN: programs that the function starts would inherit that.
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.set_inheritable(socket_fd, False)  # or a child of the function would keep it open
    threading.Thread(target=end_with_parent, args=(parent_pid,), daemon=True).start()
    main(Connection(socket_fd))
