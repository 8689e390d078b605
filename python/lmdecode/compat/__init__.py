"""The ops under the names and rules of other libraries: ``ascend``."""
