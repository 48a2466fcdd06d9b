"""A trainable whose module imports Prefect."""

from prefect import get_run_logger

from tests.trainables.logs_to_run import train as _train

__all__ = ["train"]


def train(config: dict[str, object]) -> object:
    get_run_logger().warning("said at once, %d", 42)
    return _train(config)
