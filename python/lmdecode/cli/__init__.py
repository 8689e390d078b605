"""Commands of ``python -m lmdecode``: a module each, with ``add_command(commands)``."""
