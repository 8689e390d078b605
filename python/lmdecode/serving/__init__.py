"""A server of OpenAI's API over an ``Engine``; tokenizers and chat templates, also of commands."""
