"""`sync`: what trackers did not get while a run went on."""

from __future__ import annotations

from collections.abc import Sequence

from runner.config.errors import FAILED, OK, UserError
from runner.tracking.trackers.delivery import Delivery, stored_trackers
from runner.tracking.trackers.feeder import sentence_of
from runner.verbs._errors import print_error
from runner.verbs._folders import checked_folder, split_words


def main(argv: Sequence[str]) -> int:
    """Send the points that MLflow or W&B did not get yet, and how the run ended: `sync RUN [RUN ...]`, runs or sweeps.

    Points that have arrived are not sent again. The address comes from the run; one with a password, which files do not
    hold, from MLFLOW_TRACKING_URI.
    """
    words, _ = split_words("sync", argv, {})
    if not words:
        raise UserError("sync", "needs run directories, got nothing", "python -m runner sync outputs/digits/<run>")
    folders = [checked_folder("sync", word, "run directories, sweeps and folders of them") for word in words]
    deliveries = [delivery for folder in folders for delivery in stored_trackers(folder)]
    return max(map(_sync, deliveries), default=OK)


def _sync(delivery: Delivery) -> int:
    delivery.over = delivery.dead = True
    name = f"{delivery.directory}: {delivery.name}"
    try:
        sent, asked = delivery.sync()
    except (Exception, SystemExit) as error:
        print_error(
            f"{delivery.directory}: {error if isinstance(error, UserError) else sentence_of(error, delivery.address)}"
        )
        return FAILED
    finally:
        delivery.close()
    print(f"{name}: {sent} points sent" if asked else f"{name} has everything")
    return OK
