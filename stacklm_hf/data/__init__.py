"""From trajectories to training data: the store, the filter, the dataset, its split by role.

The names below are imported on first use: the store and the filter, which collecting needs, come without `datasets`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stacklm_hf.data.dataset import (
        BuildReport,
        SupervisedShare,
        build_dataset,
        check_columns,
        load_rows,
        save_dataset,
        supervised_share,
        trajectory_messages,
    )
    from stacklm_hf.data.filters import FilterResult, RejectReason, TrajectoryFilter, filter_trajectories
    from stacklm_hf.data.roles import split_roles
    from stacklm_hf.data.store import StoreLockedError, TrajectoryStore, read_trajectories

_HOMES = {
    "BuildReport": "dataset",
    "FilterResult": "filters",
    "RejectReason": "filters",
    "StoreLockedError": "store",
    "SupervisedShare": "dataset",
    "TrajectoryFilter": "filters",
    "TrajectoryStore": "store",
    "build_dataset": "dataset",
    "check_columns": "dataset",
    "filter_trajectories": "filters",
    "load_rows": "dataset",
    "read_trajectories": "store",
    "save_dataset": "dataset",
    "split_roles": "roles",
    "supervised_share": "dataset",
    "trajectory_messages": "dataset",
}

__all__ = [
    "BuildReport",
    "FilterResult",
    "RejectReason",
    "StoreLockedError",
    "SupervisedShare",
    "TrajectoryFilter",
    "TrajectoryStore",
    "build_dataset",
    "check_columns",
    "filter_trajectories",
    "load_rows",
    "read_trajectories",
    "save_dataset",
    "split_roles",
    "supervised_share",
    "trajectory_messages",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
