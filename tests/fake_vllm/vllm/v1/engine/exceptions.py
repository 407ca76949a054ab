"""How the engine dies."""


class EngineDeadError(Exception):
    """The engine is gone."""
