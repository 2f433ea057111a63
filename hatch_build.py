"""Build hook: ships `conf/` inside the wheel as `runner/conf`.

An editable install reads `conf/` from the checkout, so nothing is copied there: a copy would go stale.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShipConf(BuildHookInterface):
    """Adds the config tree to wheels, and only to those that are not editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Register `conf/` for the build called `version` (`standard` or `editable`)."""
        if version != "editable":
            build_data["force_include"]["conf"] = "runner/conf"
