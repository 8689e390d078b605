"""lmdecode inside other libraries: a subpackage a library, which it imports."""
