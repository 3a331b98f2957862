"""Worlds: tasks with exact answers, and the environments in which they are solved."""

from stacklm_hf.worlds.base import Environment, Session, Task
from stacklm_hf.worlds.leaks import decontaminate, is_leak
from stacklm_hf.worlds.research import ResearchEnvironment, World

__all__ = ["Environment", "ResearchEnvironment", "Session", "Task", "World", "decontaminate", "is_leak"]
