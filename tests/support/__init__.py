"""Sample inputs, random searches and oracles that several folders of tests use."""
