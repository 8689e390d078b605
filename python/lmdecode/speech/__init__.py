"""Speech to text: ``Transcriber``."""
